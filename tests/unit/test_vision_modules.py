"""Vision modules of MiniCPM-V and OmniLMM without the originals' fixtures: sizes, batches, dtypes, version 2.5."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine.errors import UserError
from engine.vision.towers.minicpm_v2 import MiniCPMV2Vision, MiniCPMV2VisionConfig
from engine.vision.towers.minicpm_v2_6 import MiniCPMV26Vision, MiniCPMV26VisionConfig
from engine.vision.towers.omnilmm import OmniLMMVision, OmniLMMVisionConfig
from engine.vision.towers.sizes import Grids

Vision = MiniCPMV2Vision | MiniCPMV26Vision | OmniLMMVision
VISION = {
    "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 2,
    "image_size": 22, "model_type": "siglip",
}  # fmt: skip
SIZES = {
    "embed_dim": 48, "depth_in_timm": 3, "num_heads": 4, "mlp_hidden": 60, "patch_size": 2, "pos_grid": [5, 5],
}  # fmt: skip
V20: dict[str, Any] = {"hidden_size": 256, "query_num": 9, "patch_size": 2, "tower_config": SIZES}
V26: dict[str, Any] = {"hidden_size": 256, "query_num": 3, "version": 2.6, "vision_config": VISION}
V25: dict[str, Any] = {"hidden_size": 256, "query_num": 3, "vision_config": {**VISION, "model_type": "idefics2"}}
OMNI: dict[str, Any] = {
    "hidden_size": 256, "num_query": 9, "image_size": 12,
    "tower_config": {**SIZES, "class_token": True, "use_post_norm": True},
}  # fmt: skip
RELEASED_V20 = {
    "hidden_size": 2304, "query_num": 64, "patch_size": 14, "vision_encoder": "vit_so400m_patch14_siglip_384.webli",
    "drop_vision_last_layer": True,
}  # fmt: skip
RELEASED_V26 = {
    "hidden_size": 3584, "query_num": 64, "version": 2.6, "drop_vision_last_layer": False,
    "vision_config": {
        "hidden_size": 1152, "image_size": 980, "intermediate_size": 4304, "model_type": "siglip",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
    },
}  # fmt: skip
RELEASED_OMNI = {"hidden_size": 4096, "num_query": 64, "image_size": 448}


def vision_module(hf: dict[str, Any]) -> Vision:
    if "num_query" in hf:
        return OmniLMMVision(OmniLMMVisionConfig.from_hf(hf))
    if "vision_config" in hf:
        return MiniCPMV26Vision(MiniCPMV26VisionConfig.from_hf(hf))
    return MiniCPMV2Vision(MiniCPMV2VisionConfig.from_hf(hf))


def random_module(hf: dict[str, Any]) -> Vision:
    """One whose every weight matters."""
    torch.manual_seed(1)
    module = vision_module(hf)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return module


def patches_for(grids: Grids) -> Tensor:
    return torch.randn(sum(rows * columns for rows, columns in grids), 12, generator=torch.Generator().manual_seed(2))


MIXED: Grids = ((3, 5), (2, 4), (5, 3), (4, 4), (2, 4))
SQUARES: Grids = ((6, 6), (5, 5), (6, 6))
CASES = [
    pytest.param(V20, MIXED, id="2.0"),
    pytest.param(V25, MIXED, id="2.5"),
    pytest.param(V26, MIXED, id="2.6"),
    pytest.param(OMNI, SQUARES, id="omnilmm"),
]


@pytest.mark.parametrize(("hf", "grids"), CASES)
def test_features_do_not_depend_on_the_batch(hf: dict[str, Any], grids: Grids) -> None:
    """Rows of a product may be summed in another order in a larger one; that is all."""
    module = random_module(hf)
    patches = patches_for(grids)
    together = module(patches, grids)
    tiles = patches.split([rows * columns for rows, columns in grids])
    alone = [module(tile, (grid,)) for tile, grid in zip(tiles, grids, strict=True)]
    assert together.std() > 0.1
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=5e-5 * together.abs().max().item())
    assert module(patches[:0], ()).shape == (0, 256)


@pytest.mark.parametrize("length", [6, 15, 16])
def test_minicpm_v25_tile_is_alone_in_its_batch(length: int) -> None:
    """transformers' tower gets what the original hands it: one row of patches and a mask that is all true.

    The lengths are such that this transformers rounds positions as that of the original did.
    """
    from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
    from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

    module = random_module({**V25, "drop_vision_last_layer": False})
    assert isinstance(module, MiniCPMV26Vision)
    sizes = {key: value for key, value in VISION.items() if key != "model_type"}
    peer = Idefics2VisionTransformer(Idefics2VisionConfig(**sizes, attn_implementation="eager"))
    peer.load_state_dict(module.vpm.state_dict())
    patches = patches_for(((1, length),))
    strip = patches.unflatten(1, (3, 2, 2)).permute(1, 2, 0, 3).reshape(1, 3, 2, 2 * length)
    mask = torch.ones(1, 1, length, dtype=torch.bool)
    expected = peer(pixel_values=strip, patch_attention_mask=mask).last_hidden_state
    torch.testing.assert_close(module.vpm(patches[None], ((1, length),)), expected, rtol=0, atol=1e-5)
    if length == 6:  # the shape of a tile has no part in it
        torch.testing.assert_close(module.vpm(patches[None], ((2, 3),)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("hf", "grids"), CASES)
def test_flops_are_those_that_torch_counts(hf: dict[str, Any], grids: Grids) -> None:
    module = random_module(hf)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        module(patches_for(grids), grids)
    assert module.config.flops(grids) == counter.get_total_flops()


@pytest.mark.parametrize(("hf", "grids"), CASES)
def test_bfloat16_features(hf: dict[str, Any], grids: Grids) -> None:
    """Against fp32 with the same weights; a few roundings of 2**-9 of values around 1, so 5% of their spread."""
    module = random_module(hf).bfloat16()
    patches = patches_for(grids).bfloat16()
    rounded = module(patches, grids)
    exact = module.float()(patches.float(), grids)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).std() < 0.05 * exact.std()


@pytest.mark.parametrize(
    ("hf", "shapes", "rows"),
    [
        (
            RELEASED_V20,
            {
                "vpm.pos_embed": (1, 729, 1152),
                "vpm.blocks.25.mlp.fc1.weight": (4304, 1152),
                "vpm.blocks.26.mlp.fc1.weight": None,
                "vpm.patch_embed.proj.weight": (1152, 3, 14, 14),
                "resampler.pos_embed": (64, 2304),
                "resampler.kv_proj.weight": (2304, 1152),
            },
            64,
        ),
        (
            RELEASED_V26,
            {
                "vpm.embeddings.position_embedding.weight": (4900, 1152),
                "vpm.encoder.layers.26.self_attn.out_proj.bias": (1152,),
                "resampler.attn.in_proj_weight": (10752, 3584),
                "resampler.pos_embed": None,
            },
            64,
        ),
        (
            RELEASED_OMNI,
            {
                "vision_tower.pos_embed": (1, 257, 1792),
                "vision_tower.blocks.62.attn.v_bias": (1792,),
                "vision_tower.blocks.62.mlp.fc2.weight": (1792, 15360),
                "vision_tower.blocks.63.mlp.fc2.weight": None,
                "resampler.pos_embed": (64, 4096),
            },
            64,
        ),
    ],
    ids=["2.0", "2.6", "omnilmm"],
)
def test_released_sizes_on_the_meta_device(hf: dict[str, Any], shapes: dict[str, Any], rows: int) -> None:
    """A shape of None is a name that must not be there."""
    with torch.device("meta"):
        module = vision_module(hf).bfloat16()
        features = module(torch.zeros(2 * 1024, 588, dtype=torch.bfloat16), ((32, 32), (32, 32)))
    assert features.shape == (2 * rows, hf["hidden_size"])
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert {name: found.get(name) for name in shapes} == shapes
    assert not [*module.buffers()]  # a table in one would be lost on the way from the meta device


def test_nothing_but_linears_has_a_matrix_for_adapters() -> None:
    """Adapters are put on nn.Linear from outside: all products of blocks are such."""
    for hf in (V20, V26, OMNI):
        kinds = {
            name.rsplit(".", 1)[-1]
            for name, module in vision_module(hf).named_modules()
            if isinstance(module, nn.Linear)
        }
        assert kinds >= {"fc1", "fc2", "kv_proj", "out_proj"}


@pytest.mark.parametrize(
    ("hf", "change", "message"),
    [
        (RELEASED_V20, {"vision_encoder": "vit_base_patch16_224"}, "vision_encoder 'vit_base_patch16_224'"),
        (RELEASED_V20, {"patch_size": 16}, "patch_size 16"),
        (RELEASED_V20, {"query_num": 63}, "query_num 63"),
        (V20, {"tower_config": {**SIZES, "act": "gelu_tanh"}}, "tower_config.act 'gelu_tanh'"),
        (V20, {"tower_config": {**SIZES, "class_token": True}}, "tower_config.class_token True"),
        (V20, {"tower_config": {**SIZES, "num_heads": 5}}, "5 heads"),
        (V20, {"tower_config": {**SIZES, "pos_grid": [4, 5]}}, r"pos_grid \[4, 5\]"),
        (V26, {"version": 4.5}, "version 4.5"),
        (V26, {"vision_config": None}, "lacks vision_config"),
        (V26, {"vision_config": {**VISION, "model_type": "clip"}}, "type 'clip'"),
        (V26, {"vision_config": {**VISION, "hidden_act": "gelu"}}, "hidden_act 'gelu'"),
        (V26, {"vision_config": {**VISION, "num_attention_heads": 5}}, "5 heads"),
        (V26, {"vision_config": {**VISION, "image_size": 23}}, "23 pixels"),
        (V26, {"hidden_size": 100}, "hidden_size 100"),
        (RELEASED_OMNI, {"image_size": 450}, "450 pixels"),
        (RELEASED_OMNI, {"num_query": True}, "num_query True"),
    ],
)
def test_refused_configs(hf: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        vision_module({**hf, **change})
    assert str(caught.value).count(". ") == 0


def test_images_of_another_shape_are_no_omnilmm_tiles() -> None:
    with pytest.raises(ValueError, match="5 x 6"):
        random_module(OMNI)(patches_for(((5, 6),)), ((5, 6),))
