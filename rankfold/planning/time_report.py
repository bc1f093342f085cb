"""What a report says of predicted time: ranges, the shares of the data sheet that they assume, and the host's part."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from engine.planning.kernel_times import kernel_times
from engine.planning.machine import Machine, bounds
from engine.planning.rank_layout import Samples, SamplesCost
from engine.planning.search import Candidate
from engine.planning.step_time import StepRange, StepTime, predict_range, predict_time
from engine.telemetry.format import counted


def range_of(candidate: Candidate, machine: Machine) -> StepRange:
    """Returns the range of a candidate's step."""
    return predict_range(candidate.workload, candidate.layout, candidate.memory, machine)


def seconds(found: StepRange) -> str:
    """Returns a step's seconds as "3.91 s (3.4 to 4.4)"."""
    likely, fast, slow = (f"{one.step:#.3g}".rstrip(".") for one in (found.likely, found.fast, found.slow))
    return f"{likely} s" + _interval(likely, fast, slow)


def tokens(found: StepRange, devices: int) -> str:
    """Returns the tokens a second of each device as "16,400 (14,600 to 18,700)"."""
    likely, slow, fast = (rounded(one.tokens_per_second / devices) for one in (found.likely, found.slow, found.fast))
    return likely + _interval(likely, slow, fast)


def rounded(count: float) -> str:
    """Returns a rate with three digits that count, as "16,400"."""
    return f"{float(f'{count:.3g}'):,.0f}"


def shares(found: StepRange, flops: float, sheet: float) -> str:
    """Returns the share of the data sheet's speed that a step comes to, as "56% (49 to 65)".

    Args:
        flops: of the model on one device.
        sheet: TFLOP/s.
    """
    likely, slow, fast = (f"{flops / (one.step * sheet * 1e10):.0f}" for one in (found.likely, found.slow, found.fast))
    return f"{likely}%" + _interval(likely, slow, fast)


def _interval(likely: str, low: str, high: str) -> str:
    return "" if low == likely == high else f" ({low} to {high})"


def assumed(machine: Machine) -> str:
    """Returns what the range assumes and where that comes from; nothing for a machine without a data sheet."""
    if not machine.sheet:
        return ""
    slow, fast = bounds(machine)
    names = {name for name, _ in machine.measured}

    def share(name: str, sheet: float) -> str:
        own, low, high = (getattr(one, name) / sheet for one in (machine, slow, fast))
        return f"{own:.0%} measured" if name in names else f"{own:.0%} ({100 * low:.0f} to {100 * high:.0f})"

    where = "the rest is assumed, see docs/planning.md" if names else "none measured here, see docs/planning.md"
    return (
        f"assumed: products reach {share('products', machine.sheet)} of the data sheet, memory "
        f"{share('copies', machine.sheet_copies)}, attention what is published for its lengths; {where}"
    )


def host(time: StepTime) -> str:
    """Returns what the host's launching costs a step; nothing where it costs none."""
    if not time.host:
        return ""
    if time.waits > 1:
        return (
            f"host: launching takes {time.waits:.2f} times as long as computing, so that the GPU waits: "
            "memory.cuda_graph, or more tokens in a micro-batch, would save that"
        )
    return f"host: {time.host:.2g} s of launching, hidden behind computing"


def shared(candidate: Candidate, machine: Machine, found: StepTime) -> list[str]:
    """Returns the lines on beginnings that rows compute once: tokens, and the time, launches and bytes of training,
    beside those of rows that compute each; none where nothing is shared.

    Args:
        candidate: with its layout.
        machine: whose speeds count.
        found: the candidate's time.
    """
    workload, layout, memory = candidate.workload, candidate.layout, candidate.memory
    rows, alike = workload.shared_rows(layout), workload.alike
    if rows is None or alike is None:
        return []
    apart = replace(workload, alike=None)
    alone = predict_time(apart, layout, memory, machine)
    share = (found.step - found.sampling) / (alone.step - alone.sampling)
    what = f"questions of {alike.members} answers" if alike.is_sample else f"prompts of {alike.members} completions"
    (launches, nbytes), (more, moved) = (
        (sum(one.count * one.launch.count for one in kernels), sum(one.nbytes for one in kernels))
        for kernels in (kernel_times(each, layout, memory, machine) for each in (workload, apart))
    )
    return [
        f"shared: {what} computed once: {rows.alone / rows.tokens:.1f}x fewer tokens, {rows.tokens:,} in "
        f"{counted(rows.count, 'row')} for {rows.alone:,}; training takes {share:.0%} of the time",
        f"a rank's passes have {launches:,} launches and move {nbytes / 1e9:.3g} GB, with each beginning by itself "
        f"{more:,} and {moved / 1e9:.3g} GB",
    ]


def sampling(found: StepRange, samples: Samples, devices: int) -> list[str]:
    """Returns the lines on sampling the completions that a step trains on."""
    costs = [one.samples for one in (found.likely, found.fast, found.slow)]
    likely, fast, slow = (cost for cost in costs if cost is not None)
    if not likely.passes:
        taught = f" and {found.likely.teachers:.3g} s of teachers' passes" if found.likely.teachers else ""
        alone = f"training{taught} alone"
        return [f"rollout: sampled by rollout.server, whose time is not predicted; the step is that of {alone}"]
    rates = (rounded(samples.batch * samples.completion / devices / one.seconds) for one in (likely, slow, fast))
    times = (f"{one.seconds:#.3g}".rstrip(".") for one in (likely, fast, slow))
    shortest, *others = times
    likely_rate, low, high = rates
    how = "replayed as graphs" if likely.graphed else "launched one by one"
    waits = ", for which the GPU waits" if likely.host_limits else ""
    training = found.likely.step - found.likely.sampling - found.likely.teachers
    taught = "" if not found.likely.teachers else f", {found.likely.teachers:.3g} s passes of teachers"
    return [
        f"rollout: {counted(samples.batch, 'completion')} of {counted(samples.completion, 'token')} in "
        f"{shortest} s{_interval(shortest, *others)}, {likely_rate}{_interval(likely_rate, low, high)} tokens/s per "
        f"GPU; {likely.prefill:.2g} s of prompts, then {counted(likely.passes, 'pass')} of "
        f"{1e3 * likely.pass_seconds:.3g} ms with {likely.launches:,} kernels each, {how}{waits}",
        f"of a step {found.likely.sampling:.3g} s are rollouts{taught} and {training:.3g} s training, rewards not "
        f"counted; {likely.cache / 2**30:.2f} GiB of keys and values for {counted(samples.options.slots, 'slot')}",
        f"a pass of {counted(samples.options.slots, 'token')} moves {likely.nbytes / 1e9:.3g} GB; of it "
        f"{likely.choice_launches} kernels and {likely.choice_bytes / 1e9:.2g} GB choose the tokens, with their random "
        "numbers and log-probabilities",
        *_merging(likely),
        *_turns(likely, samples),
    ]


def _merging(cost: SamplesCost) -> list[str]:
    """Returns a line on codes that are merged before the first pass."""
    if not cost.merging:
        return []
    return [
        f"merge-aware: {cost.merging:.2g} s of a rollout merge adapters into codes, once, and the base's are kept "
        "beside them (rollout.merge_once)"
    ]


def _turns(cost: SamplesCost, samples: Samples) -> list[str]:
    """Returns a line on what is assumed of completions of several turns."""
    if cost.turns == 1:
        return []
    where = "rollout.max_turns" if samples.options.max_turns else "assumed, since rollout.max_turns is not set"
    return [
        f"turns: {cost.turns} in a completion ({where}), with {counted(cost.result_tokens, 'token')} of results "
        f"between two (assumed); {cost.between:.2g} s of passes of these, calls of tools not counted"
    ]


def judges(samples: Samples) -> list[str]:
    """Returns a line on the place of reward models."""
    if (held := samples.neighbour) is None:
        return []
    where = "in host memory" if held.gpu is None else f"on GPU {held.gpu}"
    return [
        f"reward models: {held.nbytes / 2**30:.2f} GiB of weights in {counted(held.copies, 'process')} "
        f"{where}, what their passes take not counted"
    ]


def record(found: StepRange, devices: int) -> dict[str, dict[str, Any]]:
    """Returns the figures of a range for JSON, by the speeds that they are predicted with."""
    return {
        name: {
            "step_seconds": one.step,
            "teacher_seconds": one.teachers,
            "tokens_per_second_per_gpu": one.tokens_per_second / devices,
            "bubble": one.bubble,
            "exposed_communication_seconds": one.links,
            "exposed_reduction_seconds": one.exposed_reduction,
            "update_seconds": one.update,
            "host_seconds": one.host,
            "host_limits_by": one.waits,
            "sampling_seconds": one.sampling,
            **({} if one.samples is None else {"rollout": asdict(one.samples)}),
        }
        for name, one in (("slow", found.slow), ("likely", found.likely), ("fast", found.fast))
    }
