"""Sizes, lengths and counts with a unit, as people write them on a command line: 80GB, 8k, 427M.

Each function is an argparse `type`: it takes the text of one argument.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from math import isfinite
from typing import Literal

_BINARY = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}
_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_COUNT = {**_DECIMAL, "B": 1e9}
_NUMBER = r"([-+]?[\d_.]+(?:[eE][-+]?\d+)?)"


def read_gib(text: str) -> float:
    """Parses a memory size in GiB: 80, 80GB, 80GiB, 81920MiB. GB and GiB are the same here, because "an 80 GB GPU" has
    80 GiB.

    Raises:
        ArgumentTypeError: it is no such size.
    """
    number, unit = _split(text, r"([KMGT]?)I?B?", "a size such as 80, 80GB or 81920MiB")
    return number if not unit else number * _BINARY[unit] / _BINARY["G"]


def read_step(text: str) -> int | Literal["best"]:
    """Parses the choice of a run's checkpoint: the number of its step, or "best" for that of the best evaluation.

    Raises:
        ArgumentTypeError: the text is neither.
    """
    if text == "best":
        return "best"
    if not text.isascii() or not text.isdigit():
        raise ArgumentTypeError(f"is {text!r}, but the number of a step or best is expected: change it.")
    return int(text)


def read_gb(text: str) -> float:
    """Parses the size of a file in GB, 10^9 bytes: 5, 5GB, 500MB, 4GiB.

    Raises:
        ArgumentTypeError: it is no such size.
    """
    number, unit = _split(text, r"([KMGT]?I?)B?", "a size such as 5, 5GB or 500MB")
    if not unit:
        return number
    return number * (_BINARY[unit[0]] if unit.endswith("I") else _DECIMAL[unit]) / 1e9


def read_length(text: str) -> int:
    """Parses a number of tokens: 8192, 8k (8 x 1024, as context lengths are named), 1M.

    Raises:
        ArgumentTypeError: it is no whole number of tokens.
    """
    return _whole(text, _BINARY, r"([KM]?)", "a number of tokens such as 8192 or 8k")


def read_count(text: str) -> int:
    """Parses a number of parameters or samples: 427000000, 427e6, 427M, 7B.

    Raises:
        ArgumentTypeError: it is no whole number.
    """
    return _whole(text, _COUNT, r"([KMGTB]?)", "a whole number such as 427000000, 427e6, 427M or 7B")


def _whole(text: str, factors: Mapping[str, float], units: str, expected: str) -> int:
    number, unit = _split(text, units, expected)
    value = round(number * factors[unit], 6)
    if isfinite(value) and value == int(value):
        return int(value)
    raise ArgumentTypeError(f"is {text!r}, but {expected} is expected: write one of these forms.")


def _split(text: str, units: str, expected: str) -> tuple[float, str]:
    """Splits a text into number and unit, in capitals; the caller checks the range of a finite number."""
    match = re.fullmatch(rf"{_NUMBER}\s*{units}", text.strip(), re.IGNORECASE)
    try:
        number, unit = (float(match[1]), match[2].upper()) if match else (float(text), "")
    except ValueError:
        raise ArgumentTypeError(f"is {text!r}, but {expected} is expected: write one of these forms.") from None
    if not isfinite(number):
        raise ArgumentTypeError(f"is {number}, but {expected} is expected: write one of these forms.")
    return number, unit
