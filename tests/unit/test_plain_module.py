"""Adapters in modules of plain torch against PEFT's on the same module, and what they are while blocks run again."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from engine.kernels.philox import dropout_mask, dropout_scale
from engine.kernels.records import DropoutKey
from engine.layers.context import AdapterSettings, LayerContext, TensorLayout, TrainingPlan
from engine.layers.plain_module import TILE_ROWS, PlainModule, TileDropout, linear_names
from engine.vision.towers.cogagent import CrossVisionConfig
from engine.vision.towers.cogvlm import CogVLMVisionConfig
from engine.vision.towers.minicpm_v2_6 import MiniCPMV26VisionConfig
from tests.distributed.cases import relative_error

CPU = torch.device("cpu")
CONFIG = CrossVisionConfig(width=24, num_layers=2, num_heads=2, mlp_width=40, patch=2, side=3, trained_side=2)
GRIDS = ((3, 3),) * 2
TARGETS = r"cross_vision\.vit\.model\.blocks\.\d\.(attn\.(q_proj|proj)|mlp\.w[123])"
RANK, SCALE, SEED, SITE, STEP = 3, 1.7, 5, 40, 11
TILES = (900, 17)
PREFIX = "vision."


def _numbers(name: str, shape: torch.Size) -> Tensor:
    """Numbers that depend on the name alone; B is drawn too, because B = 0 would hide A."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    drawn = torch.randn(shape, generator=generator)
    if name.endswith("magnitude"):
        return drawn.abs() + 0.5
    return drawn * (0.3 if drawn.dim() > 1 else 0.1)


def _plain(recompute: bool = False, **options: Any) -> PlainModule:
    settings = AdapterSettings(rank=RANK, scale=SCALE, **{"dropout": 0.0, **options})
    targets = [f"{PREFIX}{name}" for name in linear_names(CONFIG.build()) if re.fullmatch(TARGETS, name)]
    build = LayerContext(
        layout=TensorLayout(),
        plan=TrainingPlan(adapter=lambda module: settings if module in targets else None, seed=SEED),
        device=CPU,
        dtype=torch.float32,
    )
    module = PlainModule(PREFIX, CONFIG.build, build=build, recompute=recompute, first_site=SITE)
    for entry in module.entries:
        entry.parameter.data.copy_(_numbers(entry.name, entry.parameter.shape))
    return module


class _Masked(nn.Module):
    """PEFT's dropout with the masks of coordinates."""

    def __init__(self, site: int, probability: float) -> None:
        super().__init__()
        self.site, self.probability = site, probability

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tensor([tile * TILE_ROWS + row for tile in TILES for row in range(x.shape[1])])
        key = DropoutKey(
            token_index=rows, step=torch.tensor(STEP), seed=SEED, site=self.site, probability=self.probability,
            num_features=x.shape[-1],
        )  # fmt: skip
        return x * dropout_mask(key).view(x.shape) * dropout_scale(self.probability)


def _peft(mine: PlainModule, *, dora: bool = False, bias: bool = False, dropout: float = 0.0) -> nn.Module:
    """The same module and adapters, made by PEFT, with parameters under our names in `taken`."""
    module = CONFIG.build()
    sites = {name: site for site, name in enumerate(linear_names(module), SITE)}
    values = {entry.name.removeprefix(PREFIX): entry.parameter.data for entry in mine.entries}
    module.load_state_dict({name: value for name, value in values.items() if "lora_" not in name})
    module.requires_grad_(False)
    config = LoraConfig(r=RANK, lora_alpha=1, target_modules=TARGETS, use_dora=dora, lora_bias=bias)
    inject_adapter_in_model(config, module)
    module.taken = {}
    for name, layer in module.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        layer.scaling["default"] = SCALE
        parts = {"lora_A": layer.lora_A["default"].weight, "lora_B": layer.lora_B["default"].weight}
        parts |= {"lora_bias": layer.lora_B["default"].bias} if bias else {}
        parts |= {"lora_magnitude": layer.lora_magnitude_vector["default"].weight} if dora else {}
        if dropout:
            layer.lora_dropout["default"] = _Masked(sites[name], dropout)
        for leaf, parameter in parts.items():
            parameter.data.copy_(values[f"{name}.{leaf}"])
            module.taken[f"{name}.{leaf}"] = parameter
    return module


def _inputs() -> Tensor:
    return torch.randn(18, CONFIG.patch_features, generator=torch.Generator().manual_seed(3))


def _gradients(module: PlainModule, out: Tensor) -> dict[str, Tensor]:
    leaves = [entry.parameter for entry in module.trained]
    found = torch.autograd.grad(out.square().sum(), leaves)
    return {entry.name.removeprefix(PREFIX): one for entry, one in zip(module.trained, found, strict=True)}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("options", [{}, {"dora": True}, {"bias": True}, {"dropout": 0.3}], ids=str)
def test_adapters_are_pefts(options: dict[str, Any], recompute: bool) -> None:
    """What breaks would move the output by: 0.09 a base's bias that DoRA scales, 0.10 lengths of W alone, 0.14 an
    adapter's bias that is not scaled, 0.29 a mask of the next site, 0.30 one of the next row."""
    mine = _plain(recompute, **options)
    theirs = _peft(mine, **options)
    dropout = TileDropout(tile_index_N=torch.tensor(TILES), step=torch.tensor(STEP))
    out, expected = mine.run(_inputs(), GRIDS, dropout=dropout), theirs(_inputs(), GRIDS)
    assert relative_error(out, expected) < 1e-5
    found = _gradients(mine, out)
    expected_gradients = torch.autograd.grad(expected.square().sum(), list(theirs.taken.values()))
    assert found.keys() == theirs.taken.keys() and len(found) == 2 * 5 * (2 + bool({"dora", "bias"} & options.keys()))
    for name, gradient in zip(theirs.taken, expected_gradients, strict=True):
        assert relative_error(found[name], gradient) < 1e-4, name


@pytest.mark.parametrize("between", [{"adapters": False}, {"dropout": None}], ids=str)
def test_blocks_run_again_as_they_ran_first(between: dict[str, Any]) -> None:
    """A pass without adapters, or without dropout, between forward and backward. With a flag on the module that the
    second run reads again, torch's checkpoint raises, because it saves other tensors than the first."""
    dropout = TileDropout(tile_index_N=torch.tensor(TILES), step=torch.tensor(STEP))
    mine = _plain(recompute=True, dropout=0.3)
    expected = _gradients(mine, mine.run(_inputs(), GRIDS, dropout=dropout))
    out = mine.run(_inputs(), GRIDS, dropout=dropout)
    with torch.no_grad():
        mine.run(_inputs(), GRIDS, **{"dropout": dropout, **between})
    found = _gradients(mine, out)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert all(gradient.any() for gradient in found.values())


def test_masks_belong_to_the_tile_and_not_to_its_place() -> None:
    """Tiles in another order, and one of them alone, have the features that they had."""
    mine, patches = _plain(dropout=0.3), _inputs().split(9)
    run = partial(mine.run, adapters=True)

    def features(*places: int) -> Tensor:
        index = torch.tensor([TILES[place] for place in places])
        dropout = TileDropout(tile_index_N=index, step=torch.tensor(STEP))
        out = run(torch.cat([patches[place] for place in places]), ((3, 3),) * len(places), dropout=dropout)
        return out.unflatten(0, (len(places), -1))

    both = features(0, 1)
    torch.testing.assert_close(features(1, 0), both.flip(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(features(1), both[1:], rtol=1e-5, atol=1e-6)


MINICPM: dict[str, Any] = {
    "hidden_size": 256, "query_num": 9,
    "vision_config": {
        "model_type": "siglip",
        "hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 40, "image_size": 28,
        "patch_size": 2,
    },
}  # fmt: skip
TOWERS = {
    "CogAgent's encoder": (CONFIG, (3, 3)),
    "CogVLM2": (
        CogVLMVisionConfig(
            width=24, num_layers=1, num_heads=2, mlp_width=40, patch=2, side=4, norm_eps=1e-6, hidden=32,
            adapter_width=48, merges=True,
        ),
        (4, 4),
    ),
    "MiniCPM-V 2.6": (MiniCPMV26VisionConfig.from_hf(MINICPM), (3, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", TOWERS)
def test_linears_take_as_many_rows_of_each_tile(name: str) -> None:
    """What coordinates of rows rely on: the input of every linear has the tiles one after the other. A linear that saw
    something of all tiles at once would see other rows for the same tile here."""
    config, grid = TOWERS[name]
    torch.manual_seed(0)
    module = config.build()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    seen: dict[str, list[Tensor]] = {}
    for linear in linear_names(module):
        module.get_submodule(linear).register_forward_pre_hook(
            lambda _, given, linear=linear: seen.setdefault(linear, []).append(given[0].flatten(0, -2))
        )
    tiles = torch.randn(3, grid[0] * grid[1], config.patch_features)
    with torch.no_grad():
        module(tiles.flatten(0, 1), (grid,) * 3)
        for tile in tiles:
            module(tile, (grid,))
    assert set(seen) == set(linear_names(module))
    for linear, (together, *apart) in seen.items():
        torch.testing.assert_close(together, torch.cat(apart), rtol=1e-4, atol=1e-4, msg=linear)
