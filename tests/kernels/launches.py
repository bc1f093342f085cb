"""What every supported Triton takes as arguments of a kernel; held wherever a test launches or compiles one.

Newer versions forgive what older ones do not, and one machine has one version.
"""

from __future__ import annotations

from collections.abc import Iterable


def refuse_none_in_tuples(kernel: str, arguments: Iterable[object]) -> None:
    """Raises AssertionError where a tuple among a kernel's arguments has None in it, at any depth.

    Triton 3.6, which torch 2.11 brings, cannot compile that: the tuple's element has no type.
    """
    for number, argument in enumerate(arguments):
        assert not has_none(argument), f"argument {number} of {kernel} is a tuple with None inside"


def has_none(value: object) -> bool:
    """Returns whether the value is a tuple with None in it, at any depth."""
    return isinstance(value, tuple) and any(one is None or has_none(one) for one in value)
