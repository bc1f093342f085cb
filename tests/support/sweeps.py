"""Parameters of a test of which a sample runs by default, and the rest with `-m slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any
from zlib import crc32

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


def portion(values: Iterable[Any], one_in: int, always: Collection[Any] = ()) -> list[Any]:
    """Returns all values for `parametrize`, about one of `one_in` quick and the others marked as slow.

    The choice hangs on each value alone, so that it stays as it is where others come and go, and a test's argument
    chooses other values than a test with another `one_in` does.

    Args:
        values: as for `sampled`.
        one_in: the share that is quick, as its inverse; 1 is all.
        always: values that are quick whatever the choice.
    """
    values = list(values)
    chosen = [value for value in values if crc32(f"{one_in} {value!r}".encode()) % one_in == 0]
    return sampled(values, [*chosen, *(value for value in always if value not in chosen)])


def takes_slow(config: pytest.Config) -> bool:
    """Returns whether slow tests run: for what a fixture prepares once, for all of a file's tests."""
    return "slow" in config.option.markexpr


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
