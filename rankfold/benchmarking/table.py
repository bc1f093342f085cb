"""The result of a section: tables, sentences about them, and all measurements."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from engine.telemetry.format import format_columns


def progress(section: str, line: str) -> None:
    """Prints a line about a section's progress to stderr."""
    print(f"[{section}] {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table, the result of most sections; others return a `Report`.

    Args:
        title: of the table.
        columns: headings; the first column names the row.
        rows: formatted cells, one row each.
        findings: sentences below the table: ratios, checks, and cases not measured with the reasons.
        machine: where and with what it was measured; empty inside a report, which has it once.
        data: settings and raw samples, for the JSON file.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    findings: tuple[str, ...] = ()
    machine: dict[str, str] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), (self.columns, self.rows)

    def text(self) -> str:
        """Returns the text for a terminal: aligned columns, names left, figures right."""
        aligned = [line.rstrip() for line in format_columns((self.columns, *self.rows))]
        rule = "-" * max(len(line) for line in aligned)
        head = (self.title, _in_line(self.machine)) if self.machine else (self.title,)
        return "\n".join((*head, "", aligned[0], rule, *aligned[1:], "", *self.findings))

    def markdown(self, command: str) -> str:
        """Returns a Markdown section."""
        parts = [f"### {self.title}", f"`{command}`", _in_list(self.machine), self._grid(), _sentences(self.findings)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _grid(self) -> str:
        head = "| " + " | ".join(self.columns) + " |"
        rule = "|" + "|".join([" --- ", *[" ---: "] * (len(self.columns) - 1)]) + "|"
        return "\n".join([head, rule, *("| " + " | ".join(row) + " |" for row in self.rows)])

    def inner_markdown(self) -> str:
        """Returns the table as a part of a report's Markdown section."""
        parts = [f"#### {self.title}", self._grid(), _sentences(self.findings)]
        return "\n\n".join(part for part in parts if part)

    def record(self) -> dict[str, Any]:
        """Returns the table for JSON, without machine and command."""
        return {
            "title": self.title,
            "columns": self.columns,
            "rows": self.rows,
            "findings": self.findings,
            **self.data,
        }

    def json(self, command: str) -> str:
        """Returns all data, for programs."""
        return json.dumps({"command": command, "machine": self.machine, **self.record()}, indent=2) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Several tables measured in one run.

    Args:
        title: of the whole.
        tables: in reading order.
        findings: sentences about all of them.
        machine, data: as a table's.
    """

    title: str
    tables: tuple[Table, ...]
    findings: tuple[str, ...]
    machine: dict[str, str]
    data: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Returns the text for a terminal."""
        return "\n\n".join(
            (
                f"{self.title}\n{_in_line(self.machine)}",
                *(table.text().rstrip() for table in self.tables),
                "\n".join(self.findings),
            )
        )

    def markdown(self, command: str) -> str:
        """Returns a Markdown section with one subsection a table."""
        tables = [table.inner_markdown() for table in self.tables]
        parts = [f"### {self.title}", f"`{command}`", _in_list(self.machine), _sentences(self.findings), *tables]
        return "\n\n".join(part for part in parts if part) + "\n"

    def json(self, command: str) -> str:
        """Returns all data, for programs."""
        record = {
            "title": self.title,
            "command": command,
            "machine": self.machine,
            "findings": self.findings,
            "tables": [table.record() for table in self.tables],
            **self.data,
        }
        return json.dumps(record, indent=2) + "\n"


def _in_line(machine: dict[str, str]) -> str:
    return "; ".join(f"{name} {value}" for name, value in machine.items())


def _in_list(machine: dict[str, str]) -> str:
    return _sentences(tuple(f"{name}: {value}" for name, value in machine.items()))


def _sentences(findings: tuple[str, ...]) -> str:
    return "\n".join(f"- {sentence}" for sentence in findings)
