"""A reward of one's own: called with lists, as TRL calls it, and returns one number for each completion."""

from __future__ import annotations

from typing import Any


def short(completions: list[str], **columns: list[Any]) -> list[float]:
    """1 where there is nothing but digits."""
    return [float(completion.isdigit()) for completion in completions]
