"""ERNIE 4.5's mixtures: what bfloat16 does not round, which layers have experts, and which models are adopted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.model_weights import open_source
from engine.errors import UserError
from engine.experts.families.ernie4_5 import ernie4_5_moe
from engine.models.families import family_of
from tests.support.family_models import make_model
from tests.support.half_model import frozen_parameters

SIZES = {
    "model_type": "ernie4_5_moe", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 9,
}  # fmt: skip


def test_a_frozen_router_stays_in_fp32(tmp_path: Path) -> None:
    """As transformers keeps it; the other weights are rounded."""
    make_model("ernie 4.5 moe", tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    frozen = frozen_parameters(source)
    for name in ("layers.1.mlp.router.weight", "layers.1.mlp.router.e_score_correction_bias"):
        assert frozen[name].dtype == torch.float32 and torch.equal(frozen[name].detach(), source.read_whole(name))
    assert frozen["layers.1.input_norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("more", "dense"),
    [
        ({}, (0,)),
        ({"moe_layer_start_index": 0, "moe_layer_interval": 2}, (0, 2, 4)),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 3}, (0, 1, 4, 5)),
    ],
)
def test_layers_with_experts_are_transformers(more: dict[str, int], dense: tuple[int, ...]) -> None:
    import transformers

    config = ernie4_5_moe({**SIZES, **more})
    kept = {key: value for key, value in SIZES.items() if key != "model_type"}
    with torch.device("meta"):
        stock = transformers.Ernie4_5_MoeForCausalLM(
            transformers.Ernie4_5_MoeConfig(**kept, moe_intermediate_size=8, **more)
        )
    layers = [hasattr(layer.mlp, "experts") for layer in stock.model.layers]
    assert [index for index, routed in enumerate(layers) if not routed] == list(dense)
    assert [index for index in range(6) if not config.variants_at(index)] == list(dense)


def test_experts_have_other_families_names_for_their_counts_too() -> None:
    named = ernie4_5_moe({**SIZES, "moe_num_experts": 12, "moe_k": 3})
    assert named == ernie4_5_moe({**SIZES, "num_experts": 12, "num_experts_per_tok": 3})
    assert (named.num_experts, named.experts_per_token) == (12, 3)


def test_a_head_with_a_bias_is_adopted() -> None:
    assert not family_of(SIZES)[0].is_adopted and family_of({**SIZES, "use_bias": True})[0].is_adopted


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"use_bias": True}, "use_bias True, but that is not computed here"),
        ({"output_router_logits": True}, "output_router_logits True, but that is not computed here"),
        ({"moe_k": 65}, "num_experts_per_tok 65 and 64 experts"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu', but the MLP of a ernie4_5_moe model"),
    ],
)
def test_what_is_not_computed_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ernie4_5_moe({**SIZES, **more})


def test_layers_that_predict_later_tokens_are_passed_by(tmp_path: Path) -> None:
    make_model("ernie 4.5 moe", tmp_path)
    path, name = tmp_path / "model.safetensors", "model.mtp_block.0.mlp.gate_proj.weight"
    save_file({**load_file(path), name: torch.zeros(2, 2)}, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    source = open_source(tmp_path)
    assert source.model.names.is_unused(name) and source.tensor_names()
