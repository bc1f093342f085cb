"""Small range checks shared by the option sections: each raises one sentence that names the field, the value and the
fix."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

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


def require_at_least(field: str, value: int | None, minimum: int, hint: str) -> None:
    """Requires `value` to be a whole number from `minimum` to 2^31 - 1, or None; `hint` advises on another value.

    Raises:
        UserError: it is out of range.
    """
    if value is None:
        return
    require(value >= minimum, f"{field} is {value}, but it must be {minimum} or more: {hint}.")
    require(value < 2**31, f"{field} is {value}, but at most {2**31 - 1:,} is expected: {hint}.")


def require_positive(field: str, value: float | None, hint: str) -> None:
    """Requires `value` to be a number above 0 that float32 can hold, or None.

    Raises:
        UserError: it is out of range.
    """
    if value is None:
        return
    require(math.isfinite(value) and value > 0, f"{field} is {value}, but it must be a number above 0: {hint}.")
    _require_float32(field, value, hint)


def require_not_negative(field: str, value: float | None, hint: str) -> None:
    """Requires `value` to be a number of 0 or more that float32 can hold, or None.

    Raises:
        UserError: it is out of range.
    """
    if value is None:
        return
    require(math.isfinite(value) and value >= 0, f"{field} is {value}, but it must be 0 or more: {hint}.")
    _require_float32(field, value, hint)


def _require_float32(field: str, value: float, hint: str) -> None:
    require(value <= _LARGEST, f"{field} is {value}, but at most {_LARGEST:.1e} is expected: {hint}.")


def require_choices(section: str, options: Any) -> None:
    """Requires the options of a section that have choices to have one of them; None passes where the type has it.

    Args:
        section: its name in a configuration.
        options: the section, whose types are the choices.

    Raises:
        UserError: an option has another value.
    """
    kind: type = type(options)
    for name, choices in _choices(kind).items():
        value = getattr(options, name)
        require(
            value in choices,
            f"{section}.{name} is {value!r}, but it must be one of {', '.join(filter(None, choices))}: choose one of "
            "them.",
        )


@cache
def _choices(kind: type) -> dict[str, tuple[str | None, ...]]:
    """Returns the fields that are a Literal, or a Literal or None -> its values."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        literals = [one for one in (hint, *get_args(hint)) if get_origin(one) is Literal]
        if literals and set(get_args(hint)) <= {literals[0], type(None), *get_args(literals[0])}:
            found[name] = (*get_args(literals[0]), *([None] if type(None) in get_args(hint) else []))
    return found
