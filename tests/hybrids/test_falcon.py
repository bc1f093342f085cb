"""Falcon-H1: its configs, what its numbers multiply, and what PEFT takes of its adapters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import open_run
from engine.conversion.import_export import export_hf
from engine.conversion.merged_model import MergedSource
from engine.conversion.peft_write import export_peft
from engine.conversion.proof import prove_adapter
from engine.errors import UserError
from engine.hybrids.layers.beside_attention import MambaBesideAttention
from engine.hybrids.layers.scaled_mlp import MLPFactors
from engine.models.decoder import Decoder
from engine.models.families import family_of
from tests.distributed.cases import RANK, SCALE, relative_error, uncut
from tests.support.family_models import (
    batch_of,
    engine_model,
    losses_and_gradients,
    make_model,
    stock_gradient,
    stock_losses,
)
from tests.unit.test_checkpoint_peft import trained_run

SIZES = {
    "model_type": "falcon_h1", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 9,
}  # fmt: skip


def test_norms_before_gates_and_biases_behind_them_are_transformers(tmp_path: Path) -> None:
    """The combination that the table of families does not have: groups of heads, normalised and then gated."""
    stock = make_model("falcon h1", tmp_path, mamba_rms_norm=True, projectors_bias=True, mamba_conv_bias=False)
    built, batch = engine_model(tmp_path), batch_of()
    losses, found = losses_and_gradients(built, batch)
    expected = stock_losses(stock, batch)[1]
    torch.testing.assert_close(losses.flatten(), expected, rtol=0, atol=1e-5)
    (expected * batch.loss_weights_BS.flatten()).sum().backward()
    assert sum(name.endswith("mamba.norm.weight") for name in found) == 4
    assert sum(name.endswith("mamba.out_proj.bias") for name in found) == 4
    for name, gradient in found.items():
        assert relative_error(gradient, stock_gradient(stock, tmp_path, name)) < 1e-5, name


NUMBERS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
            "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
        ),
        1.0,
    ),
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}  # fmt: skip
"""The numbers of a model without any."""


def _losses(folder: Path) -> torch.Tensor:
    built = engine_model(folder)
    with torch.no_grad():
        losses: torch.Tensor = built.model(batch_of(), built.stage.step, training=False)
    return losses


def test_each_number_counts_as_in_transformers(tmp_path: Path) -> None:
    """Each alone, of the same weights: so none stands in for another."""
    stock = make_model("falcon h1", tmp_path, num_hidden_layers=1, **NUMBERS)
    plain = _losses(tmp_path)
    seen = [plain]
    changes: list[dict[str, Any]] = [{key: 2.5} for key, value in NUMBERS.items() if value == 1.0]
    for key in ("mlp_multipliers", "ssm_multipliers"):
        count = len(NUMBERS[key])
        changes += [{key: [2.5 if place == index else 1.0 for place in range(count)]} for index in range(count)]
    for change in changes:
        stock.config.update({**NUMBERS, **change})
        stock.config.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
        with torch.no_grad():
            expected = stock_losses(model, batch_of())[1]
        seen.append(_losses(tmp_path))
        torch.testing.assert_close(seen[-1], expected, rtol=0, atol=1e-5)
    assert len(seen) == 15
    apart = [(one - other).abs().max() for index, one in enumerate(seen) for other in seen[:index]]
    assert min(apart) > 5e-5, "two numbers do the same"


def test_what_a_config_leaves_out_is_as_in_transformers() -> None:
    family, text = family_of({**SIZES, "hidden_size": 64, "num_attention_heads": 16})
    config = family.config_from_hf(text)
    sizes, factors = config.variant(MambaBesideAttention), config.variant(MLPFactors)
    assert sizes is not None and factors is not None
    assert (sizes.width, sizes.heads, sizes.head_dim, sizes.state, sizes.groups) == (1024, 128, 8, 256, 1)
    assert (sizes.has_norm, sizes.gates_first, sizes.out_bias) == (False, False, False)
    assert (factors.gate, factors.output, config.attention_scale, config.num_kv_heads) == (1.0, 1.0, 0.5, 8)
    # null is not what is left out: the width follows from the model's, and all heads have keys of their own
    family, text = family_of({**SIZES, "mamba_d_ssm": None, "mamba_n_heads": 4, "num_key_value_heads": None})
    config = family.config_from_hf(text)
    sizes = config.variant(MambaBesideAttention)
    assert sizes is not None and (sizes.width, sizes.head_dim, config.num_kv_heads) == (32, 8, 4)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"ssm_multipliers": [1.0] * 4}, r"ssm_multipliers \[1.0, 1.0, 1.0, 1.0\], but 5 numbers above 0"),
        ({"mlp_multipliers": [1.0, -1.0]}, r"mlp_multipliers \[1.0, -1.0\], but 2 numbers above 0"),
        ({"key_multiplier": 0}, "key_multiplier 0, but a number above 0"),
        ({"mamba_d_ssm": 30, "mamba_n_heads": 4}, "4 Mamba heads of 7 features, which are not the 30"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_is_not_computed_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        family, text = family_of({**SIZES, **more})
        family.config_from_hf(text)


@pytest.mark.parametrize("has_out_proj", [False, True])
def test_adapters_are_exported_as_far_as_peft_takes_them(has_out_proj: bool, tmp_path: Path) -> None:
    make_model("falcon h1", tmp_path / "hf")
    names = "(in|q|k|v|o|gate|up|down)" if not has_out_proj else "(in|out)"
    built = engine_model(tmp_path / "hf", trained="", adapters=rf"layers\..*\.{names}_proj")
    specs = built.specs()
    tensors = {key: uncut(value, specs[key]) for key, value in built.parameters().items()}
    run = trained_run(tmp_path / "run", tensors, tmp_path / "hf", alpha=SCALE * RANK, rslora=False)
    checkpoint, source = open_run(run), open_source(tmp_path / "hf")
    proof = partial(prove_adapter, base=source, trained=checkpoint.trained(), scale=SCALE)
    export = partial(export_peft, checkpoint.trained(), checkpoint.lora, source.model, tmp_path / "adapter")
    if has_out_proj:
        with pytest.raises(UserError, match=r"'out_proj' is incompatible .* export with --format hf --merge, or leave"):
            export(proof=proof)
        assert not (tmp_path / "adapter").exists()
        return
    (note,) = export(proof=proof).notes
    assert note.startswith("checked with PEFT")
    modules = {key.rpartition(".lora_")[0] for key in load_file(tmp_path / "adapter" / "adapter_model.safetensors")}
    packed = [f"self_attn.{part}" for part in _VLLM["qkv_proj"]] + [
        f"feed_forward.{part}" for part in _VLLM["gate_up_proj"]
    ]
    leaves = [*packed, "self_attn.o_proj", "feed_forward.down_proj", "mamba.in_proj"]
    assert modules == {f"base_model.model.model.layers.{index}.{leaf}" for index in range(4) for leaf in leaves}


_VLLM = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""vLLM's `packed_modules_mapping` of Falcon-H1: its linear -> the names that an adapter has."""


def test_one_adapter_over_several_projections_is_merged_into_them(tmp_path: Path) -> None:
    make_model("falcon h1", tmp_path / "hf")
    pattern = r"layers\..*\.(qkv|gate_up|o|down|in|out)_proj"
    built = engine_model(tmp_path / "hf", trained="", adapters=pattern, fused=r".*(qkv|gate_up)_proj")
    tensors = built.parameters()
    assert len(tensors) == 4 * 6 * 2
    with torch.no_grad():
        live = built.model(batch_of(), built.stage.step, training=False)
    run = open_run(trained_run(tmp_path / "run", tensors, tmp_path / "hf", alpha=SCALE * RANK, rslora=False))
    source = open_source(tmp_path / "hf")
    export_hf(MergedSource(source.model, source, run.trained(), scale=SCALE), tmp_path / "merged")
    assert (live - _losses(tmp_path / "hf")).abs().max() > 0.05, "the adapters do nothing"
    torch.testing.assert_close(_losses(tmp_path / "merged"), live, rtol=0, atol=1e-4)


def test_a_layer_keeps_keys_values_and_states(tmp_path: Path) -> None:
    make_model("falcon h1", tmp_path)
    model = engine_model(tmp_path).model
    assert isinstance(model, Decoder)
    assert [one.name for one in model.cached_attentions()] == [f"layers.{index}.attention" for index in range(4)]
    assert model.reruns_rows is None
