"""Suggestions for misspelt options: the closest name, or the option that another trainer's name stands for.

Other trainers' names come from the tables that `rankfold convert config` converts with, so that both know the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.seams import resolve


def closest(name: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    """Returns the known name that is spelt most like `name`; None where none is similar."""
    import difflib

    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def meant_options(name: str) -> list[str]:
    """Returns the options that `name`, or its part after the last dot, stands for in other trainers.

    Args:
        name: without the leading dashes, such as "learning_rate" or "optim.learning-rate".
    """
    # imports every section, which the help of most commands does not need
    from engine.config.option_names import option_types

    name = name.replace("-", "_")
    if name in option_types():
        return [name]
    options_of = resolve("rankfold.migrating.hints:options_of")
    return list(options_of(name.rpartition(".")[2]))


def closest_value(value: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that `value` stands for elsewhere ("bf16"), or that is spelt most like it."""
    words_for_values = resolve("rankfold.migrating.hints:words_for_values")
    known = list(choices)
    for word in (value, value.lower()):
        if word in known:
            return word
        meant: list[str] = [choice for choice in words_for_values(word) if choice in known]
        if meant:
            return meant[0]
    return closest(value, known, cutoff=0.6)
