"""What a report says of predicted time: ranges, the shares of the data sheet that they assume, and the host's part."""

from __future__ import annotations

from engine.planning.machine import Machine, bounds
from engine.planning.search import Candidate
from engine.planning.step_time import StepRange, StepTime, predict_range


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


def record(found: StepRange, devices: int) -> dict[str, dict[str, float]]:
    """Returns the figures of a range for JSON, by the speeds that they are predicted with."""
    return {
        name: {
            "step_seconds": one.step,
            "tokens_per_second_per_gpu": one.tokens_per_second / devices,
            "bubble": one.bubble,
            "exposed_communication_seconds": one.links,
            "exposed_reduction_seconds": one.exposed_reduction,
            "update_seconds": one.update,
            "host_seconds": one.host,
            "host_limits_by": one.waits,
        }
        for name, one in (("slow", found.slow), ("likely", found.likely), ("fast", found.fast))
    }
