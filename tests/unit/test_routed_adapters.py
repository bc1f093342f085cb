"""Adapters of experts: exported and opened by stock PEFT, merged, read back; and what PEFT would read otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from engine.checkpoint.model_folder import open_model
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import open_run
from engine.conversion.import_export import export_hf
from engine.conversion.merged_model import MergedSource
from engine.conversion.peft_experts import obstacle
from engine.conversion.peft_read import AdapterSource
from engine.conversion.peft_write import export_peft
from engine.errors import UserError
from engine.layers.routed_experts import RoutedSizes
from engine.ops.routing import RoutingRule
from tests.distributed.cases import RANK, SCALE, small_config
from tests.family_models import ROUTED, engine_model, make_model
from tests.sweeps import sampled
from tests.unit.test_checkpoint_peft import trained_run
from tests.unit.test_families_adapters import _logits, _stock_logits

ADAPTED = r"layers\.\d+\.(attention|mlp\.experts\.\d+)\..*_proj"
SIZES = small_config(
    num_layers=3,
    routed=RoutedSizes(
        rule=RoutingRule(num_experts=3, per_token=2, renormalises=True, rounds=True), intermediate=8, shared=4,
        dense_layers=(0,),
    ),
)  # fmt: skip
EVERY = {f"layers.{i}.mlp.experts.{e}.{leaf}_proj" for i in (1, 2) for e in range(3) for leaf in ("gate", "up", "down")}


@pytest.mark.parametrize("name", sampled(ROUTED, ["mixtral", "qwen3 moe"]))
def test_adapter_and_merged_model_give_the_live_models_logits(name: str, tmp_path: Path):
    base = tmp_path / "hf"
    plain = make_model(name, base)
    built = engine_model(base, trained="", adapters=ADAPTED)
    live, tensors = _logits(built), built.parameters()
    assert (live - _stock_logits(plain)).abs().max() > 0.05, "the adapters do nothing"
    checkpoint = open_run(trained_run(tmp_path / "run", tensors, base, alpha=SCALE * RANK))
    source = open_source(base)
    export_peft(checkpoint.trained(), checkpoint.lora, source.model, tmp_path / "adapter")
    export_hf(MergedSource(source.model, source, checkpoint.trained(), scale=SCALE), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    torch.testing.assert_close(_stock_logits(merged), live, rtol=0, atol=1e-4)
    model = open_model(base)
    read = AdapterSource(tmp_path / "adapter", names=model.names, decoder=model.decoder)
    assert read.tensor_names() == sorted(tensors)
    assert all(torch.equal(read.read_whole(key), value) for key, value in tensors.items())
    peft = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(_stock_logits(peft.eval()), live, rtol=0, atol=1e-4)


def test_what_peft_would_read_otherwise_is_refused(tmp_path: Path):
    make_model("qwen2 moe", tmp_path / "hf")
    built = engine_model(tmp_path / "hf", trained="", adapters=rf"{ADAPTED}|.*shared_expert.*_proj")
    checkpoint = open_run(trained_run(tmp_path / "run", built.parameters(), tmp_path / "hf", alpha=5))
    with pytest.raises(UserError, match="shared_expert.down_proj has an adapter, whose name means the experts to PEFT"):
        export_peft(checkpoint.trained(), checkpoint.lora, open_model(tmp_path / "hf"), tmp_path / "adapter")


@pytest.mark.parametrize(
    ("adapted", "in_full", "alike", "rslora", "reason"),
    [
        (EVERY, [], True, False, None),
        ({"layers.1.attention.q_proj"}, ["lm_head"], False, True, None),
        (EVERY, ["layers.1.mlp.router"], True, False, "layers.1.mlp.router was trained in full"),
        (EVERY | {"layers.0.mlp.up_proj"}, [], True, False, "layers.0.mlp.up_proj has an adapter"),
        ({one for one in EVERY if "up" not in one}, [], True, False, "one alone"),
        (EVERY - {"layers.2.mlp.experts.1.down_proj"}, [], True, False, "experts.1.down_proj has no adapter"),
        (EVERY, [], False, False, "differ in rank"),
        (EVERY, [], True, True, "rslora"),
        ({one for one in EVERY if "down" in one}, [], True, True, None),
    ],
)
def test_obstacles(adapted: set[str], in_full: list[str], alike: bool, rslora: bool, reason: str | None):
    found = obstacle(adapted, in_full, SIZES, alike=alike, rslora=rslora)
    assert found is None if reason is None else found is not None and reason in found
