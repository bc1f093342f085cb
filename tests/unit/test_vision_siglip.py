"""SigLIP and Gemma 3's projector against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from einops import rearrange
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine.errors import UserError
from engine.vision.towers.gemma3 import Gemma3Vision, Gemma3VisionConfig
from engine.vision.towers.siglip import SiglipConfig

PATCH, SIDE, WIDTH = 3, 6, 40
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 3,
    "num_attention_heads": 3, "patch_size": PATCH, "image_size": PATCH * SIDE, "vision_use_head": False,
}  # fmt: skip
GEMMA: dict[str, Any] = {"model_type": "gemma3", "vision_config": VISION, "mm_tokens_per_image": 9}
RELEASED_GEMMA = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip


def drawn(module: nn.Module) -> nn.Module:
    """The module with every parameter drawn, norms and biases too."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def stock_tower(**changes: Any) -> nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return drawn(SiglipVisionModel(SiglipVisionConfig(**{**VISION, **changes}, attn_implementation="eager")))


def pixels_and_patches(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.randn(count, 3, PATCH * SIDE, PATCH * SIDE, generator=torch.Generator().manual_seed(4))
    return pixels, rearrange(pixels, "n c (h p) (w q) -> (n h w) (c p q)", p=PATCH, q=PATCH)


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu"])
def test_tower_is_transformers_own(activation: str) -> None:
    """The last norm's output, and those of layers before it."""
    stock = stock_tower(hidden_act=activation, layer_norm_eps=1e-2)
    vision = {**VISION, "hidden_act": activation, "layer_norm_eps": 1e-2}
    tower = SiglipConfig.from_hf(vision).build()
    tower.load_state_dict(stock.state_dict())
    inner = SiglipConfig.from_hf(vision, (2, 0)).build()
    beside = set(inner.load_state_dict(stock.state_dict(), strict=False).unexpected_keys)
    assert set(tower.state_dict()) - beside == set(inner.state_dict())
    pixels, patches = pixels_and_patches(2)
    patches_NLF = patches.unflatten(0, (2, -1))
    with torch.no_grad():
        expected = stock(pixels, output_hidden_states=True)
        torch.testing.assert_close(tower(patches_NLF), expected.last_hidden_state, rtol=0, atol=1e-5)
        states = torch.cat([expected.hidden_states[2], expected.hidden_states[0]], dim=-1)
        torch.testing.assert_close(inner(patches_NLF, (2, 0)), states, rtol=0, atol=1e-5)


def test_gemma_features_and_gradients_are_transformers_own() -> None:
    from transformers import Gemma3Config
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

    text = {"hidden_size": WIDTH, "num_attention_heads": 4}
    projector = drawn(
        Gemma3MultiModalProjector(Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=9))
    )
    tower = stock_tower()
    ours = Gemma3Vision(Gemma3VisionConfig.from_hf(GEMMA, width=WIDTH))
    ours.vision_tower.load_state_dict(tower.state_dict())
    ours.multi_modal_projector.load_state_dict(projector.state_dict())
    pixels, patches = pixels_and_patches(3)
    found = ours(patches, ((SIDE, SIDE),) * 3)
    expected = projector(tower(pixels).last_hidden_state).flatten(0, 1)
    assert found.shape == (27, WIDTH) and ours(patches[:0], ()).shape == (0, WIDTH)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    mine = torch.autograd.grad(found, list(ours.parameters()), gradient)
    theirs = torch.autograd.grad(expected, [*tower.parameters(), *projector.parameters()], gradient)
    for (name, _), one, other in zip(ours.named_parameters(), mine, theirs, strict=True):
        # a bias of keys shifts all scores of a query alike, so that its gradient is rounding
        scale = max(float(other.norm()), 1e-3)
        assert float((one - other).norm()) < 2e-5 * scale or name.endswith("k_proj.bias"), name


def test_flops_are_those_that_torch_counts() -> None:
    config = Gemma3VisionConfig.from_hf(GEMMA, width=WIDTH)
    grids = ((SIDE, SIDE),) * 2
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        drawn(config.build())(pixels_and_patches(2)[1], grids)
    assert config.flops(grids) == counter.get_total_flops()


def test_released_sizes() -> None:
    with torch.device("meta"):
        module = Gemma3VisionConfig.from_hf(RELEASED_GEMMA, width=2560).build()
    assert sum(parameter.numel() for parameter in module.parameters()) == 416_866_032 + 1152 * 2560 + 1152
    assert module.config.num_features((64, 64)) == 256


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_config": None}, "lacks vision_config"),
        ({"vision_config": {**VISION, "model_type": "clip_vision_model"}}, "type 'clip_vision_model', but a gemma3"),
        ({"vision_config": {**VISION, "hidden_size": 35}}, "35, which does not divide into 3 heads"),
        ({"vision_config": {**VISION, "image_size": 2}}, "which are less than a patch of 3"),
        ({"vision_config": {**VISION, "image_size": [18, 18]}}, r"image_size \[18, 18\], but a whole number"),
        ({"vision_config": {**VISION, "hidden_act": "snake"}}, "hidden_act 'snake', but one of"),
        ({"vision_config": {**VISION, "attention_dropout": 0.1}}, "attention_dropout 0.1, but 0.0"),
        ({"vision_config": {**VISION, "layer_norm_eps": 0}}, "layer_norm_eps 0, but a number above 0"),
        ({"mm_tokens_per_image": 8}, "8, which are not the squares of an image of 6 x 6"),
        ({"mm_tokens_per_image": 16}, "16, which are not the squares of an image of 6 x 6"),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Gemma3VisionConfig.from_hf({**GEMMA, **changes}, width=WIDTH)
