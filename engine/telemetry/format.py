"""Formats numbers for people: bytes, durations, rates, and columns of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


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
    """Returns a number and what it counts, such as "1 row" or "2,000 rows"."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,} {noun}{ending}"


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


def shown(path: str | Path) -> str:
    """Returns a path as it is shown: from the current folder, where that is shorter."""
    try:
        return min(os.path.relpath(path), str(path), key=len)
    except OSError:  # the current folder is gone
        return str(path)
