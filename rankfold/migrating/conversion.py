"""The state of a conversion: the engine's options so far, and a report row for each key."""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, get_args

from engine.config.model import ModelOptions
from engine.config.objective import Name
from engine.config.option_names import option_types
from engine.errors import UserError
from rankfold.migrating.given import PROGRAM, Given

DTYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "torch.bfloat16": "bfloat16",
    "fp16": "float16", "float16": "float16", "half": "float16", "torch.float16": "float16",
    "fp32": "float32", "float32": "float32", "float": "float32", "torch.float32": "float32",
}  # fmt: skip
"""Other trainers' names of dtypes -> the name here."""


NOT_GIVEN = "not given"
"""The source shown for another trainer's defaults."""


@dataclass(slots=True)
class Row:
    """A line of the report.

    Args:
        given: the key.
        became: its new value, or why it was dropped.
        kind: "taken", "dropped" or "unknown".
    """

    given: Given
    became: str
    kind: str


@dataclass(slots=True)
class Conversion:
    """Options by their full name, and facts that are collected until all keys are read.

    Args:
        trainer: whose keys are read, by name.
    """

    trainer: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    to_fill: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _owner: dict[str, Row] = field(default_factory=dict)

    def take(self, given: Given, option: str, value: Any, note: str = "") -> Row:
        """Sets `option` to `value`; the row of a key that set another value before is marked as dropped."""
        became = f"{option}: {_text(value)}{f' ({note})' if note else ''}"
        return self._set(self.options, option, option, value, Row(given, became, "taken"))

    def add_fact(self, given: Given, fact: str, value: Any, became: str) -> None:
        """Records a fact that an option follows from once all keys are read."""
        self._set(self.facts, fact, f"({fact})", value, Row(given, became, "taken"))

    def _set(self, values: dict[str, Any], name: str, owner: str, value: Any, row: Row) -> Row:
        earlier = self._owner.get(owner)
        if earlier is not None and values[name] != value:
            earlier.became = f"dropped: {row.given.key} of {row.given.source} overrides it"
            earlier.kind = "dropped"
        values[name] = value
        self._owner[owner] = row
        self.rows.append(row)
        return row

    def drop(self, given: Given, why: str) -> None:
        self.rows.append(Row(given, f"dropped: {why}", "dropped"))

    def unsupported(self, given: Given, why: str) -> None:
        """Reports a key that changes the training and has no counterpart: the run will differ."""
        self.drop(given, f"no counterpart, {why}")
        self.notes.append(f"{given.key} {_text(given.value)} has no counterpart, and the run will differ: {why}")

    def unresolved(self, given: Given, options: tuple[str, ...]) -> None:
        """Reports a key whose value is not in the input."""
        self.drop(given, "its value is only known when the script runs")
        if options:
            self.to_fill.append(f"{', '.join(options)}: {given.key} is {given.value}, which was not given")

    def remove(self, option: str, why: str) -> None:
        """Withdraws the value that `option` was given."""
        del self.options[option]
        row = self._owner.pop(option, None)
        if row is not None:
            row.became, row.kind = f"dropped: {why}", "dropped"

    def given(self, *keys: str) -> bool:
        """Returns whether one of `keys` was in the input."""
        return any(row.given.key in keys for row in self.rows)

    def unknown(self, given: Given, why: str) -> None:
        """Reports a key that may matter and is not known."""
        self.rows.append(Row(given, f"not known: {why}", "unknown"))

    def set_default(self, source: str, key: str, option: str, value: Any, note: str = "") -> None:
        """Sets an option that is not in the input to the other trainer's default."""
        if option not in self.options:
            self.take(Given(source=source, key=key, value=NOT_GIVEN), option, value, note)

    def has(self, option: str) -> bool:
        """Returns whether this engine has such an option."""
        return option in option_types()


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule for one key of another trainer.

    Args:
        apply: writes it into the conversion.
        options: full names of this engine's options that the key may set, at once or when all keys are read.
    """

    apply: Callable[[Conversion, Given], None]
    options: tuple[str, ...] = ()


def sets(*options: str) -> Callable[[Callable[[Conversion, Given], None]], Rule]:
    """Makes a function the rule of keys that set `options`."""
    return lambda apply: Rule(apply, options)


def dropped(why: str) -> Rule:
    """Returns the rule of a key without a counterpart."""
    return Rule(lambda conversion, given: conversion.drop(given, why))


def number(given: Given) -> float:
    """Raises: UserError: it is not a number."""
    try:
        value = float(given.value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise _wrong(given, "a number") from None
    if isinstance(given.value, bool) or not isfinite(value):
        raise _wrong(given, "a finite number")
    return value


def whole(given: Given) -> int:
    """Raises: UserError: it is not a whole number."""
    value = number(given)
    if value != int(value):
        raise _wrong(given, "a whole number")
    return int(value)


def names(given: Given) -> list[str]:
    """Returns the names in a list, or in text with commas or spaces between them."""
    found = given.value
    if isinstance(found, str) and found.startswith("[") and found.endswith("]"):  # a list in quotes
        with suppress(ValueError, SyntaxError, RecursionError):
            found = ast.literal_eval(found)
    if isinstance(found, list):
        return [str(name).strip() for name in found]
    return [name for name in str(given.value).replace(",", " ").split() if name]


def whole_numbers(given: Given) -> list[int]:
    """Returns the whole numbers in a list, or the only one.

    Raises:
        UserError: one of them is none.
    """
    found = given.value if isinstance(given.value, list) else names(given)
    return [whole(Given(source=given.source, key=given.key, value=one)) for one in found]


def text(given: Given) -> str:
    """Returns a value as it was written.

    Raises:
        UserError: it is none.
    """
    if given.value is None or isinstance(given.value, bool):
        raise _wrong(given, "a name or path")
    return str(given.value)


def truth(given: Given) -> bool:
    """Raises: UserError: it is neither true nor false."""
    if isinstance(given.value, bool):
        return given.value
    word = str(given.value).lower()
    if word in ("1", "yes", "on", "true", "0", "no", "off", "false", "none"):
        return word in ("1", "yes", "on", "true")
    raise _wrong(given, "true or false")


def other_objective(given: Given, what: str) -> UserError:
    """Returns the refusal of a key, or of a program, that trains another objective than those that are converted.

    Args:
        given: the key.
        what: the objective, or its part that has no counterpart, such as "a reward model".
    """
    known = f"objectives are {', '.join(get_args(Name))}"
    if given.key == PROGRAM:
        return UserError(f"{given.source} starts {given.value}, which trains {what} and is not converted: {known}.")
    return UserError(
        f"{given.source} gives {given.key} as {_text(given.value)}, {what}, which is not converted: {known}. If the "
        f"run should train without it, take {given.key} out."
    )


def _wrong(given: Given, expected: str) -> UserError:
    return UserError(
        f"{given.source} gives {given.key} as {given.value!r}, but {expected} is expected: correct it there, or "
        "leave the key out."
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def set_dtype(conversion: Conversion, given: Given, dtype: str) -> None:
    """Sets model.dtype; a 16-bit dtype that this engine does not have becomes bfloat16."""
    try:
        ModelOptions(path="model", dtype=dtype)  # type: ignore[arg-type]
    except UserError:
        conversion.take(given, "model.dtype", "bfloat16", f"{dtype} is not available here")
        return
    conversion.take(given, "model.dtype", dtype)


def numbers(given: Given) -> list[float]:
    """Returns the numbers in a list, or the only one."""
    values = given.value if isinstance(given.value, list) else [given.value]
    return [number(Given(source=given.source, key=given.key, value=one)) for one in values]


NONE: tuple[Any, ...] = (None, "None", "null", "")
_KINDS: dict[str, Callable[[Given], Any]] = {
    **{read.__name__: read for read in (number, whole, names, whole_numbers, numbers, text, truth)},
    "as_is": lambda given: given.value,
    "as_text": lambda given: str(given.value),
    "present": lambda given: True,
    "at_least_one": lambda given: max(1, round(number(given))),
    "minutes": lambda given: 60.0 * number(given),
    "loss_scale": lambda given: min(number(given), 2.0**24),
    "whole_or_none": lambda given: None if given.value in NONE else whole(given),
}


def kind_of(name: str) -> Callable[[Given], Any]:
    """Returns the function that reads values of a kind; "A/B" is A where the key is true, and B where it is false."""
    if "/" not in name:
        return _KINDS[name]
    switched = [{"true": True, "false": False}.get(word, word) for word in name.split("/")]
    return lambda given: switched[0] if truth(given) else switched[1]
