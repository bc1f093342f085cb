"""Exports prove themselves: what stock readers would not compute as the live model does is refused."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import open_run
from engine.conversion import proof
from engine.conversion.import_export import Work, export_hf, import_checkpoint
from engine.conversion.live_logits import Overlay, adapter_plan, live_logits, proof_tokens
from engine.conversion.merged_model import MergedSource
from engine.conversion.peft_write import export_peft
from engine.conversion.proof import prove_adapter, prove_model
from engine.errors import UserError
from tests.unit.checkpoint_models import tiny_llama
from tests.unit.test_checkpoint_peft import BLOCK, RANK, factors, trained_run

SCALE = 5.0 / RANK


def set_up(tmp_path: Path, modules: list[str], *, dtype: torch.dtype = torch.float32, **model: bool):
    """The base, and values trained beside it."""
    tiny_llama(tmp_path / "hf", dtype=dtype, **model)
    run = trained_run(tmp_path / "run", factors(modules), tmp_path / "hf")
    return open_source(tmp_path / "hf"), open_run(run)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("modules", [BLOCK, [*BLOCK, "lm_head"], ["embed_tokens"]])
def test_live_logits_are_pefts(tmp_path: Path, modules: list[str], tied: bool) -> None:
    base, run = set_up(tmp_path, modules, tied=tied)
    trained = run.trained()
    export_peft(trained, run.lora, base.model, tmp_path / "adapter")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = proof_tokens(37)
    with torch.no_grad():
        plain = stock(input_ids=tokens).logits
        expected = PeftModel.from_pretrained(stock, tmp_path / "adapter").eval()(input_ids=tokens).logits
    plan = adapter_plan(trained, SCALE)
    found = live_logits(base.model.decoder, Overlay(trained, base), tokens, plan)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(live_logits(base.model.decoder, base, tokens), plain, rtol=0, atol=1e-4)
    assert (expected - plain).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sound_exports_pass(tmp_path: Path, dtype: torch.dtype) -> None:
    base, run = set_up(tmp_path, BLOCK, dtype=dtype)
    import_checkpoint(base, tmp_path / "tp2", tensor=2)
    parts = open_source(tmp_path / "tp2")
    for source in (base, parts, MergedSource(base.model, base, run.trained(), scale=SCALE)):
        report = export_hf(
            source, tmp_path / "out", work=Work(overwrite=True), proof=partial(prove_model, source=source)
        )
        assert re.search(r"checked with transformers: logits of 32 tokens agree to \d.\de-\d\d", report.notes[-1])
    for source in (base, parts):
        try_adapter = partial(prove_adapter, base=source, trained=run.trained(), scale=SCALE)
        report = export_peft(
            run.trained(), run.lora, source.model, tmp_path / "adapter", overwrite=True, proof=try_adapter
        )
        difference = re.search(r"checked with PEFT: logits of 32 tokens agree to (\S+) of", report.notes[-1])
        assert difference is not None and float(difference[1]) < 1e-5


def altered(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def swap(tensors: dict[str, torch.Tensor]) -> None:
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.0.attn.q_proj.lora_A.weight"] = tensors.pop(
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_models_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    base, run = set_up(tmp_path, BLOCK, dtype=dtype)
    merged = MergedSource(base.model, base, run.trained(), scale=SCALE)

    def swapped(folder: Path) -> str:
        altered(folder / "model.safetensors", swap)
        return prove_model(folder, merged)

    with pytest.raises(UserError, match="differ from the live model's by"):
        export_hf(merged, tmp_path / "out", proof=swapped)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    wrong = MergedSource(base.model, base, run.trained(), scale=0.3 * SCALE)
    with pytest.raises(UserError, match="live model"):  # merged with another scale than it was trained with
        export_hf(wrong, tmp_path / "out", proof=partial(prove_model, source=merged))
    with pytest.raises(UserError, match="nearer to the base"):  # not merged at all
        export_hf(base, tmp_path / "out", proof=partial(prove_model, source=merged))


def test_adapters_that_peft_reads_otherwise_are_refused(tmp_path: Path) -> None:
    base, run = set_up(tmp_path, BLOCK)

    def tampering(folder: Path, what: str) -> str:
        config = folder / "adapter_config.json"
        if what == "alpha":
            config.write_text(config.read_text().replace('"lora_alpha": 5', '"lora_alpha": 6'))
        elif what == "name":
            altered(folder / "adapter_model.safetensors", rename)
        else:
            settings = json.loads(config.read_text())
            settings["target_modules"].remove("o_proj")
            config.write_text(json.dumps(settings))
        return prove_adapter(folder, base=base, trained=run.trained(), scale=SCALE)

    for what, words in (
        ("alpha", "PEFT gives logits"),
        ("name", "PEFT does not take"),
        ("target", "PEFT does not take"),
    ):
        with pytest.raises(UserError, match=words):
            export_peft(run.trained(), run.lora, base.model, tmp_path / "a", proof=partial(tampering, what=what))
        assert not (tmp_path / "a").exists()


def test_without_the_stock_libraries_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, run = set_up(tmp_path, BLOCK)
    monkeypatch.setattr(proof, "find_spec", lambda name: None)
    notes = export_hf(base, tmp_path / "out", proof=partial(prove_model, source=base)).notes
    assert "checked with the engine (transformers is not installed)" in notes[-1]
    monkeypatch.setattr(proof, "find_spec", lambda name: None if name == "peft" else SimpleNamespace())
    check = partial(prove_adapter, base=base, trained=run.trained(), scale=SCALE)
    report = export_peft(run.trained(), run.lora, base.model, tmp_path / "adapter", proof=check)
    assert report.notes[-1] == "logits not compared: peft is not installed"


def test_untrained_adapters_are_said_and_dead_ones_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    base = open_source(tmp_path / "hf")
    tensors = factors(["attention.q_proj", "embed_tokens"])

    def export(name: str, **changes: torch.Tensor):
        values = {**tensors, **{key.replace("__", "."): value for key, value in changes.items()}}
        run = open_run(trained_run(tmp_path / name, values, tmp_path / "hf"))
        return export_peft(run.trained(), run.lora, base.model, tmp_path / f"{name}-out").notes

    b0, b1 = (torch.zeros(32, RANK) for _ in range(2))
    zeros = {"layers__0__attention__q_proj__lora_B": b0}
    assert export("sound") == ()
    assert "1 of 3 adapters are untrained (B is zero): layers.0.attention.q_proj" in export("some", **zeros)[0]
    zeros |= {"layers__1__attention__q_proj__lora_B": b1, "embed_tokens__lora_A": torch.zeros(RANK, 37)}
    assert "the adapter is untrained" in export("all", **zeros)[0]
    for key, shape in (("layers__0__attention__q_proj__lora_A", (RANK, 16)), ("embed_tokens__lora_B", (16, RANK))):
        with pytest.raises(UserError, match="is all zero, so nothing was exported"):
            export("dead", **{key: torch.zeros(shape)})


@pytest.mark.parametrize("fused", [False, True])
def test_keys_are_those_that_serving_engines_parse(tmp_path: Path, fused: bool) -> None:
    """vLLM and SGLang: `base_model.model.` and the module's path, `lora_A.weight` or `lora_B.weight`; no bias, DoRA or
    modules_to_save; target_modules is a list of names; the rank at the top is that of every tensor."""
    tiny_llama(tmp_path / "hf")
    base = open_source(tmp_path / "hf")
    modules = ["attention.qkv_proj", "attention.o_proj"] if fused else BLOCK
    run = open_run(trained_run(tmp_path / "run", factors(modules), tmp_path / "hf", fused="qkv" if fused else "none"))
    export_peft(run.trained(), run.lora, base.model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] is None and config["bias"] == "none" and not config.get("use_dora")
    assert isinstance(config["target_modules"], list)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for key, value in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key)
        assert match is not None and match[1] in linears and match[1].rpartition(".")[2] in config["target_modules"]
        assert value.shape[0 if match[2] == "A" else 1] == config["r"]
