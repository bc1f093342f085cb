"""Judges the results of the first hour's parts against the project's targets for one GPU. Does not import torch."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

STEP_SHARE = 0.75
"""Share of the speed of the square product, for the model's own operations."""
LORA_TAX = 1.05
GRAPH_SPEEDUP, GRAPH_TOKENS = 1.5, 512
"""Over the step without graphs, in rows of so many tokens."""
DECODE_SPEEDUP, DECODE_ROWS = 2.5, 64
"""Over passes whose kernels the host launches, with so many rows."""
LIMIT_SHARES = {"norm": 0.9, "swiglu": 0.9, "rope": 0.9, "loss": 0.9, "head": 1 / 1.2}
"""Group of `benchmark kernels` -> share of the memory's or the product's limit."""
MEMORY_FACTOR = 0.1
"""The largest relative deviation of measured from predicted memory."""


_LINEAR, _KERNELS = "engine (triton)", "triton"
"""The contestants that a model takes on a GPU, in `lora-tax` and in `kernels`."""


class Judged(NamedTuple):
    """A figure beside its target."""

    what: str
    value: float
    target: float
    is_met: bool

    def __str__(self) -> str:
        return f"{self.what} {self.value:.2f} (target {self.target:.2f}{'' if self.is_met else ', missed'})"


def judge(record: dict[str, Any] | None, log: str) -> list[Judged]:
    """Returns the figures of a part that have a target.

    Args:
        record: the part's JSON.
        log: its output.
    """
    judges = {"step": _step, "graph": _graph, "decode": _decode, "kernels": _kernels, "lora-tax": _lora_tax}
    section = (record or {}).get("section")
    return list(judges[section](record or {})) if section in judges else list(_measured_memory(log))


def _at_least(what: str, value: float, target: float) -> Judged:
    return Judged(what, value, target, value >= target)


def _step(record: dict[str, Any]) -> Iterator[Judged]:
    seconds = record["seconds"]
    size = record["ceiling_operations"] / statistics.median(seconds["square product"])
    rate = record["step_operations"] / statistics.median(seconds["engine"])
    yield _at_least("share of the square product's speed", rate / size, STEP_SHARE)
    for peer, ratio in record["speedup"].items():
        yield _at_least(f"speed over {peer}", ratio["median"], 1.0)


def _graph(record: dict[str, Any]) -> Iterator[Judged]:
    for name, *_, speedup, _kept in record["rows"]:
        if name.startswith(f"{GRAPH_TOKENS} tokens, ") and not name.endswith("no graph"):
            yield _at_least(f"{name}: speed over no graph", float(speedup), GRAPH_SPEEDUP)


def _decode(record: dict[str, Any]) -> Iterator[Judged]:
    for name, *_, speedup in record["rows"]:
        if name == f"{DECODE_ROWS} rows, graphs":
            yield _at_least(f"{name}: speed over single launches", float(speedup), DECODE_SPEEDUP)


def _kernels(record: dict[str, Any]) -> Iterator[Judged]:
    for table in record["tables"]:
        target = LIMIT_SHARES.get(table.get("group", ""))
        for name, case in table["cases"].items() if target is not None else ():
            ours = case["seconds"].get(_KERNELS)
            if ours:
                share = statistics.median(case["limit_seconds"]) / statistics.median(ours)
                yield _at_least(f"{name}: share of the limit", share, target)


def _lora_tax(record: dict[str, Any]) -> Iterator[Judged]:
    for case in (case for table in record["tables"] for case in table.get("cases", ())):
        tax = case["over_frozen"].get(_LINEAR)
        if tax is not None:
            what = f"{case['linear']}, dropout {case['dropout']}: tax"
            yield Judged(what, tax, LORA_TAX, tax <= LORA_TAX)


def _measured_memory(log: str) -> Iterator[Judged]:
    """Reads the line of `rankfold plan memory --measure`: the predicted and measured peaks, and their ratio."""
    for factor in re.findall(r"^GiB in a step +\S+ +\S+ +(\S+)$", log, re.MULTILINE):
        value = float(factor)
        yield Judged("measured over predicted memory", value, 1.0, abs(value - 1) <= MEMORY_FACTOR)
