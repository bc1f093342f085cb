"""MiniCPM-Llama3-V 2.5 where the tiles of a conversation differ in shape, and how its version is told.

The original hands transformers' Idefics2 tower the tiles of a batch, padded with zeros to the longest, and a mask of
patches that it has filled along the wrong axis, so that it is all true; its resampler masks the padding. Both are here
once more, from that tower and torch's own attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from engine.data.collate import rank_batch
from engine.data.row_shape import RowShape
from engine.data.text_reader import build_texts
from engine.errors import UserError
from engine.models.families import family_of
from engine.vision.batch_parts import Images
from engine.vision.data.minicpm_v import MiniCPMV
from engine.vision.minicpm_versions import minicpm_v_version
from engine.vision.towers.minicpm_v2_6 import MiniCPMV26Vision, PatchPlaces
from engine.vision.towers.sizes import Grids
from tests.support.shared_data import shared
from tests.support.vision_data import read_json
from tests.unit.test_vision_data_faults import chat
from tests.unit.test_vision_data_rows import opened, write
from tests.unit.test_vision_modules import V25, VISION, patches_for, random_module

TILES: Grids = ((3, 5), (2, 4), (4, 4), (2, 3))
"""The longest has 16 patches, a length at which this transformers rounds positions as that of the original did."""


def original_features(module: MiniCPMV26Vision, patches: Tensor, grids: Grids) -> Tensor:
    """What the original computes of one batch of tiles, with the parameters of `module`."""
    from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
    from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

    sizes = {key: value for key, value in VISION.items() if key != "model_type"}
    tower = Idefics2VisionTransformer(Idefics2VisionConfig(**sizes, attn_implementation="eager"))
    lengths = [rows * columns for rows, columns in grids]
    padded = pad_sequence(list(patches.split(lengths)), batch_first=True)
    tiles, longest = padded.shape[:2]
    strips = padded.unflatten(2, (3, 2, 2)).permute(0, 2, 3, 1, 4).reshape(tiles, 3, 2, 2 * longest)
    mask = torch.zeros(tiles, 1, longest, dtype=torch.bool)
    for number, length in enumerate(lengths):
        mask[number, :length] = True  # as published: all of the only row
    assert mask.all()
    parameters = dict(module.vpm.named_parameters())
    seen = torch.func.functional_call(tower, parameters, kwargs={"pixel_values": strips, "patch_attention_mask": mask})
    return resampled(module.resampler, seen.last_hidden_state, grids)


def resampled(own: nn.Module, x: Tensor, grids: Grids) -> Tensor:
    width, longest = own.query.shape[1], x.shape[1]
    attention = nn.MultiheadAttention(width, width // 128, batch_first=True)
    values = own.ln_kv(own.kv_proj(x))
    positions = torch.zeros(len(grids), longest, width)
    ignored = torch.ones(len(grids), longest, dtype=torch.bool)
    rates = 10000.0 ** (-np.arange(width // 4, dtype=np.float32) / (width / 4))
    for number, (rows, columns) in enumerate(grids):
        across, down = np.meshgrid(np.arange(columns, dtype=np.float32), np.arange(rows, dtype=np.float32))
        halves = [np.outer(axis.reshape(-1), rates) for axis in (across, down)]
        table = np.concatenate([np.concatenate((np.sin(half), np.cos(half)), 1) for half in halves], 1)
        positions[number, : rows * columns] = torch.from_numpy(table)
        ignored[number, : rows * columns] = False
    queries = own.ln_q(own.query).expand(len(grids), -1, -1)
    found = torch.func.functional_call(
        attention,
        dict(own.attn.named_parameters()),
        (queries, values + positions, values),
        {"key_padding_mask": ignored, "need_weights": False},
    )
    return (own.ln_post(found[0]) @ own.proj).flatten(0, 1)


def with_longest(grids: Grids, longest: int) -> Grids:
    return tuple((*grid, longest) for grid in grids)


def test_features_and_gradients_are_the_originals() -> None:
    module = random_module({**V25, "drop_vision_last_layer": False})
    assert isinstance(module, MiniCPMV26Vision)
    patches = patches_for(TILES)
    weights = torch.randn(len(TILES) * 3, 256, generator=torch.Generator().manual_seed(3))
    found: dict[str, tuple[Tensor, list[Tensor]]] = {}
    for name, features in (
        ("here", module(patches, with_longest(TILES, 16))),
        ("original", original_features(module, patches, TILES)),
        ("alone", module(patches, TILES)),
    ):
        gradients = torch.autograd.grad((features * weights).sum(), list(module.parameters()), allow_unused=True)
        found[name] = features.detach(), [torch.zeros(1) if one is None else one for one in gradients]
    expected, gradients = found["original"]
    torch.testing.assert_close(found["here"][0], expected, rtol=0, atol=2e-5 * expected.abs().max().item())
    for (name, _), own, theirs in zip(module.named_parameters(), found["here"][1], gradients, strict=True):
        limit = 1e-4 * theirs.abs().max().item() + 1e-6
        torch.testing.assert_close(own, theirs, rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}")
    assert (found["alone"][0] - expected).abs().max() > 0.05 * expected.abs().max(), "padding takes part"


def test_conversations_do_not_change_each_other() -> None:
    """Nor does the rank that encodes a tile: what it needs of the others is in its grid."""
    module = random_module(V25)
    images = with_longest(TILES[:2], 15) + with_longest(TILES[2:], 16)
    patches = patches_for(TILES)
    together = module(patches, images)
    tiles = patches.split([rows * columns for rows, columns in TILES])
    alone = [module(tile, (grid,)) for tile, grid in zip(tiles, images, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=5e-5 * together.abs().max().item())


@pytest.mark.parametrize(
    ("changes", "pads"),
    [
        ({"version": 2.5}, True),
        ({"version": "2.5", "batch_vision_input": False}, False),
        ({"version": None, "vision_config": {"model_type": "idefics2"}}, True),
        ({"version": 2.6}, False),
    ],
)
def test_the_longest_tile_of_each_conversation_is_in_the_grids(changes: dict[str, Any], pads: bool) -> None:
    shared("vision")
    family = MiniCPMV({**read_json("minicpm-v-2_6", "config.json"), **changes}, {}, _Tokenizer())
    assert (family.remark is not None) == pads
    found = family.grids_together(TILES, (0, 0, 1, 1))
    assert found == (((3, 5, 15), (2, 4, 15), (4, 4, 16), (2, 3, 16)) if pads else TILES)


def test_rows_of_several_conversations_have_the_longest_tile_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, images = opened("minicpm-v-2", tmp_path)
    assert isinstance(images.family, MiniCPMV)
    monkeypatch.setattr(images.family, "_pads_tiles", True)
    for name, size in (("wide", (300, 90)), ("small", (30, 70))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    records = [{"image": f"{name}.png", "conversations": chat()} for name in ("wide", "small")]
    file = write(tmp_path / "records.jsonl", records)
    dataset = build_texts(file, tokenizer=tokenizer, seq_length=192, packing=True, images=images)
    batch = rank_batch(dataset, range(len(dataset)), range(len(dataset)), RowShape(pad_token=7))
    assert batch.part(Images) is not None and len(set(batch.part(Images).documents)) == 2
    lengths = [rows * columns for rows, columns, _ in batch.part(Images).grids]
    assert len(set(lengths)) > 2, "tiles of one image differ"
    for (_, _, longest), document in zip(batch.part(Images).grids, batch.part(Images).documents, strict=True):
        own = [length for length, other in zip(lengths, batch.part(Images).documents, strict=True) if other == document]
        assert longest == max(own)


class _Tokenizer:
    """Has every token that it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name == "added_tokens":
            return {token: number for number, token in enumerate(_TOKENS)}
        raise AttributeError(name)


_TOKENS = (
    "<unk>", "<image>", "</image>", "<slice>", "</slice>", "<|eot_id|>", "<|im_end|>", "<|im_start|>", "<image_id>",
    "</image_id>", "<|start_header_id|>", "<|end_header_id|>", "</s>",
)  # fmt: skip


def vision_of(changes: dict[str, Any]) -> tuple[str, bool, PatchPlaces]:
    config = read_json("minicpm-v-2_6", "config.json")
    config = {**config, **changes, "vision_config": {**config["vision_config"], **changes.get("vision_config", {})}}
    family, text = family_of({key: value for key, value in config.items() if value is not None})
    decoder = family.config_from_hf(text)
    vision: Any = decoder.fronts[0].model
    return decoder.family, decoder.qkv_bias, vision.places


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": 2.5}, ("llama", False, PatchPlaces.FLAT)),
        ({"version": "2.6", "vision_config": {"model_type": "idefics2"}}, ("qwen2", True, PatchPlaces.GRID)),
        ({"version": None}, ("qwen2", True, PatchPlaces.GRID)),
        ({"version": None, "vision_config": {"model_type": "idefics2"}}, ("llama", False, PatchPlaces.FLAT)),
    ],
)
def test_the_version_decides_and_the_tower_where_there_is_none(
    changes: dict[str, Any], expected: tuple[str, bool, PatchPlaces]
) -> None:
    shared("vision")
    assert vision_of(changes) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"version": 3}, "version 3 of MiniCPM-V, but only 2.0, 2.5 and 2.6"),
        ({"version": [2.5]}, "of MiniCPM-V, but only 2.0, 2.5 and 2.6"),
        ({"version": 2.5, "vision_encoder": "vit"}, "version 2.5 of MiniCPM-V and vision_encoder, but that"),
        ({"version": 2.0, "vision_config": {}}, "version 2.0 of MiniCPM-V and no vision_encoder, but that"),
        ({"vision_config": {"model_type": "clip"}}, "no version and a tower of type 'clip'"),
    ],
)  # fmt: skip
def test_versions_that_contradict_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        minicpm_v_version(config)
    if "version" in config:
        with pytest.raises(UserError, match=words):
            family_of({"model_type": "minicpmv", **config})[0].config_from_hf({"model_type": "minicpmv", **config})
