"""LFM2's configs and routers, where tiny models do not tell, against transformers' classes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

from engine.errors import UserError
from engine.experts.layers.routed_experts import RoutedSizes
from engine.experts.ops.routing import choose
from engine.hybrids.layers.short_conv import ShortConvSizes
from engine.models.families import family_of

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 9}


@pytest.mark.parametrize(
    "keys",
    [
        {"intermediate_size": 100, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3},
        {"intermediate_size": 100, "block_auto_adjust_ff_dim": False},
        {"intermediate_size": 100, "block_ff_dim": 64, "block_multiple_of": 6},
    ],
)
def test_mlps_are_as_wide_as_transformers(keys: dict[str, Any]) -> None:
    """block_ff_dim, of older configs, stands in the place of intermediate_size."""
    stock = transformers.Lfm2Config(**SIZES, **keys)
    family, text = family_of({**SIZES, **keys, "model_type": "lfm2"})
    assert family.config_from_hf(text).intermediate == Lfm2MLP(stock).w1.weight.shape[0]


def test_older_configs_list_the_layers_with_attention() -> None:
    keys = {"intermediate_size": 64, "full_attn_idxs": [1], "tie_embedding": False}
    stock = transformers.Lfm2Config(**SIZES, **keys)
    family, text = family_of({**SIZES, **keys, "model_type": "lfm2"})
    config = family.config_from_hf(text)
    sizes = config.variant(ShortConvSizes)
    assert sizes is not None and stock.layer_types == ["conv", "full_attention", "conv"]
    assert (sizes.layers, config.tied_embeddings) == ((0, 2), stock.tie_word_embeddings)
    assert config.ropes[0].theta == stock.rope_parameters["rope_theta"]


def test_layers_of_other_types_are_refused() -> None:
    config = {**SIZES, "intermediate_size": 64, "model_type": "lfm2", "layer_types": ["conv", "conv", "mamba"]}
    with pytest.raises(UserError, match="layers of type 'mamba' in a lfm2 model"):
        family_of(config)


@pytest.mark.parametrize("corrected", [False, True])
def test_weights_of_experts_that_hardly_score_are_transformers(corrected: bool) -> None:
    """The weights sum to far less than 1 where sigmoids are near the 1e-6 that is added to their sum."""
    stock = transformers.Lfm2MoeConfig(
        **SIZES, intermediate_size=64, num_experts=5, num_experts_per_tok=2, use_expert_bias=corrected,
        layer_types=["conv"] * 3,
    )  # fmt: skip
    family, text = family_of(json.loads(stock.to_json_string()))
    sizes = family.config_from_hf(text).variant(RoutedSizes)
    assert sizes is not None and sizes.rule.has_correction == corrected
    torch.manual_seed(0)
    router, x = Lfm2MoeTopKRouter(stock), 1 + 0.2 * torch.randn(7, 16)
    torch.nn.init.normal_(router.weight, mean=-0.9, std=0.1)
    correction = torch.randn(5) * 0.1 if corrected else None
    logits, expected, ids = router(x, correction)
    weights, found = choose(logits, sizes.rule, correction)
    assert torch.equal(found, ids) and expected.sum(-1).min() < 0.9
    torch.testing.assert_close(weights, expected)
