"""One adapter over matrices that the checkpoint stores as one, as PEFT trains them: on every layout, there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from engine.checkpoint.run.training_state import open_run
from engine.conversion.peft_write import export_peft
from engine.errors import UserError
from engine.runtime.launch import Launch
from tests.support.family_models import make_model, stock_losses
from tests.support.peft_following import ALONE, STEPS, batches, build, our_losses, peft_start, take_steps, their_losses
from tests.support.spawning import spawn
from tests.support.sweeps import sampled
from tests.unit.test_checkpoint_peft import trained_run

LIMIT = 2e-6  # of a loss in fp32 against fp64
GIVEN: dict[str, Any] = {"lora.rank": 3, "lora.alpha": 5}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"parallel.tensor": 2, "parallel.sequence": "false"},
    "tensor, joint": {"parallel.tensor": 2, "parallel.sequence": "false", "parallel.lora_reduce": "joint"},
    "tensor, sequence": {"parallel.tensor": 2},
    "pipeline": {"parallel.pipeline": 2, "train.micro_batch_size": 2},
    "shard": {"parallel.shard": "parameters", "train.micro_batch_size": 2},
}
PATTERNS = {"rank_pattern": {"qkv_proj": 2, r"layers\.1\.mlp\.gate_up_proj": 4}, "alpha_pattern": {"gate_up_proj": 7}}
OUR_PATTERNS = {
    "lora.rank_pattern": r"{qkv_proj: 2, 'layers\.1\.mlp\.gate_up_proj': 4}",
    "lora.alpha_pattern": "{gate_up_proj: 7}",
}


QUICK = ("tensor, joint", "tensor, sequence", "shard")


def _on_two_ranks(folder: str, given: dict[str, Any], steps: int, names: tuple[str, ...]) -> dict[str, list[float]]:
    launch = Launch(rank=dist.get_rank(), world_size=2, device=torch.device("cpu"))
    return {name: our_losses(Path(folder), {**given, **LAYOUTS[name]}, launch, steps=steps)[0] for name in names}


def _difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("dora", "names"), sampled([(False, QUICK), (False, tuple(LAYOUTS)), (True, tuple(LAYOUTS))], [(False, QUICK)])
)
def test_every_layout_follows_peft(dora: bool, names: tuple[str, ...], tmp_path: Path) -> None:
    model = peft_start("phi3", tmp_path, use_dora=dora, **PATTERNS)
    given = {**GIVEN, **OUR_PATTERNS, "lora.dora": str(dora).lower(), "lora.init_from": tmp_path / "start"}
    theirs = their_losses(model)
    for seen in spawn(_on_two_ranks, world=2, args=(str(tmp_path), given, STEPS, names)):
        assert tuple(seen) == names
        for name, losses in seen.items():
            assert _difference(losses, theirs) < LIMIT, name


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("names", [QUICK[1:], pytest.param(tuple(LAYOUTS), marks=pytest.mark.slow)], ids=len)
def test_dropout_is_the_same_on_every_layout(names: tuple[str, ...], tmp_path: Path) -> None:
    peft_start("phi3", tmp_path, use_dora=True, lora_dropout=0.2)
    given = {**GIVEN, "lora.dora": "true", "lora.dropout": 0.2, "lora.init_from": tmp_path / "start"}
    alone = our_losses(tmp_path, given, steps=3)[0]
    assert _difference(alone, our_losses(tmp_path, {**given, "lora.dropout": 0}, steps=3)[0]) > 1e-3
    for seen in spawn(_on_two_ranks, world=2, args=(str(tmp_path), given, 3, names)):
        assert all(_difference(losses, alone) < LIMIT for losses in seen.values())


def _exported(given: dict[str, Any], folder: Path, **lora: Any) -> tuple[nn.Module, Path]:
    """What eight steps left, as stock PEFT opens it."""
    training, _ = build(folder, given, ALONE)
    take_steps(training, given)
    masters = {shard.name: shard.tensor.clone() for shard in training.optimizer.flat.master_shards()}
    checkpoint = open_run(trained_run(folder / "run", masters, folder / "hf", rank=3, alpha=5.0, **lora))
    export_peft(checkpoint.trained(), checkpoint.lora, training.source.model, folder / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder / "hf")
    return PeftModel.from_pretrained(base, folder / "adapter").eval(), folder / "adapter"


@pytest.mark.parametrize("dora", sampled([False, True], [True]))
def test_what_was_trained_is_pefts_adapter(dora: bool, tmp_path: Path) -> None:
    """Names and values as PEFT saves them, and a run that starts from them trains the same adapter on."""
    model = peft_start("phi3", tmp_path, use_dora=dora)
    given = {**GIVEN, "lora.dora": str(dora).lower(), "lora.init_from": tmp_path / "start"}
    found, folder = _exported(given, tmp_path, dora=dora)
    their_losses(model)
    model.save_pretrained(tmp_path / "end")
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (folder, tmp_path / "end"))
    assert ours.keys() == theirs.keys()
    assert any("gate_up_proj.lora_A" in key for key in ours)
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) < 1e-4
    (batch,) = batches(0)
    with torch.no_grad():
        logits, expected = stock_losses(found, batch)[0], stock_losses(model.float().eval(), batch)[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
    further = {**given, "lora.init_from": folder}
    assert _difference(our_losses(tmp_path, further)[0], their_losses(model)) < 1e-4  # AdamW starts anew in both


@pytest.mark.parametrize(
    ("fused", "targets", "adapted", "said"),
    [
        ("auto", "qkv_proj,gate_up_proj", {"qkv_proj", "gate_up_proj"}, "qkv_proj: one adapter for the whole matrix"),
        ("auto", "q_proj,v_proj,gate_proj,up_proj", {"q_proj", "v_proj", "gate_up_proj"}, "each for parts of qkv_proj"),
        ("none", "gate_up_proj", {"gate_proj", "up_proj"}, "note: one adapter each for parts of gate_up_proj"),
        ("qkv", "q_proj,k_proj,v_proj,up_proj", {"qkv_proj", "up_proj"}, "note: one adapter each for parts of gate_up"),
    ],
)
def test_what_is_trained_and_said(fused: str, targets: str, adapted: set[str], said: str, tmp_path: Path) -> None:
    make_model("phi3", tmp_path / "hf")
    training, lines = build(tmp_path, {**GIVEN, "lora.fused": fused, "lora.targets": targets}, ALONE)
    names = {shard.name.split(".")[-2] for shard in training.optimizer.flat.master_shards()}
    assert names == adapted
    assert any(said in line for line in lines), lines


def test_several_modules_may_share_an_adapter_that_the_checkpoint_keeps_apart(tmp_path: Path) -> None:
    """Patterns may name what they share, and DoRA's magnitudes start as the rows' lengths."""
    make_model("qwen3", tmp_path / "hf")
    shared = {**GIVEN, "lora.dora": "true", "lora.fused": "all", "lora.rank_pattern": "{gate_up_proj: 2}"}
    training, lines = build(tmp_path, shared, ALONE)
    ranks = {
        shard.name.split(".")[-2]: shard.tensor.shape[0]
        for shard in training.optimizer.flat.master_shards()
        if shard.name.endswith("lora_A")
    }
    assert ranks == {"qkv_proj": 3, "gate_up_proj": 2, "o_proj": 3, "down_proj": 3}
    assert sum("share one adapter, where PEFT trains one each" in line for line in lines) == 2
    first, plain = take_steps(training, {}, 1), our_losses(tmp_path, {**GIVEN}, steps=1)[0]
    assert first == pytest.approx(plain, abs=1e-6)
    found, _ = _exported(shared, tmp_path, dora=True, fused="all", rank_pattern={"gate_up_proj": 2})
    assert isinstance(found, PeftModel)


def test_an_adapter_of_blocks_is_trained_as_it_was(tmp_path: Path) -> None:
    """Parts that were trained apart go on apart: what the exporter wrote for them says so."""
    make_model("phi3", tmp_path / "hf")
    apart = {**GIVEN, "lora.fused": "none"}
    _, folder = _exported(apart, tmp_path)
    training, lines = build(tmp_path, {**GIVEN, "lora.init_from": folder}, ALONE)
    assert not any("qkv_proj" in shard.name for shard in training.optimizer.flat.master_shards())
    assert sum("note: one adapter each for parts of" in line for line in lines) == 2
    with pytest.raises(UserError, match=r"layers.0.attention.qkv_proj rank 3, but the adapter .* has 9"):
        build(tmp_path, {**GIVEN, "lora.init_from": folder, "lora.fused": "all"}, ALONE)


def test_adapters_apart_do_not_become_one(tmp_path: Path) -> None:
    peft_start("qwen2", tmp_path)
    with pytest.raises(UserError, match=r"lora.fused asks for one adapter over .*q_proj.*: set lora.fused to none"):
        build(tmp_path, {**GIVEN, "lora.init_from": tmp_path / "start", "lora.fused": "qkv"}, ALONE)
