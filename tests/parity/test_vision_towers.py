"""Towers and resamplers of MiniCPM-V and OmniLMM against what the originals' code computed in fp32.

Features are compared within 1e-5 (they are up to 4), gradients within 2e-4 of the largest. A gradient needs the whole
model: its decoder is transformers', so that nothing here but the vision module is ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from engine.vision.towers import minicpm_v2, minicpm_v2_6, omnilmm
from engine.vision.towers.minicpm_v2 import MiniCPMV2Vision, MiniCPMV2VisionConfig
from engine.vision.towers.minicpm_v2_6 import MiniCPMV26Vision, MiniCPMV26VisionConfig, position_buckets
from engine.vision.towers.omnilmm import OmniLMMVision, OmniLMMVisionConfig
from engine.vision.towers.resampler import Positions, Resampler, ResamplerConfig
from engine.vision.towers.sizes import Grids
from tests.support.vision_fixtures import VisionFixture, flatten_image

TOLERANCE = 1e-5
PATCH = 14
OMNILMM_PATCH = 512
"""<im_patch> in the fixture's vocabulary."""


def close(actual: Tensor, expected: Tensor, *, atol: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected.reshape(actual.shape), rtol=0, atol=atol)


@dataclass(frozen=True)
class Images:
    """A case's tiles in the engine's form."""

    tiles: list[Tensor]
    grids: Grids

    @classmethod
    def whole(cls, images: Sequence[Tensor]) -> Images:
        """The patches of images [3, height, width]."""
        grids = tuple((one.shape[1] // PATCH, one.shape[2] // PATCH) for one in images)
        return cls([flatten_image(one) for one in images], grids)

    @classmethod
    def strips(cls, fixture: VisionFixture, case: str) -> Images:
        """The patches that MiniCPM-V 2.6 lays side by side."""
        sizes = torch.cat(fixture.series(f"{case}.tgt_sizes")).tolist()
        tiles = [rearrange(one, "c p (n q) -> n (c p q)", q=PATCH) for one in fixture.series(f"{case}.pixel_values")]
        return cls(tiles, tuple((rows, columns) for rows, columns in sizes))

    @property
    def patches(self) -> Tensor:
        return torch.cat(self.tiles)


def read(data_dir: Path, name: str) -> VisionFixture:
    folder = data_dir / "vision" / name
    if not folder.exists():
        pytest.skip(f"{folder} is absent")
    return VisionFixture(name)


def minicpm_v2_0(data_dir: Path) -> tuple[VisionFixture, MiniCPMV2Vision]:
    fixture = read(data_dir, "minicpm-v-2")
    module = MiniCPMV2Vision(MiniCPMV2VisionConfig.from_hf(fixture.hf))
    fixture.load(module, minicpm_v2.CHECKPOINT_PREFIX, "vpm.", "resampler.")
    return fixture, module


def minicpm_v26(data_dir: Path) -> tuple[VisionFixture, MiniCPMV26Vision]:
    fixture = read(data_dir, "minicpm-v-2_6")
    module = MiniCPMV26Vision(MiniCPMV26VisionConfig.from_hf(fixture.hf))
    fixture.load(module, minicpm_v2_6.CHECKPOINT_PREFIX, "vpm.", "resampler.")
    return fixture, module


def omni(data_dir: Path) -> tuple[VisionFixture, OmniLMMVision]:
    fixture = read(data_dir, "omnilmm")
    module = OmniLMMVision(OmniLMMVisionConfig.from_hf(fixture.hf))
    fixture.load(module, omnilmm.CHECKPOINT_PREFIX, "vision_tower.", "resampler.")
    return fixture, module


@pytest.mark.parametrize("case", ["one_image", "two_images", "chat_batch", "chat_sliced"])
def test_minicpm_v2_features(data_dir: Path, case: str) -> None:
    fixture, module = minicpm_v2_0(data_dir)
    images = Images.whole(fixture.series(f"{case}.pixel_values"))
    features = module(images.patches, images.grids).split(module.config.rows_per_tile)
    for index, (tile, grid) in enumerate(zip(images.tiles, images.grids, strict=True)):
        if (vision := fixture.expected.get(f"{case}.vision.{index}")) is not None:
            close(module.vpm(tile[None], (grid,)), vision)
        close(features[index], fixture.expected[f"{case}.resampler.{index}"])


@pytest.mark.parametrize("case", ["one_image", "two_images_slices", "mixed_image_and_text"])
def test_minicpm_v26_features(data_dir: Path, case: str) -> None:
    """The original pads all tiles of the batch to the longest and masks the keys."""
    fixture, module = minicpm_v26(data_dir)
    images = Images.strips(fixture, case)
    close(module(images.patches, images.grids), fixture.expected[f"{case}.resampler"])
    for index, (tile, grid) in enumerate(zip(images.tiles, images.grids, strict=True)):
        if (vision := fixture.expected.get(f"{case}.vision.{index}")) is not None:
            close(module.vpm(tile[None], (grid,)), vision)


@pytest.mark.parametrize(
    "case", ["one_image", "two_samples", "image_size_of_pos_grid", "text_then_image", "chat_training"]
)
def test_omnilmm_features(data_dir: Path, case: str) -> None:
    fixture, module = omni(data_dir)
    images = Images.whole([*fixture.inputs[f"{case}.images"]])
    close(module(images.patches, images.grids), fixture.expected[f"{case}.resampler"])
    vision = module.vision_tower(torch.stack(images.tiles), images.grids)
    close(vision, fixture.expected[f"{case}.vision_with_cls"][:, 1:])


def test_resampler_with_stored_query_positions_and_two_heads(data_dir: Path) -> None:
    fixture = read(data_dir, "minicpm-resampler-256")
    sizes = fixture.hf["v20"]
    module = resampler(sizes["grid_size"] ** 2, sizes, Positions.KEYS_AND_QUERIES)
    fixture.load(module, "v20.", "")
    for index, (x, grid) in enumerate(zip(fixture.series("v20.x"), fixture.series("v20.tgt"), strict=True)):
        close(module(x, (tuple(grid.tolist()),)), fixture.expected[f"v20.out.{index}"])


def test_resampler_of_two_heads_sees_no_padding(data_dir: Path) -> None:
    """What lies behind a tile in the original's batch is garbage, which has no place in ours."""
    fixture = read(data_dir, "minicpm-resampler-256")
    sizes = fixture.hf["v26"]
    module = resampler(sizes["num_queries"], sizes, Positions.KEYS)
    fixture.load(module, "v26.", "")
    for x, (rows, columns), expected in zip(
        fixture.inputs["v26.x"],
        fixture.inputs["v26.tgt_sizes"].tolist(),
        fixture.expected["v26.out"],
        strict=True,
    ):
        close(module(x[None, : rows * columns], ((rows, columns),)), expected)


def resampler(num_queries: int, sizes: dict[str, int], positions: Positions) -> Resampler:
    return Resampler(
        ResamplerConfig(
            num_queries=num_queries, width=sizes["embed_dim"], tower_width=sizes["kv_dim"], positions=positions
        )
    )


def test_position_buckets_are_the_originals(data_dir: Path) -> None:
    path = data_dir / "vision" / "minicpm-v-2_6" / "preprocess.json"
    table = json.loads(path.read_text(encoding="utf-8"))["position_buckets_side70"]
    assert {count: position_buckets(int(count), 70).tolist() for count in table} == table


class WholeModel:
    """A decoder of transformers with a fixture's weights, fed with our features in place of the images' tokens."""

    def __init__(self, fixture: VisionFixture, prefix: str, family: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        hf = fixture.hf
        keys = (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "vocab_size", "rms_norm_eps", "rope_theta", "max_position_embeddings",
        )  # fmt: skip
        config = CONFIG_MAPPING[family](
            **{key: hf[key] for key in keys},
            tie_word_embeddings=False,
            sliding_window=None,
            attn_implementation="eager",
        )
        weights = {
            name.removeprefix(prefix): tensor.clone()
            for name, tensor in fixture.weights.items()
            if name.startswith(prefix) and "vision_tower" not in name and "resampler" not in name
        }
        self.embedding_scale = float(hf.get("scale_emb", 1))
        if "scale_depth" in hf:  # MiniCPM-2B: its scales of branches and of logits are those of linears
            branch = hf["scale_depth"] / math.sqrt(hf["num_hidden_layers"])
            for name, tensor in weights.items():
                if "o_proj" in name or "down_proj" in name:
                    tensor.mul_(branch)
            weights["lm_head.weight"].mul_(hf["dim_model_base"] / hf["hidden_size"])
        self.decoder = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.decoder.load_state_dict(weights)
        self.decoder.requires_grad_(False)

    def logits(self, input_ids: Tensor, places: Tensor, features: Tensor, **more: Tensor) -> Tensor:
        """Args: places: bool [B, S], the tokens that the features replace, in order."""
        embeddings = self.decoder.get_input_embeddings()(input_ids) * self.embedding_scale
        embeddings = embeddings.masked_scatter(places[..., None], features)
        return self.decoder(inputs_embeds=embeddings, use_cache=False, **more).logits


def bounded_places(fixture: VisionFixture, case: str) -> Tensor:
    """Tokens inside the samples' image bounds."""
    places = torch.zeros_like(fixture.inputs[f"{case}.input_ids"], dtype=torch.bool)
    for row in range(places.shape[0]):
        for start, end in fixture.inputs.get(f"{case}.image_bound.{row}", torch.empty(0, 2)).tolist():
            places[row, start:end] = True
    return places


def check_gradients(fixture: VisionFixture, case: str, prefix: str, module: nn.Module, expected_count: int) -> None:
    parameters = {prefix + name: parameter for name, parameter in module.named_parameters()}
    seen = 0
    for name, stride, expected in fixture.gradients(case):
        if name in parameters:
            gradient = parameters[name].grad
            assert gradient is not None, name
            assert (gradient[::stride] - expected).abs().max() <= 2e-4 * expected.abs().max(), name
            seen += 1
    assert seen == expected_count


@pytest.mark.parametrize(
    ("build", "prefix", "family", "case", "count"),
    [
        (minicpm_v2_0, "llm.", "llama", "one_image", 14),
        (minicpm_v2_0, "llm.", "llama", "two_images", 14),
        (minicpm_v26, "llm.", "qwen2", "one_image", 14),
        (minicpm_v26, "llm.", "qwen2", "two_images_slices", 14),
    ],
)
def test_minicpm_v_gradients(
    data_dir: Path,
    build: Callable[[Path], tuple[VisionFixture, MiniCPMV2Vision | MiniCPMV26Vision]],
    prefix: str,
    family: str,
    case: str,
    count: int,
) -> None:
    """Labels of these fixtures are shifted already; padding is on the right and needs no mask."""
    fixture, module = build(data_dir)
    if family == "llama":
        images = Images.whole(fixture.series(f"{case}.pixel_values"))
    else:
        images = Images.strips(fixture, case)
    logits = WholeModel(fixture, prefix, family).logits(
        fixture.inputs[f"{case}.input_ids"],
        bounded_places(fixture, case),
        module(images.patches, images.grids),
        position_ids=fixture.inputs[f"{case}.position_ids"],
        # without one, transformers takes the zeros of padding for the start of another document
        attention_mask=torch.ones_like(fixture.inputs[f"{case}.input_ids"]),
    )
    close(logits, fixture.expected[f"{case}.logits"])
    loss = cross_entropy(logits.flatten(0, 1), fixture.inputs[f"{case}.labels"].flatten())
    loss.backward()
    close(loss.detach(), fixture.expected[f"{case}.loss"])
    check_gradients(fixture, case, "", module, count)


@pytest.mark.parametrize("case", ["one_image", "two_samples"])
def test_omnilmm_gradients(data_dir: Path, case: str) -> None:
    fixture, module = omni(data_dir)
    images = Images.whole([*fixture.inputs[f"{case}.images"]])
    ids, labels = fixture.inputs[f"{case}.input_ids"], fixture.inputs[f"{case}.labels"]
    logits = WholeModel(fixture, "", "mistral").logits(
        ids,
        ids == OMNILMM_PATCH,
        module(images.patches, images.grids),
        attention_mask=fixture.inputs[f"{case}.attention_mask"],
    )
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    close(loss.detach(), fixture.expected[f"{case}.loss"])
    check_gradients(fixture, case, omnilmm.CHECKPOINT_PREFIX, module, 15)
