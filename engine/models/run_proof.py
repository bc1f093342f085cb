"""The record of a proof at the start: what of a run's layout was compared with the whole model, and how close it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.telemetry.format import format_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedOfModel:
    """What a run does with its model.

    Args:
        trained: logical names of the parameters that train.
        layers: of each pipeline stage.
    """

    trained: tuple[str, ...]
    layers: tuple[int, ...]


class ProofRow(NamedTuple):
    """A comparison of a small model, computed as the run would, with transformers' model.

    Args:
        compared: what the run asks for, such as "2 tensor ranks".
        figure: "loss", or the logical name of the parameter whose gradient is furthest from transformers'.
        worst: how far; relative to the gradient's norm.
        bound: what rounding explains.
    """

    compared: str
    figure: str
    worst: float
    bound: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProof:
    """The result of a proof at the start.

    Args:
        model: what was compared.
        rows: the comparisons.
        seconds: that they took.
    """

    model: str
    rows: tuple[ProofRow, ...]
    seconds: float

    def line(self) -> str:
        """Returns a line for a log."""
        worst = max(self.rows, key=lambda row: row.worst)
        compared = ", ".join(row.compared for row in self.rows)
        return (
            f"proof: {self.model} is transformers' own ({compared}) within {worst.worst:.0e} ({worst.figure}; "
            f"{worst.bound:g} is allowed), {self.seconds:.1f} s"
        )

    def table(self) -> str:
        """Returns the comparisons in columns."""
        rows = [("compared with transformers", "furthest", "deviation", "limit")]
        rows += [(row.compared, row.figure, f"{row.worst:.1e}", f"{row.bound:g}") for row in self.rows]
        return "\n".join(line.rstrip() for line in format_columns(rows, names=2))

    def record(self) -> dict[str, Any]:
        """Returns the record for programs."""
        rows = [row._asdict() for row in self.rows]
        return {"model": self.model, "seconds": round(self.seconds, 3), "rows": rows}

    def facts(self) -> dict[str, str]:
        """Returns a phrase on each comparison, for a report."""
        return {row.compared: f"{row.worst:.1e} of {row.bound:g} ({row.figure})" for row in self.rows}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> RunProof:
        """Returns the proof of a `record`."""
        rows = tuple(ProofRow(**row) for row in record["rows"])
        return cls(model=record["model"], rows=rows, seconds=record["seconds"])
