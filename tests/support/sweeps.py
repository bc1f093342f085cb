"""Parameters of a test of which a sample runs by default, and the rest with `-m slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Returns all values for `parametrize`, those that are not in `quick` marked as slow.

    Args:
        values: of one argument each, or tuples of several.
        quick: what runs by default; each is one of `values`, so that a renamed case is not lost unseen.
    """
    values = list(values)
    if lost := [value for value in quick if value not in values]:
        raise ValueError(f"{lost} are no values of this test")
    return [value if value in quick else _slow(value) for value in values]


def takes_slow(config: pytest.Config) -> bool:
    """Returns whether slow tests run: for what a fixture prepares once, for all of a file's tests."""
    return "slow" in config.option.markexpr


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
