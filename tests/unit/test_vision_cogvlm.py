"""CogVLM's, CogVLM2's and CogAgent's towers against what the models' original code computed."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine.errors import UserError
from engine.vision.towers.cogagent import CogAgentCrossVision, CrossVisionConfig, rotary_tables
from engine.vision.towers.cogvlm import CHECKPOINT_PREFIX, CogVLMVision, CogVLMVisionConfig
from tests.support.vision_fixtures import VisionFixture

NAMES = ("cogvlm-v1", "cogvlm2", "cogagent")
CLOSE = {"atol": 1e-5, "rtol": 0.0}
CLOSER = {"atol": 5e-7, "rtol": 0.0}
"""Some units in the last place of the tower's rows; the tower's epsilon in the adapter moves them by 1e-6 to 3e-6."""

fixture = cache(VisionFixture)


def _load(module: nn.Module, weights: dict[str, Tensor]) -> None:
    parameters = {name: weights[CHECKPOINT_PREFIX + name] for name, _ in module.named_parameters()}
    module.load_state_dict(parameters, strict=True)


@cache
def tower(name: str) -> CogVLMVision:
    model = CogVLMVision(CogVLMVisionConfig.from_hf(fixture(name).hf))
    _load(model, fixture(name).weights)
    return model


@cache
def encoder() -> CogAgentCrossVision:
    model = CogAgentCrossVision(CrossVisionConfig.from_hf(fixture("cogagent").hf))
    _load(model, fixture("cogagent").weights)
    return model


def _observed(module: nn.Module, outputs: list[Tensor]) -> Any:
    return module.register_forward_hook(lambda _module, _args, y: outputs.append(y))


@pytest.mark.parametrize("name", NAMES)
def test_the_tower_gives_the_rows_that_replace_embeddings(name: str) -> None:
    data, model, seen = fixture(name), tower(name), []
    hook = _observed(model.vision.transformer, seen)
    for case in data.cases:
        if not data.images(case):
            continue
        with torch.no_grad():
            rows = model(*data.patches(case, model.config.patch))
        expected = data.expected[f"{case}.vision_projected_with_boi_eoi"]
        assert rows.shape[0] == model.config.rows_per_tile * len(data.images(case))
        torch.testing.assert_close(rows.view_as(expected), expected, **CLOSER)
        if f"{case}.vision_transformer" in data.expected:
            torch.testing.assert_close(seen[-1], data.expected[f"{case}.vision_transformer"], **CLOSE)
    hook.remove()


def test_the_encoder_gives_what_layers_attend_to() -> None:
    data, model, seen = fixture("cogagent"), encoder(), []
    hook = _observed(model.cross_vision.vit.model, seen)
    for case in data.cases:
        with torch.no_grad():
            rows = model(*data.patches(case, model.config.patch, "cross_images"))
        expected = data.expected[f"{case}.cross_vision"]
        torch.testing.assert_close(rows.view_as(expected), expected, **CLOSE)
        if f"{case}.cross_vit" in data.expected:
            torch.testing.assert_close(seen[-1], data.expected[f"{case}.cross_vit"], **CLOSE)
    hook.remove()


def test_rotary_tables_are_the_checkpoints_buffers() -> None:
    """The released model stores them, and the encoder computes them."""
    for mine, leaf in zip(rotary_tables(encoder().config, torch.device("cpu")), ("cos", "sin"), strict=True):
        stored = fixture("cogagent").weights[f"model.cross_vision.vit.model.rope.freqs_{leaf}"]
        torch.testing.assert_close(mine, stored, atol=1e-6, rtol=0.0)


def test_each_tensor_is_a_parameter_or_named_as_not_computed() -> None:
    for name in NAMES:
        module_names = {CHECKPOINT_PREFIX + key for key, _ in tower(name).named_parameters()}
        theirs = {key for key in fixture(name).weights if key.startswith("model.vision.")}
        assert module_names == theirs
    mine = {CHECKPOINT_PREFIX + key for key, _ in encoder().named_parameters()}
    theirs = {key for key in fixture("cogagent").weights if key.startswith("model.cross_vision.")}
    left = {key for key in theirs if any(fnmatchcase(key, one) for one in encoder().config.not_computed)}
    assert mine | left == theirs
    assert not mine & left


@pytest.mark.parametrize("name", [*NAMES, "encoder"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    model = encoder() if name == "encoder" else tower(name)
    side, patch = model.config.side, model.config.patch
    grids = ((side, side),) * 2
    # attention by its products, which the counter knows on a CPU too
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2 * side**2, 3 * patch**2), grids)
    assert model.config.flops(grids) == counter.get_total_flops()


@pytest.mark.parametrize("name", [*NAMES, "encoder"])
def test_no_images_make_no_rows_and_a_graph_all_the_same(name: str) -> None:
    model = encoder() if name == "encoder" else tower(name)
    rows = model(torch.zeros(0, 3 * model.config.patch**2), ())
    assert rows.shape[0] == 0 and rows.requires_grad


def test_a_tile_of_another_size_is_not_computed() -> None:
    with pytest.raises(ValueError, match="a tile of 5 x 4 patches came to a tower of 5 x 5"):
        tower("cogvlm-v1")(torch.zeros(20, 588), ((5, 4),))


RELEASED_TOWER = {
    "hidden_size": 1792,
    "num_hidden_layers": 63,
    "num_heads": 16,
    "intermediate_size": 15360,
    "patch_size": 14,
    "image_size": 1344,
    "num_positions": 9217,
}
RELEASED = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_multi_query_heads": 8,
    "vision_config": RELEASED_TOWER,
}


def test_released_sizes() -> None:
    config = CogVLMVisionConfig.from_hf(RELEASED)
    assert config.merges and not config.second_positions and config.rows_per_tile == 2306
    encoder = CrossVisionConfig.from_hf({"cross_hidden_size": 1024, "cross_image_size": 1120})
    assert (encoder.num_layers, encoder.mlp_width, encoder.rows_per_tile) == (23, 2730, 6400)
    assert "model.cross_vision.vit.model.blocks.23.*" in encoder.not_computed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 1343}, "images of 1343 pixels in vision_config, which do not divide into patches of 14"),
        ({"num_positions": 9216}, "num_positions 9216, but an image of 1344 pixels has 9216 patches and one class"),
        ({"num_heads": None}, "vision_config.num_heads None, but a whole number above 0"),
        ({"hidden_act": "gelu_new"}, "hidden_act 'gelu_new', but this tower's MLP computes 'gelu'"),
        ({"image_size": 14 * 95, "num_positions": 95**2 + 1}, "95 x 95 patches, which do not divide into squares"),
    ],
)
def test_refused_towers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CogVLMVisionConfig.from_hf({**RELEASED, "vision_config": {**RELEASED_TOWER, **changes}})


def test_a_config_without_a_tower_is_refused() -> None:
    with pytest.raises(UserError, match="lacks vision_config"):
        CogVLMVisionConfig.from_hf({"hidden_size": 4096, "intermediate_size": 14336})
