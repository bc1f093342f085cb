"""Fields of another program's answer, in sentences that refuse them."""

from __future__ import annotations

from math import isfinite
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[int | float]:
    """Returns whether a value of JSON is a finite number; true and false are none."""
    return type(value) in (int, float) and isfinite(value)  # type: ignore[arg-type]


def is_integer(value: object) -> TypeGuard[int]:
    """Returns whether a value of JSON is an integer; true and false are none."""
    return type(value) is int


def described(value: object) -> str:
    """Returns what a value of JSON is, for a sentence: of texts, lists and objects the kind alone, since they may be
    long, and hold what must not be repeated."""
    if isinstance(value, str):
        return "a text"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value)
