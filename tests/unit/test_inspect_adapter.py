"""What `rankfold convert inspect` shows of an adapter, against what PEFT wrote and counts itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from engine.conversion.inspection import run_inspect
from engine.errors import UserError
from engine.telemetry.format import format_count
from tests.unit.checkpoint_models import tiny_llama


def test_an_adapter_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = LoraConfig(
        r=3, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"],
        rank_pattern={"layers.1.self_attn.q_proj": 5},
    )  # fmt: skip
    base = tiny_llama(tmp_path / "hf")
    base.name_or_path = "OWNER/NAME"  # which PEFT records
    model = get_peft_model(base, settings)
    model.save_pretrained(tmp_path / "adapter")
    run_inspect(tmp_path / "adapter", step=None, verify=False)
    text = capsys.readouterr().out
    shown = dict(line.split(maxsplit=1) for line in text.splitlines() if line[0] != " ")
    trainable, _ = model.get_nb_trainable_parameters()
    assert shown["kind"] == "PEFT LoRA adapter"
    assert shown["base"] == "OWNER/NAME"
    assert shown["lora"] == "rank 3, alpha 6, 4 modules"
    assert shown["targets"] == "down_proj, q_proj"
    assert shown["options"] == "rank-stabilised scale"
    assert shown["in"].split(maxsplit=1) == ["full", "5 tensors"]  # all that ends with norm, two in each layer
    assert f"13 tensors, {format_count(trainable)} parameters" in shown["trained"]
    assert shown["trained"].endswith("F32")
    assert f"model.layers.1.self_attn.q_proj: rank 5, scale {6 / 5**0.5:g}" in text
    assert "layers.0." not in text


def test_ranks_and_scales_that_differ_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = LoraConfig(r=2, lora_alpha=4, target_modules=".*k_proj", alpha_pattern={"layers.0.self_attn.k_proj": 9})
    get_peft_model(tiny_llama(tmp_path / "hf"), settings).save_pretrained(tmp_path / "adapter")
    run_inspect(tmp_path / "adapter", step=None, verify=False)
    text = capsys.readouterr().out
    assert "targets        .*k_proj" in text
    assert "model.layers.0.self_attn.k_proj: rank 2, scale 4.5" in text
    assert "layers.1." not in text
    with pytest.raises(UserError, match="is a PEFT adapter, which has no checksums"):
        run_inspect(tmp_path / "adapter", step=None, verify=True)
