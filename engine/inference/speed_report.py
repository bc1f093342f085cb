"""The report on generation per rank: memory, speed, bandwidth between ranks, and the share of memory bandwidth.

A pass of few tokens reads every weight once, and the cache of its rows, with little arithmetic: it is bound by
memory bandwidth. So its time is compared with how fast this rank copies a large block of memory, bytes read and
written. On a CPU that several ranks share they measure at the same time, as they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.distributed.collectives import all_reduce, gather_objects, post_async
from engine.distributed.mesh import Axis, Mesh
from engine.inference.generate import Speed
from engine.telemetry.format import counted, format_bytes, format_count
from engine.telemetry.process_memory import peak_memory_bytes

_COPIED, _SENT = 64 << 20, 4 << 20
"""Bytes of the block that is copied, and of the messages between ranks."""
_TIMES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """One rank's part of the report.

    Args:
        tensor, pipeline: the rank's place on these axes.
        device: its device, in words.
        weight_bytes, pass_bytes: of all weights here, and of those that every pass reads as a whole.
        cache_bytes: reserved for keys and values.
        peak_bytes: peak so far: allocated on a GPU, else the process's resident set.
        speed: of its passes.
        copy_rate: bytes read and written per second by a large copy.
        tensor_rate: bytes per second that each tensor rank sends in a large all-reduce; None with one.
        pipeline_rate: bytes per second to the next pipeline rank; None where there is none.
    """

    tensor: int
    pipeline: int
    device: str
    weight_bytes: int
    pass_bytes: int
    cache_bytes: int
    peak_bytes: int
    speed: Speed
    copy_rate: float
    tensor_rate: float | None
    pipeline_rate: float | None

    @property
    def busy_seconds(self) -> float:
        """Seconds of the decode passes, without waiting for other pipeline ranks."""
        return self.speed.decode_seconds - self.speed.decode_waited

    @property
    def bandwidth_share(self) -> float:
        """Bytes of weights and cache that these passes read, over the bytes that a copy would move in the busy time."""
        read = self.pass_bytes * self.speed.decode_passes + self.speed.cache_bytes
        return read / (self.busy_seconds * self.copy_rate) if self.speed.decode_passes else 0.0


def measure(
    mesh: Mesh, speed: Speed, *, device: torch.device, weight_bytes: int, pass_bytes: int, cache_bytes: int
) -> list[RankFigures]:
    """Gathers the figures of all ranks, in rank order. Collective.

    Args:
        mesh: of the ranks.
        speed: of this rank's passes.
        device: its device.
        weight_bytes, pass_bytes, cache_bytes: see `RankFigures`.
    """
    peak = peak_memory_bytes()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    figures = RankFigures(
        tensor=mesh.tp.rank,
        pipeline=mesh.pp.rank,
        device=name,
        weight_bytes=weight_bytes,
        pass_bytes=pass_bytes,
        cache_bytes=cache_bytes,
        peak_bytes=peak,
        speed=speed,
        copy_rate=_copy_rate(device),
        tensor_rate=_tensor_rate(mesh.tp, device),
        pipeline_rate=_pipeline_rate(mesh.pp, device),
    )
    stages = gather_objects(gather_objects(figures, mesh.tp), mesh.pp)
    return [one for stage in stages for one in stage]  # type: ignore[attr-defined]


def report_lines(figures: list[RankFigures]) -> list[str]:
    """Returns the report as text; the times of the first rank are those of all. `busy` is the share of the passes of
    one token a row in which a rank did not wait for other pipeline ranks; beside it, the share of its memory
    bandwidth that it used then."""
    speed = figures[0].speed
    lines = [f"prefill: {counted(speed.prefill_tokens, 'token')} in {speed.prefill_seconds:.3f} s"]
    if speed.prefill_tokens:
        lines[0] += f", {format_count(speed.prefill_tokens / speed.prefill_seconds)} tokens/s"
    if speed.decode_passes:
        lines.append(
            f"decode: {counted(speed.decode_tokens, 'token')} in {speed.decode_seconds:.3f} s, "
            f"{format_count(speed.decode_tokens / speed.decode_seconds)} tokens/s, "
            f"{1e3 * speed.decode_seconds / speed.decode_passes:.2f} ms and on average "
            f"{speed.decode_tokens / speed.decode_passes:.1f} prompts per pass"
        )
    table = [_HEADINGS, *(_row(rank, one) for rank, one in enumerate(figures))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        lines.append("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return lines


_HEADINGS = (
    "rank", "device", "tensor", "pipeline", "weights", "cache", "peak memory", "busy", "memory bandwidth",
    "all-reduce", "to next stage",
)  # fmt: skip


def _row(rank: int, one: RankFigures) -> tuple[str, ...]:
    busy, bandwidth = "-", f"{one.copy_rate / 1e9:.1f} GB/s"
    if one.speed.decode_passes:
        busy = f"{one.busy_seconds / one.speed.decode_seconds:.0%}"
        bandwidth = f"{one.bandwidth_share:.1%} of {bandwidth}"
    rates = ("-" if rate is None else f"{rate / 1e9:.2f} GB/s" for rate in (one.tensor_rate, one.pipeline_rate))
    sizes = (format_bytes(size) for size in (one.weight_bytes, one.cache_bytes, one.peak_bytes))
    return (str(rank), one.device, str(one.tensor), str(one.pipeline), *sizes, busy, bandwidth, *rates)


def _best(act: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of the fastest of several runs, without the first."""
    best = float("inf")
    for turn in range(_TIMES + 1):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn:
            best = min(best, time.perf_counter() - began)
    return best


def _copy_rate(device: torch.device) -> float:
    source, target = (torch.zeros(_COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * _COPIED / _best(lambda: target.copy_(source), device)


def _tensor_rate(tp: Axis, device: torch.device) -> float | None:
    if tp.size == 1:
        return None
    block = torch.zeros(_SENT // 4, device=device)
    # each rank of a ring sends all but its own part, twice
    return 2 * (tp.size - 1) / tp.size * _SENT / _best(lambda: all_reduce(block, tp), device)


def _pipeline_rate(pp: Axis, device: torch.device) -> float | None:
    """Returns the bytes per second to the next rank, one pair at a time; every rank takes part where it has a
    neighbour.
    """
    rate = None
    for sender in range(pp.size - 1):
        if pp.rank not in (sender, sender + 1):
            continue
        sends = pp.rank == sender
        block = torch.zeros(_SENT // 4, device=device)
        peer = sender + 1 if sends else sender

        def pass_on(sends: bool = sends, block: torch.Tensor = block, peer: int = peer) -> None:
            for is_send in (True, False):  # there and back, so that the sender knows when it has arrived
                for handle in post_async([(is_send == sends, block, peer)], pp):
                    handle.wait()

        seconds = _best(pass_on, device)
        rate = 2 * _SENT / seconds if sends else rate
    return rate
