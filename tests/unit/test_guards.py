"""Guards in one process: fingerprints, limits, dead adapters, leaps, and what is said."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.config.guards import GuardOptions
from engine.config.load import parse_config
from engine.distributed.mesh import Axis
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.training.guards.fingerprint import AT_ONCE, Fingerprints
from engine.training.guards.run_guards import Guards
from engine.training.guards.spikes import NO_LIMIT, RunningLimit, as_float32
from engine.training.observer import LaunchedStep
from engine.training.step import StepFigures
from tests.distributed.guarded_runs import OPTIONS, build_run, drive, guards_of, zero_b
from tests.distributed.sharded_runs import Layout, Run
from tests.support.graph_training import make_steps, pair

ALONE = Layout(case="adapters", grid=RankGrid())
CPU = torch.device("cpu")
ADAPTER = "layers.1.mlp.down_proj.lora_A"


def _print_of(*tensors: Tensor) -> int:
    return int(Fingerprints(CPU).of(tensors))


def _entry(run: Run, name: str):
    return next(entry for entry in run.entries if entry.name == name)


# fingerprints


def _by_hand(tensor: Tensor) -> int:
    """The module's formula in Python's own integers, modulo 2^64."""
    mask = (1 << 64) - 1

    def odd(index: int) -> int:
        value = (index + 1) * 0x9E3779B97F4A7C15 & mask
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            signed = value - (1 << 64) if value >> 63 else value
            value = ((value ^ (signed >> shift)) & mask) * factor & mask
        return value | 1

    bits = tensor.view(torch.int32).tolist()
    total = sum(bits[r][c] * odd((1 << 40) + r) * odd(c) for r in range(len(bits)) for c in range(len(bits[0]))) & mask
    return total - (1 << 64) if total >> 63 else total


def test_the_formula():
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    assert _print_of(tensor) == _by_hand(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float64])
@pytest.mark.parametrize("shape", [(6, 9), (11,)])
def test_every_single_bit_shows(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    expected = _print_of(tensor)
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    flat = bits.view(-1)
    for element in range(flat.numel()):
        for bit in range(8 * tensor.element_size()):
            kept = flat[element].clone()
            flat[element] = kept.bitwise_xor(torch.ones_like(kept) << bit)
            assert _print_of(tensor) != expected, (element, bit)
            flat[element] = kept
    assert _print_of(tensor) == expected


def test_changes_that_often_cancel():
    tensor = torch.randn(8, 8)
    changes = {
        "all signs": -tensor,
        "two rows swapped": tensor[[1, 0, *range(2, 8)]],
        "two columns swapped": tensor[:, [1, 0, *range(2, 8)]],
        "transposed": tensor.T.contiguous(),
        "two signs": torch.cat((-tensor[:1, :2], tensor[:1, 2:]), 1).repeat(1, 1),
    }
    changes["two signs"] = torch.cat((changes["two signs"], tensor[1:]))
    for what, changed in changes.items():
        assert _print_of(changed) != _print_of(tensor), what


def test_views_pieces_and_parts():
    """How the numbers lie does not count, and neither does in how many pieces they are taken."""
    storage = torch.randn(6, 12)
    assert _print_of(storage[:, :9]) == _print_of(storage[:, :9].clone())
    wide = torch.randn(5, AT_ONCE // 2, generator=torch.Generator().manual_seed(2))
    rows = [int(Fingerprints(CPU).of([wide[:, :3].contiguous()]))]
    assert rows == [_by_hand(wide[:, :3].contiguous())]
    changed = wide.clone()
    changed[4, -1] += 1
    assert _print_of(wide) != _print_of(changed)
    assert _print_of(storage[:2], storage[2:]) != _print_of(storage[2:], storage[:2])


# limits


def test_a_limit_is_the_median_and_its_deviations():
    figures = [2.0, 2.3, 1.9, 2.1, 2.4, 1.7, 2.2, 2.0]
    limit = RunningLimit(window=8, deviations=10.0, least=0.1, logarithms=False)
    for count, figure in enumerate(figures):
        assert (limit.limit() == NO_LIMIT) == (count < 4)
        limit.add(figure)
    middle = statistics.median(figures)
    spread = 1.4826 * statistics.median([abs(figure - middle) for figure in figures])
    assert limit.limit() == as_float32(middle + 10 * spread)
    limit.add(float("nan"))
    assert limit.limit() == as_float32(middle + 10 * spread)


def test_the_least_leap():
    loss = RunningLimit(window=8, deviations=8.0, least=1.0, logarithms=False)
    norm = RunningLimit(window=8, deviations=8.0, least=4.0, logarithms=True)
    for _ in range(8):
        loss.add(1.5)
        norm.add(0.5)
    assert loss.limit() == 2.5
    assert norm.limit() == pytest.approx(2.0, rel=1e-6)
    assert norm.middle() == pytest.approx(0.5)


def test_a_level_that_stays_becomes_usual():
    limit = RunningLimit(window=8, deviations=8.0, least=1.0, logarithms=False)
    for _ in range(8):
        limit.add(1.0)
    for _ in range(5):
        limit.add(9.0)
    assert limit.limit() >= 9.0


# runs


def test_an_ordinary_run_says_nothing():
    assert drive(build_run(ALONE), OPTIONS, steps=20) == []


def test_an_adapter_whose_gradient_goes_nowhere():
    def fault(run: Run, step: int) -> None:
        if step == 1:
            _entry(run, ADAPTER).sink.bind(torch.zeros(_entry(run, ADAPTER).sink.shape), lambda: None)

    said = drive(build_run(ALONE), OPTIONS, steps=6, fault=fault)
    assert len(said) == 1
    assert said[0].startswith(f"stopped: up to step 4, {ADAPTER} had no gradient but zeros on rank 0: ")
    warned = drive(build_run(ALONE), replace(OPTIONS, liveness_policy="warn"), steps=6, fault=fault)
    assert warned == [f"warning: up to step 4, {ADAPTER} had no gradient but zeros on rank 0"]


def test_an_adapter_that_nobody_trains():
    def fault(run: Run, step: int) -> None:
        if step == 0:
            entries = run.stages._stages[0].entries
            entries[:] = [entry._replace(sink=None) if entry.name == ADAPTER else entry for entry in entries]

    said = drive(build_run(ALONE), OPTIONS, steps=6, fault=fault)
    assert len(said) == 1 and f"{ADAPTER} is not among the trained parameters on rank 0" in said[0]


def test_an_adapter_that_the_model_does_not_see_change():
    """The master learns; what the model reads was copied once and is written nowhere."""

    def fault(run: Run, step: int) -> None:
        if step == 0:
            parameter = _entry(run, ADAPTER).parameter
            parameter.data = parameter.data.clone()

    said = drive(build_run(ALONE), OPTIONS, steps=6, fault=fault)
    assert len(said) == 1
    assert f"{ADAPTER} was updated, but the model still computes with its first value on rank 0" in said[0]


def test_nothing_is_judged_before_there_is_a_learning_rate():
    def rate(step: int) -> float:
        return 0.0 if step <= 6 else 1e-3

    assert drive(build_run(ALONE), OPTIONS, steps=14, fault=zero_b, lr=rate) == []

    def frozen_too(run: Run, step: int) -> None:
        zero_b(run, step)
        if step == 1:
            _entry(run, ADAPTER).sink.bind(torch.zeros(_entry(run, ADAPTER).sink.shape), lambda: None)

    said = drive(build_run(ALONE), OPTIONS, steps=14, fault=frozen_too, lr=rate)
    assert len(said) == 1 and said[0].startswith(f"stopped: up to step 10, {ADAPTER} had no gradient but zeros")


def test_an_adapter_that_dies_when_a_run_is_resumed():
    """Its first moment is that of the run before, and only falls."""
    run = build_run(ALONE)
    assert drive(run, OPTIONS, steps=8) == []

    def fault(run: Run, step: int) -> None:
        if step == 1:
            _entry(run, ADAPTER).sink.bind(torch.zeros(_entry(run, ADAPTER).sink.shape), lambda: None)

    said = drive(run, OPTIONS, steps=8, fault=fault)
    assert len(said) == 1 and f"{ADAPTER} had no gradient but zeros" in said[0]
    again = build_run(ALONE)
    assert drive(again, OPTIONS, steps=8) == []
    assert drive(again, OPTIONS, steps=8) == [], "alive when it is resumed"


def test_a_gradient_that_is_small_beside_an_earlier_runs_is_one():
    """Where one element of the moment is thousands of times as large as the gradients that follow, the largest element
    and the norm are within 1e-4 of what decay leaves of them."""
    run = build_run(ALONE)
    assert drive(run, OPTIONS, steps=8) == []
    for shard in run.optimizer.flat.shards("", run.optimizer.exp_avg):
        if shard.name[1:] == ADAPTER:
            shard.tensor.view(-1)[0] = 5e3 * float(shard.tensor.abs().max())
    assert drive(run, OPTIONS, steps=8) == []


@pytest.mark.parametrize("chosen", [{1}, {2}, {3}, {4}, {3, 4}, {1, 2}, {1, 4}, set()], ids=str)
def test_an_expert_that_few_steps_choose(chosen: set[int]):
    """Only one that no step chose is spoken of. A's gradient is zero before B has moved: judged by the last look alone,
    runs with one such step stop."""

    def fault(run: Run, step: int) -> None:
        zero_b(run, step)
        bias = _entry(run, "layers.1.mlp.router.bias").parameter.data
        bias[2] = 1e9 if step in chosen else -1e9

    said = drive(build_run(replace(ALONE, case="biased, adapters", dropout=0.0)), OPTIONS, steps=6, fault=fault)
    if chosen:
        assert said == []
    else:
        assert len(said) == 1 and said[0].startswith("note: up to step 4 the router sent no token to layers.1.mlp.exp")


LEAP = 12


def _leap(run: Run, step: int) -> None:
    """A norm's weight that is 300 times too large in one step."""
    weight = _entry(run, "layers.0.input_norm.weight").parameter.data
    head = _entry(run, "lm_head.weight").parameter.data
    if step == LEAP:
        head.mul_(64.0)
        weight.mul_(4.0)
    if step == LEAP + 1:
        head.mul_(1 / 64.0)
        weight.mul_(0.25)


@pytest.mark.parametrize("policy", ["off", "warn", "skip", "stop"])
def test_a_leap(policy: str):
    run = build_run(ALONE)
    before: list[Tensor] = []

    def fault(run: Run, step: int) -> None:
        _leap(run, step)
        before.append(run.flat.master.clone())

    options = replace(OPTIONS, spike_policy=policy, spike_window=8)
    said = drive(run, options, steps=LEAP + 4, fault=fault)
    was_applied = not torch.equal(before[LEAP], before[LEAP + 1])
    assert was_applied == (policy in ("off", "warn"))
    if policy == "off":
        assert said == []
        return
    assert len(said) == 1
    assert f"step {LEAP}: the loss is " in said[0] and "the gradient norm is " in said[0]
    assert ("; the update was skipped" in said[0]) == (policy != "warn")
    assert said[0].startswith("stopped: ") == (policy == "stop")
    if policy == "skip":
        assert float(run.optimizer.skipped) == 1
        assert not torch.equal(before[LEAP + 1], before[LEAP + 2]), "the next step was applied"


def test_skipped_steps_that_do_not_end_stop_the_run():
    def fault(run: Run, step: int) -> None:
        if step == 3:
            _entry(run, "layers.0.mlp.up_proj.weight").parameter.data[0, 0] = torch.nan

    said = drive(build_run(ALONE), OPTIONS, steps=20, fault=fault)
    assert len(said) == 11
    assert "layers.0.mlp.up_proj.weight on rank 0" in said[0]
    assert all("computed again" not in line for line in said[1:]), "the first of several tells"
    assert said[-1].startswith("stopped: the last 10 steps up to step 12 ")


def test_looking_again_changes_nothing():
    """Weights, moments, gradients and the step count after a step that was looked into are those without the look."""

    def fault(run: Run, step: int) -> None:
        if step in (3, 4):
            weight = _entry(run, "layers.0.mlp.up_proj.weight").parameter.data
            weight[0, 0] = torch.nan if step == 3 else 0.5

    runs = []
    for locate in (True, False):
        run = build_run(ALONE)
        said = drive(run, replace(OPTIONS, locate_non_finite=locate), steps=8, fault=fault)
        assert len(said) == 1 and ("computed again" in said[0]) == locate
        runs.append(run)
    for name in ("master", "gradient"):
        assert torch.equal(getattr(runs[0].flat, name), getattr(runs[1].flat, name)), name
    assert torch.equal(runs[0].optimizer.exp_avg, runs[1].optimizer.exp_avg)
    assert int(runs[0].stages.step) == int(runs[1].stages.step) == 8


def test_figures_that_are_not_reported_are_judged_too():
    """log.every 5: the leap of a step between two reports is said at the next one."""
    run, said = build_run(ALONE), []
    guards = guards_of(run, replace(OPTIONS, spike_window=8), said)
    guards.begin(0, 0)
    for step in range(1, 21):
        _leap(run, step)
        batches, targets = run.batches(step)
        result = run.step(batches, targets, 1e-3)
        guards.after(LaunchedStep(step, batches, targets, 1e-3, 0, result, StepFigures(result)))
        if step % 5 == 0:
            guards.judge(step)
        assert len(said) == (1 if step >= 15 else 0)
    assert said[0].startswith(f"step {LEAP}: ")


@pytest.mark.parametrize("kind", ["step", "layer"])
def test_a_replayed_step_is_guarded_like_another(kind: str):
    """A leap is left out of a captured step too, by a number in a tensor, and adapters are found alive."""
    built, _, graphs, _ = pair("adapters", kind, accumulation=2)
    said: list[str] = []
    options = replace(OPTIONS, spike_policy="skip", spike_window=8)
    guards = Guards(
        options, built.step, built.optimizer, built.mesh, Axis("world"), beta1=0.9, seed=0, max_skipped_steps=10,
        say=said.append,
    )  # fmt: skip
    guards.begin(0, 0)
    head = next(entry for entry in built.entries if entry.name == "lm_head.weight").parameter.data
    steps = make_steps(LEAP + 3, accumulation=2, vocab_size=built.model.config.vocab_size)
    for number, step in enumerate(steps, 1):
        if number == LEAP:
            head.mul_(1024.0)
        if number == LEAP + 1:
            head.mul_(1 / 1024.0)
        before = built.flat.master.clone()
        result = graphs(step.batches, step.targets, step.lr)
        assert torch.equal(before, built.flat.master) == (number == LEAP or step.lr == 0)
        guards.after(LaunchedStep(number, step.batches, step.targets, step.lr, 0, result, StepFigures(result)))
        guards.judge(number)
    assert len(said) == 1 and said[0].startswith(f"step {LEAP}: the loss is "), said
    assert said[0].endswith("; the update was skipped")
    assert graphs.counts.replayed > 0


def test_a_replayed_step_is_computed_again_without_the_graph():
    built, _, graphs, _ = pair("adapters", "layer", accumulation=2)
    said: list[str] = []
    guards = Guards(
        OPTIONS, built.step, built.optimizer, built.mesh, Axis("world"), beta1=0.9, seed=0, max_skipped_steps=10,
        say=said.append,
    )  # fmt: skip
    guards.begin(0, 0)
    weight = next(one for one in built.entries if one.name == "layers.1.attention.o_proj.weight").parameter.data
    for number, step in enumerate(make_steps(6, accumulation=2, vocab_size=built.model.config.vocab_size), 1):
        if number == 5:
            weight[1, 1] = torch.nan
        result = graphs(step.batches, step.targets, step.lr)
        guards.after(LaunchedStep(number, step.batches, step.targets, step.lr, 0, result, StepFigures(result)))
        guards.judge(number)
    assert len(said) == 2
    assert "is the output of layers.1.attention.o_proj, in forward of micro-batch 0, on rank 0" in said[0]


# options


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--guards.liveness_steps", "1"], "guards.liveness_steps is 1, but an adapter's factor A has no gradient"),
        (["--guards.replicas_every", "-1"], "guards.replicas_every is -1, but it must be 0 or more"),
        (["--guards.spike_policy", "ignore"], "guards.spike_policy is 'ignore', but one of off, warn, skip, stop"),
        (["--guards.spike_deviations", "0"], "guards.spike_deviations is 0"),
        (["--guards.spike_window", "3"], "guards.spike_window is 3, but it must be 8 or more"),
        (["--guards.non_finite_policy", "warn"], "guards.non_finite_policy is 'warn'"),
    ],
)
def test_options_that_cannot_be(arguments: list[str], words: str):
    with pytest.raises(UserError, match=words):
        parse_config(["--model.path", "x", *arguments])


def test_guards_are_on_by_default():
    options = parse_config(["--model.path", "x"]).guards
    assert options == GuardOptions()
    assert options.liveness_steps and options.replicas_every and options.spike_policy == "warn"
