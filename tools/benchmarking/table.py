"""A section's result: one table, sentences about it, and everything that was measured."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What a section returns.

    Args:
        title: of the table.
        columns: headings; the first column names the row.
        rows: cells as they are to be read, one row each.
        findings: sentences below the table: ratios, what was checked, what was not measured and why.
        machine: where and with what it was measured.
        data: settings and raw samples, for the JSON file.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    findings: tuple[str, ...]
    machine: dict[str, str]
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), (self.columns, self.rows)

    def text(self) -> str:
        """For a terminal: aligned columns, names left, figures right."""
        lines = (self.columns, *self.rows)
        widths = [max(len(line[place]) for line in lines) for place in range(len(self.columns))]
        aligned = [
            "  ".join(
                cell.rjust(width) if place else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        rule = "-" * max(len(line) for line in aligned)
        machine = "; ".join(f"{name} {value}" for name, value in self.machine.items())
        return "\n".join((self.title, machine, "", aligned[0], rule, *aligned[1:], "", *self.findings))

    def markdown(self, command: str) -> str:
        """The same as a Markdown section."""
        head = "| " + " | ".join(self.columns) + " |"
        rule = "|" + "|".join([" --- ", *[" ---: "] * (len(self.columns) - 1)]) + "|"
        body = ["| " + " | ".join(row) + " |" for row in self.rows]
        machine = [f"- {name}: {value}" for name, value in self.machine.items()]
        findings = [f"- {sentence}" for sentence in self.findings]
        parts = [f"### {self.title}", f"`{command}`", "\n".join(machine), "\n".join([head, rule, *body])]
        return "\n\n".join([*parts, "\n".join(findings)]) + "\n"

    def json(self, command: str) -> str:
        """Everything, for programs."""
        record = {
            "title": self.title,
            "command": command,
            "machine": self.machine,
            "columns": self.columns,
            "rows": self.rows,
            "findings": self.findings,
            **self.data,
        }
        return json.dumps(record, indent=2) + "\n"
