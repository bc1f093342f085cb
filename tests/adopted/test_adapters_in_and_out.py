"""Adapters and trained weights of adopted models, out to PEFT and transformers and back in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.adopted.config import INSIDE
from engine.adopted.structure import quiet
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import TrainingCheckpoint, open_run
from engine.checkpoint.weight_source import WeightSource
from engine.conversion.import_export import export_hf
from engine.conversion.merged_model import MergedSource
from engine.conversion.peft_read import AdapterSource
from engine.conversion.peft_write import export_peft
from engine.conversion.proof import prove_adapter, prove_model
from engine.errors import UserError
from engine.models.names import CORRECTION
from tests.adopted.saved_models import save_small, stored
from tests.unit.test_checkpoint_peft import RANK, trained_run

SCALE = 5.0 / RANK
TYPES = ("helium", "exaone_moe", "gpt_bigcode", "ctrl")
"""The linears of ctrl's MLPs have numbers for names, as its layers have."""


def _opened(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def _trained(folder: Path, model: Any, **lora: Any) -> tuple[WeightSource, TrainingCheckpoint, dict[str, Tensor]]:
    """Returns the base in `folder / "hf"`, and a run with drawn factors on every linear of its layers."""
    base = open_source(folder / "hf")
    layers, generator = base.model.names.module_to_hf("layers"), torch.Generator().manual_seed(2)
    factors = {}
    for place, module in model.named_modules():
        if place.startswith(f"{layers}.") and isinstance(module, nn.Linear):
            index, _, inside = place[len(layers) + 1 :].partition(".")
            for leaf, shape in (("lora_A", (RANK, module.in_features)), ("lora_B", (module.out_features, RANK))):
                factors[f"layers.{index}.{INSIDE}{inside}.{leaf}"] = torch.randn(shape, generator=generator) * 0.1
    return base, open_run(trained_run(folder / "run", factors, folder / "hf", **lora)), factors


def _merge(model: Any, base: WeightSource, factors: dict[str, Tensor]) -> Tensor:
    """Adds B A to the linears of transformers' model, and returns its logits."""
    with torch.no_grad():
        for name in (name.removesuffix(".lora_A") for name in factors if name.endswith(".lora_A")):
            weight = model.get_submodule(base.model.names.module_to_hf(name)).weight
            weight += SCALE * factors[f"{name}.lora_B"] @ factors[f"{name}.lora_A"]
        return _logits(model)


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.arange(3, 35).view(2, 16)).logits
    return found


@pytest.mark.parametrize("model_type", TYPES)
def test_peft_opens_adapters_as_they_were_trained(tmp_path: Path, model_type: str) -> None:
    from peft import PeftModel

    base, run, factors = _trained(tmp_path, save_small(model_type, tmp_path / "hf"))
    export_peft(run.trained(), run.lora, base.model, tmp_path / "adapter")
    plain = _opened(tmp_path / "hf")
    before = _logits(plain)
    found = _logits(PeftModel.from_pretrained(_opened(tmp_path / "hf"), tmp_path / "adapter"))
    expected = _merge(plain, base, factors)
    assert (expected - before).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    again = AdapterSource(tmp_path / "adapter", names=base.model.names, decoder=base.model.decoder)
    assert set(again.tensor_names()) == set(factors)
    assert all(torch.equal(again.read_whole(name), value) for name, value in factors.items())


def test_proofs_hold(tmp_path: Path) -> None:
    base, run, _ = _trained(tmp_path, save_small("exaone_moe", tmp_path / "hf"))
    proof = partial(prove_adapter, base=base, trained=run.trained(), scale=SCALE)
    report = export_peft(run.trained(), run.lora, base.model, tmp_path / "adapter", proof=proof)
    assert "checked with PEFT" in report.notes[-1]
    merged = MergedSource(base.model, base, run.trained(), scale=SCALE)
    report = export_hf(merged, tmp_path / "merged", proof=partial(prove_model, source=merged))
    assert "checked with transformers" in report.notes[-1]
    assert stored(tmp_path / "merged").keys() == stored(tmp_path / "hf").keys()


@pytest.mark.parametrize("option", ["dora", "bias"])
def test_what_peft_lacks_for_parameters_is_refused(tmp_path: Path, option: str) -> None:
    base, run, _ = _trained(tmp_path, save_small("exaone_moe", tmp_path / "hf"), **{option: True})
    with pytest.raises(UserError, match=rf"PEFT lacks lora\.{option}: export with --format hf --merge"):
        export_peft(run.trained(), run.lora, base.model, tmp_path / "adapter")


def test_adapters_of_peft_come_in(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    save_small("cohere2", tmp_path / "hf")
    adapted = get_peft_model(_opened(tmp_path / "hf"), LoraConfig(r=RANK, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    names = open_source(tmp_path / "hf").model
    source = AdapterSource(tmp_path / "adapter", names=names.names, decoder=names.decoder)
    live = dict(adapted.named_parameters())
    assert len(source.tensor_names()) == 4 * 2 * 2
    for name in source.tensor_names():
        module, _, leaf = name.rpartition(".")
        place = f"base_model.model.{names.names.module_to_hf(module)}.{leaf}.default.weight"
        assert torch.equal(source.read_whole(name), live[place]), name


@pytest.mark.parametrize("has_base", [True, False])
def test_experts_trained_in_full_are_written_one_by_one(tmp_path: Path, has_base: bool) -> None:
    save_small("solar_open", tmp_path / "hf")
    base = open_source(tmp_path / "hf")
    trains = [name for name in base.tensor_names() if not name.endswith(CORRECTION)]
    chosen = [name for name in trains if not has_base or ".experts." in name]
    values = {name: torch.randn(base.shape(name)) for name in chosen}
    run = open_run(trained_run(tmp_path / "run", values, tmp_path / "hf"))
    merged = MergedSource(base.model, base if has_base else None, run.trained(), scale=0.0)
    export_hf(merged, tmp_path / "out", max_shard_bytes=100_000)
    assert stored(tmp_path / "out").keys() == stored(tmp_path / "hf").keys()
    state = _opened(tmp_path / "out").state_dict()
    for name in trains:
        expected = values[name] if name in values else base.read_whole(name)
        assert torch.equal(state[base.model.names.to_hf(name).name], expected), name


def test_a_model_from_random_values_is_written_as_transformers_would(tmp_path: Path) -> None:
    from engine.checkpoint.model_folder import open_model

    save_small("solar_open", tmp_path / "hf")
    base = open_source(tmp_path / "hf")
    values = {name: torch.randn(base.shape(name)) for name in base.tensor_names()}
    run = open_run(trained_run(tmp_path / "run", values, tmp_path / "hf"))
    export_hf(MergedSource(open_model(tmp_path / "hf"), None, run.trained(), scale=0.0), tmp_path / "out")
    assert stored(tmp_path / "out").keys() == stored(tmp_path / "hf").keys()
