"""The tower and the mergers of MiniCPM-V 4.6 and 4.7 against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from engine.errors import UserError
from engine.vision.towers.minicpm_v4_6 import MiniCPMV46VisionConfig, nearest_places

PATCH, HIDDEN = 7, 48
HF: dict[str, Any] = {
    "model_type": "minicpmv4_6", "insert_layer_id": 1, "downsample_mode": "16x",
    "vision_config": {
        "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 3,
        "patch_size": PATCH, "image_size": 37, "layer_norm_eps": 1e-3,
    },
}  # fmt: skip
GRIDS = ((4, 8), (8, 4), (12, 4), (4, 8))
"""Of equally many patches and not, of equal shapes and not."""
has_model = pytest.mark.skipif("minicpmv4_6" not in MODEL_MAPPING_NAMES, reason="transformers lacks the model")


def stock_modules(hf: dict[str, Any]) -> nn.ModuleDict:
    """transformers' tower and merger, every parameter drawn."""
    from transformers import MiniCPMV4_6Config
    from transformers.models.minicpmv4_6.modeling_minicpmv4_6 import MiniCPMV4_6Merger, MiniCPMV4_6VisionModel

    given = {key: value for key, value in hf.items() if key != "model_type"}
    config = MiniCPMV4_6Config(text_config={"model_type": "qwen3_5_text", "hidden_size": HIDDEN}, **given)
    found = nn.ModuleDict(
        {"vision_tower": MiniCPMV4_6VisionModel(config.vision_config), "merger": MiniCPMV4_6Merger(config)}
    )
    torch.manual_seed(0)
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.3)
    return found.eval()


def stock_features(modules: nn.ModuleDict, patches: list[Tensor], mode: str) -> Tensor:
    rows = [rearrange(one, "l (c y x) -> c y (l x)", c=3, y=PATCH) for one in patches]
    sizes = torch.tensor(GRIDS)
    merges = mode == "16x"
    state = modules["vision_tower"](torch.cat(rows, dim=-1)[None], target_sizes=sizes, use_vit_merger=merges)
    return torch.cat(modules["merger"](state.last_hidden_state, sizes // 2 if merges else sizes))


@has_model
@pytest.mark.parametrize("mode", ["16x", "4x"])
def test_features_and_gradients_are_transformers_own(mode: str) -> None:
    if mode == "16x" and "minicpmv4_7" not in MODEL_MAPPING_NAMES:
        pytest.skip("this transformers, which has no MiniCPM-V 4.7, merges images of one size alone")
    hf = {**HF, "downsample_mode": mode}
    stock = stock_modules(hf)
    config = MiniCPMV46VisionConfig.from_hf(hf, HIDDEN)
    own = config.build()
    left = own.load_state_dict(stock.state_dict(), strict=False)
    assert not left.missing_keys
    assert all("vit_merger" in name for name in left.unexpected_keys) and bool(left.unexpected_keys) == (mode == "4x")
    generator = torch.Generator().manual_seed(1)
    patches = [torch.randn(rows * columns, 3 * PATCH**2, generator=generator) for rows, columns in GRIDS]
    found, expected = own(torch.cat(patches), GRIDS), stock_features(stock, patches, mode)
    assert len(found) == sum(map(config.num_features, GRIDS))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.detach().abs().max()))
    gradient = torch.randn(found.shape, generator=generator)
    found.backward(gradient)
    expected.backward(gradient)
    theirs = dict(stock.named_parameters())
    for name, parameter in own.named_parameters():
        wanted, scale = theirs[name].grad, theirs[name].grad.abs().max()
        # a bias of keys moves no softmax: its gradient is rounding alone
        atol = 1e-3 if name.endswith("k_proj.bias") else 1e-5 * float(scale)
        torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=atol, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("mode", ["16x", "4x"])
def test_flops_are_those_that_torch_counts(mode: str) -> None:
    config = MiniCPMV46VisionConfig.from_hf({**HF, "downsample_mode": mode}, HIDDEN)
    patches = torch.zeros(sum(rows * columns for rows, columns in GRIDS), config.patch_features)
    # plain products, because the counter does not know the CPU's fused attention
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        features = config.build()(patches, GRIDS)
    assert config.flops(GRIDS) == counter.get_total_flops()
    assert config.build()(patches[:0], ()).shape == (0, features.shape[1])
    factor = 4 if mode == "16x" else 2
    with pytest.raises(ValueError, match=f"4 x 5 patches came to a tower that merges {factor} x {factor}"):
        config.build()(patches[:20], ((4, 5),))


@has_model
def test_places_are_transformers_own() -> None:
    """On every grid that an image of many slices may have."""
    from transformers.vision_utils import get_vision_nearest_position_ids

    for side in (5, 70):
        for count in range(1, 80):
            expected = get_vision_nearest_position_ids(torch.tensor([[1, count]]), side)
            assert torch.equal(nearest_places(count, side), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_config": None}, "lacks vision_config"),
        ({"downsample_mode": "8x"}, "downsample_mode '8x', but 16x or 4x is expected"),
        ({"insert_layer_id": 3}, "insert_layer_id 3, but one of the tower's 3 layers"),
        ({"insert_layer_id": None}, "insert_layer_id None, but the number of one of"),
        ({"merger_times": 2}, "merger_times 2, but this model's tower has 1"),
        ({"merge_kernel_size": [4, 2]}, r"merge_kernel_size \[4, 2\], but this model's tower has \[2, 2\]"),
        (
            {"vision_config": {**HF["vision_config"], "window_kernel_size": [1, 2]}},
            r"vision_config.window_kernel_size \[1, 2\], but",
        ),
        ({"vision_config": {**HF["vision_config"], "num_attention_heads": 5}}, "does not divide into 5 heads"),
    ],
)
def test_towers_that_differ_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        MiniCPMV46VisionConfig.from_hf({**HF, **changes}, HIDDEN)
