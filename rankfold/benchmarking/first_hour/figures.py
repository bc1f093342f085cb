"""Summarises a part of the first hour in a few words, from its output. Does not import torch."""

from __future__ import annotations

import re
import statistics
from typing import Any
from xml.etree import ElementTree


def record_of_tests(xml: str) -> dict[str, Any]:
    """Returns the counts of pytest's report, and the names of failed tests."""
    counts, failed = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ElementTree.fromstring(xml).iter("testcase"):
        if case.get("name") is None:  # set up, and interrupted before its end
            continue
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts["failed"] += 1
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        else:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
    return {"section": "tests", "counts": counts, "failed": failed}


def key_figures(record: dict[str, Any]) -> str:
    """Returns the main figures of a part's JSON in one line."""
    if "certified" in record:
        layouts = record["comparisons"]
        return f"{sum(one['certified'] for one in layouts)} of {len(layouts)} layouts compute what one process does"
    match record.get("section"):
        case "tests":
            return ", ".join(f"{count} {what}" for what, count in record["counts"].items())
        case "step" | "experts":
            return _step(record)
        case _:
            tables = record.get("tables", [record])  # of a section with one table
            if record.get("options", {}).get("repeats") == 0:
                return f"{sum(len(table['rows']) for table in tables)} results right, nothing timed"
            return _rows(tables)


def figures_of_training(log: str) -> str:
    """Returns loss and speed of a training from what it prints at its end; "" where it has not come so far."""
    found = re.findall(r"^  (training loss|speed) +(.+)$", log, re.MULTILINE)
    return "; ".join(f"{name} {value}" for name, value in found)


def _step(record: dict[str, Any]) -> str:
    median = statistics.median(record["seconds"]["engine"])
    words = [f"{median * 1e3:.1f} ms, {record['step_operations'] / median / 1e12:.0f} TFLOP/s"]
    words += [f"{ratio['median']:.2f} times {name}" for name, ratio in record["speedup"].items()]
    return "; ".join(words)


def _rows(tables: list[dict[str, Any]]) -> str:
    """Returns the main figure of the first rows: enough to see that there is one."""
    rows = [(table.get("columns", ()), row) for table in tables for row in table.get("rows", ())]
    shown = [_figure(list(columns), row) for columns, row in rows[:3]]
    return "; ".join(shown) + (f"; {len(rows) - 3} more rows" if len(rows) > 3 else "")


def _figure(columns: list[str], row: list[str]) -> str:
    """Returns a row's subject, its contestants where there are several, and the figure behind them."""
    if "median ms" in columns:
        return f"{row[0]} {row[columns.index('contestant')]} {row[columns.index('median ms')]} ms"
    if "unit" in columns:
        return " ".join(row[:3])
    return " ".join((*row[:2], *columns[1:2]))
