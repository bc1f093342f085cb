"""The answers of `rankfold plan memory` for programs: what `--json FILE` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.config.hub import recorded
from engine.files.durable import write_named
from engine.files.refusals import writing
from engine.planning.ledger import PARTS
from engine.planning.machine import Machine, bounds
from engine.planning.search import Candidate
from rankfold.planning import time_report
from rankfold.planning.memory_question import Answer

_FIGURES = (
    "products", "products_fp8", "vectors", "grouped", "copies", "link", "network", "host", "launch", "gap", "graph_gap",
    "host_launch", "attention_share",
)  # fmt: skip


def write(path: str, record: dict[str, Any]) -> None:
    """Writes a record.

    Raises:
        FileError: the disk does not take it.
    """
    with writing(path), write_named(Path(path)) as file:
        file.write(json.dumps(record, indent=2) + "\n")


def of_answer(answer: Answer, *, top: int) -> dict[str, Any]:
    """Returns the record of a search.

    Args:
        top: alternatives to record.
    """
    fitting = answer.found.fitting[: top + 1]
    return {
        "predicted": True,
        "model": recorded(answer.config.model.path),
        "gpus": answer.devices,
        "usable_bytes": int(answer.capacity),
        "machine": of_machine(answer.machine),
        "fitting": [of_candidate(one, answer.machine) for one in fitting],
        "too_large": [{"layout": one.label(), "peak_bytes": one.peak} for one in answer.found.too_large[:top]],
    }


def of_candidate(candidate: Candidate, machine: Machine) -> dict[str, Any]:
    """Returns a layout's peak, by part and on each pipeline rank, and the range of its step."""
    return {
        "layout": candidate.label(),
        "peak_bytes": candidate.peak,
        "ranks": [
            {"peak_bytes": one.peak, "peak_in": one.moment, "parts": {name: one.parts[name] for name in PARTS}}
            for one in candidate.estimates
        ],
        "host_bytes": candidate.host,
        "time": time_report.record(time_report.range_of(candidate, machine), candidate.layout.world_size),
    }


def of_machine(machine: Machine) -> dict[str, Any]:
    """Returns the speeds that are assumed, TFLOP/s, GB/s and seconds, each slow, likely and fast."""
    slow, fast = bounds(machine)
    return {
        "name": machine.name,
        "measured": sorted(name for name, _ in machine.measured),
        "sheet": {"products": machine.sheet, "copies": machine.sheet_copies},
        "speeds": {name: [getattr(one, name) for one in (slow, machine, fast)] for name in _FIGURES},
    }
