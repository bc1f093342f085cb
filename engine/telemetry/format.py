"""Formats numbers for people: bytes, durations, rates, and columns of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

_ENDS = 20
"""Steps over which a figure at a run's beginning and end is averaged, where it has twice as many."""


def format_bytes(count: float) -> str:
    """Returns the bytes in binary units, such as "512 B", "1.5 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    for unit in units[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {units[-1]}"


def format_duration(seconds: float) -> str:
    """Returns the seconds as "42s", "3m05s" or "2h07m"."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_count(count: float) -> str:
    """Returns a count or rate with three digits, such as "950", "12.3k", "1.25M"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999.5k would print as 1000k.
        if abs(count) >= size * 0.9995:
            return f"{count / size:#.3g}".rstrip(".") + unit
    return f"{count:.3g}"


def counted(count: int, noun: str) -> str:
    """Returns a number and its unit, such as "1 row" or "2,000 rows"."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,} {noun}{ending}"


def how_far(step: int, steps: int, epochs: float | None = None) -> str:
    """Returns how far a run is: "step 12 of 36", "complete, 36 steps" or "complete, 2 epochs in 36 steps".

    Args:
        step: the last that was taken.
        steps: of the whole run.
        epochs: that these are, where epochs end the run.
    """
    if step < steps:
        return f"step {step:,} of {steps:,}"
    passes = "" if epochs is None else f"{epochs:g} epoch{'' if epochs == 1 else 's'} in "
    return f"complete, {passes}{counted(step, 'step')}"


def first_to_last(values: Sequence[tuple[float, float]], show: Callable[[float], str] = "{:.4f}".format) -> str:
    """Returns the first and the last of a figure's values; of a long run means of some steps, because a batch is noisy.

    Args:
        values: (step, value) of each step.
        show: formats a value.
    """
    window = min(_ENDS, len(values) // 2)
    if window < 2:
        return " → ".join(show(value) for _, value in (*values[:1], *values[1:][-1:]))
    first, last = (sum(value for _, value in part) / window for part in (values[:window], values[-window:]))
    return f"{show(first)} → {show(last)} (means of {window} steps)"


def format_parameters(count: float) -> str:
    """Returns a number of parameters in short form: "44.6M", "8.03B"."""
    return format_count(count).replace("G", "B")


def format_columns(rows: Sequence[Sequence[str]], *, names: int = 1) -> list[str]:
    """Returns the lines of aligned columns: the first `names` to the left, figures to the right; all rows are
    equally long.
    """
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place < names else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def short_path(path: str | Path) -> str:
    """Returns a path for a message: from the current folder, where that is shorter."""
    try:
        return min(os.path.relpath(path), str(path), key=len)
    except OSError:  # the current folder is gone
        return str(path)
