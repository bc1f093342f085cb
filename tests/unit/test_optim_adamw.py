"""FlatAdamW against torch.optim.AdamW; skipped steps; where weight decay applies; schedules against transformers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.config.optim import OptimOptions
from engine.distributed.mesh import single_process_mesh
from engine.distributed.sharding import replicated_spec
from engine.layers.module import ShardEntry
from engine.ops.gradients import GradientSink
from engine.optim.adamw import FlatAdamW
from engine.optim.flat import FlatParameters
from engine.optim.flat_layout import ALIGNMENT
from engine.optim.lr_schedule import learning_rate

SHAPES = {
    "first.weight": (7, 5),
    "norm.weight": (9,),
    "second.weight": (3, 11),
    "second.bias": (3,),
    "frozen.weight": (2, 2),
}
CPU = torch.device("cpu")


def _values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _entries(dtype: torch.dtype = torch.float32) -> list[ShardEntry]:
    entries = []
    for name, value in _values(0).items():
        sink = None if name.startswith("frozen") else GradientSink(value.shape, CPU)
        parameter = nn.Parameter(value.to(dtype), requires_grad=sink is not None)
        entries.append(ShardEntry(name, parameter, replicated_spec(tuple(value.shape), rank=0, size=1), sink))
    return entries


def _optimizer(entries: list[ShardEntry], *, clip: float, decay: float = 0.1) -> FlatAdamW:
    flat = FlatParameters(entries, CPU)
    return FlatAdamW(flat, single_process_mesh(), betas=(0.9, 0.95), eps=1e-6, weight_decay=decay, clip_grad_norm=clip)


def _set_gradients(optimizer: FlatAdamW, step: int, scale: float = 1.0) -> None:
    values = _values(100 + step)
    for slot in optimizer.flat.slots:
        slot.view(optimizer.flat.gradient).copy_(values[slot.entry.name] * scale)


def _state(optimizer: FlatAdamW) -> dict[str, Tensor]:
    flat = optimizer.flat
    named = {slot.entry.name: slot.entry.parameter.data for slot in flat.slots}
    named |= {"master": flat.master, "m": optimizer.exp_avg, "v": optimizer.exp_avg_sq, "t": optimizer.step_count}
    return {name: value.clone() for name, value in named.items()}


@pytest.mark.parametrize("clip", [0.0, 0.7, 1e6])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_ten_steps_equal_torch(clip: float, decay: float):
    entries = _entries()
    optimizer = _optimizer(entries, clip=clip, decay=decay)
    leaves = {name: value.requires_grad_() for name, value in _values(0).items() if not name.startswith("frozen")}
    matrices = [leaf for leaf in leaves.values() if leaf.dim() > 1]
    vectors = [leaf for leaf in leaves.values() if leaf.dim() == 1]
    peer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-6,
    )
    for step in range(10):
        lr = 1e-2 / (1 + step)
        _set_gradients(optimizer, step)
        for name, leaf in leaves.items():
            leaf.grad = _values(100 + step)[name]
        expected = torch.nn.utils.clip_grad_norm_(leaves.values(), clip if clip > 0 else math.inf)
        for group in peer.param_groups:
            group["lr"] = lr
        peer.step()
        norm = optimizer.step(lr)
        torch.testing.assert_close(norm, expected)
        for entry in entries:
            if entry.sink is not None:
                torch.testing.assert_close(entry.parameter.data, leaves[entry.name].detach(), rtol=1e-6, atol=1e-7)
    assert optimizer.step_count.item() == 10 and optimizer.skipped.item() == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_step_changes_nothing(bad: float):
    optimizer = _optimizer(_entries(), clip=1.0)
    _set_gradients(optimizer, 0)
    optimizer.step(1e-2)
    before = _state(optimizer)
    _set_gradients(optimizer, 1)
    optimizer.flat.slots[1].view(optimizer.flat.gradient).view(-1)[2] = bad
    norm = optimizer.step(1e-2)
    assert not torch.isfinite(norm)
    after = _state(optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert optimizer.skip.item() == 1 and optimizer.skipped.item() == 1
    assert optimizer.flat.gradient.abs().sum() == 0, "the next step would start from this one's gradient"


def test_step_after_a_skipped_one_is_as_if_it_never_was():
    first, second = (_optimizer(_entries(), clip=1.0) for _ in range(2))
    for optimizer, steps in ((first, (0, None, 1)), (second, (0, 1))):
        for step in steps:
            _set_gradients(optimizer, step or 0, scale=math.nan if step is None else 1.0)
            optimizer.step(1e-2)
    expected = _state(second)
    assert all(torch.equal(value, expected[name]) for name, value in _state(first).items())
    assert first.skip.item() == 0 and first.skipped.item() == 1


def test_bf16_parameters_follow_their_fp32_masters():
    entries = _entries(torch.bfloat16)
    optimizer = _optimizer(entries, clip=0.0)
    for step in range(50):
        _set_gradients(optimizer, step, scale=1e-3)
        # far below bf16's spacing at 1, so that only a master can add it up
        optimizer.step(1e-5)
    for slot in optimizer.flat.slots:
        master = slot.view(optimizer.flat.master)
        assert master.dtype == torch.float32
        assert torch.equal(slot.entry.parameter.data, master.to(torch.bfloat16))
        start = _values(0)[slot.entry.name].to(torch.bfloat16).float()
        assert (master != start).all()


def test_flat_layout():
    entries = _entries()
    flat = FlatParameters(entries, CPU)
    trainable = [entry.name for entry in entries if entry.sink is not None]
    assert [slot.entry.name for slot in flat.slots] == trainable[::-1], "not in backward order"
    assert flat.num_elements == sum(math.prod(SHAPES[name]) for name in trainable)
    taken = torch.zeros(flat.master.numel(), dtype=torch.int64)
    for slot in flat.slots:
        assert slot.offset % ALIGNMENT == 0
        slot.view(taken).add_(1)
        assert torch.equal(slot.view(flat.master), slot.entry.parameter.data)
    assert taken.max() == 1 and taken.sum() == flat.num_elements
    assert flat.master[taken == 0].abs().sum() == 0
    bounds = [bound for region in flat.regions for bound in (region.start, region.stop)]
    assert bounds[0] == 0 and bounds[-1] == flat.master.numel() and bounds[1:-1:2] == bounds[2::2]
    assert {slot.entry.name for region in flat.regions if region.decays for slot in region.slots} == {
        "first.weight",
        "second.weight",
    }


def test_state_shards_name_masters_and_moments():
    optimizer = _optimizer(_entries(), clip=0.0)
    _set_gradients(optimizer, 0)
    optimizer.step(1e-2)
    shards = {shard.name: shard.tensor for shard in optimizer.state_shards()}
    assert len(shards) == 3 * len(optimizer.flat.slots)
    torch.testing.assert_close(shards["optim.exp_avg/norm.weight"], 0.1 * _values(100)["norm.weight"])
    torch.testing.assert_close(shards["optim.exp_avg_sq/first.weight"], 0.05 * _values(100)["first.weight"] ** 2)
    shards["master/norm.weight"].fill_(4.0)
    optimizer.flat.publish()
    places = {slot.entry.name: slot.entry.parameter.data for slot in optimizer.flat.slots}
    assert places["norm.weight"].unique().tolist() == [4.0], "a shard is no view"


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedule_equals_transformers(schedule: str, warmup: int):
    from transformers import (
        get_constant_schedule_with_warmup,
        get_cosine_schedule_with_warmup,
        get_linear_schedule_with_warmup,
    )

    peer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-4)
    scheduler = {
        "constant": lambda: get_constant_schedule_with_warmup(peer, warmup),
        "linear": lambda: get_linear_schedule_with_warmup(peer, warmup, 30),
        "cosine": lambda: get_cosine_schedule_with_warmup(peer, warmup, 30),
    }[schedule]()
    for step in range(30):
        ours = learning_rate(step, schedule=schedule, peak=3e-4, minimum=0.0, warmup_steps=warmup, total_steps=30)
        assert ours == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9, abs=1e-15), step
        peer.step()
        scheduler.step()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedule_ends_at_its_minimum(schedule: str):
    rates = [
        learning_rate(step, schedule=schedule, peak=1.0, minimum=0.1, warmup_steps=2, total_steps=10)
        for step in range(13)
    ]
    assert rates[2] == 1.0 and rates[10:] == [pytest.approx(0.1)] * 3
    assert rates[2:11] == sorted(rates[2:11], reverse=True)


def test_a_warm_up_by_share_is_that_of_transformers(tmp_path: Path) -> None:
    """Rounded in the same direction, also where the product is just above a whole number (0.07 x 100)."""
    transformers = pytest.importorskip("transformers")
    for share in (0.0, 0.01, 0.03, 0.07, 0.1, 1 / 3, 0.999):
        theirs = transformers.TrainingArguments(output_dir=str(tmp_path), warmup_steps=share, use_cpu=True)
        for steps in (1, 7, 100, 1023):
            assert OptimOptions(warmup_ratio=share).warmup(steps) == theirs.get_warmup_steps(steps)
    assert OptimOptions(warmup_steps=5).warmup(1000) == 5
