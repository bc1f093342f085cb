"""Small range checks shared by the option sections: each raises one sentence that names the field, the value and the
fix."""

from __future__ import annotations

import math

from engine.errors import UserError

_LARGEST = 3.4e38
"""The largest number that float32 holds, rounded down."""


def require(condition: bool, sentence: str) -> None:
    """Raises UserError with `sentence` unless `condition` holds.

    Raises:
        UserError: the condition does not hold.
    """
    if not condition:
        raise UserError(sentence)


def require_at_least(field: str, value: int, minimum: int, hint: str) -> None:
    """Requires `value` to be a whole number from `minimum` to 2^31 - 1; `hint` advises on another value.

    Raises:
        UserError: it is out of range.
    """
    require(value >= minimum, f"{field} is {value}, but it must be {minimum} or more: {hint}.")
    require(value < 2**31, f"{field} is {value}, but at most {2**31 - 1:,} is expected: {hint}.")


def require_positive(field: str, value: float, hint: str) -> None:
    """Requires `value` to be a number above 0 that float32 can hold.

    Raises:
        UserError: it is out of range.
    """
    require(math.isfinite(value) and value > 0, f"{field} is {value}, but it must be a number above 0: {hint}.")
    _require_float32(field, value, hint)


def require_not_negative(field: str, value: float, hint: str) -> None:
    """Requires `value` to be a number of 0 or more that float32 can hold.

    Raises:
        UserError: it is out of range.
    """
    require(math.isfinite(value) and value >= 0, f"{field} is {value}, but it must be 0 or more: {hint}.")
    _require_float32(field, value, hint)


def _require_float32(field: str, value: float, hint: str) -> None:
    require(value <= _LARGEST, f"{field} is {value}, but at most {_LARGEST:.1e} is expected: {hint}.")


def require_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    """Requires `value` to be one of `choices`.

    Raises:
        UserError: it is another value.
    """
    require(value in choices, f"{field} is {value!r}, but it must be one of {', '.join(choices)}: choose one of them.")
