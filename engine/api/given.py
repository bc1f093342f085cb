"""Records and functions that a Python program gives beside a configuration, and their names in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any

from engine.api.configuration import AnyPath
from engine.config.rollout import IN_PROGRAM
from engine.config.run import RunConfig
from engine.data.python_records import PythonRecords, Records
from engine.data.sources import RecordSource
from engine.errors import UserError
from engine.training.run_data import Supplied

Data = Records | AnyPath
"""Records: a list, an iterator or a `datasets.Dataset` of mappings, or a function without arguments that returns one of
these; or the path of a file of records."""
Reward = Callable[..., Any] | str
"""A function that scores completions, called as TRL calls it, or an entry as rollout.rewards has it."""
Tool = Callable[..., Any] | str
"""A function that a model may call, or an entry as rollout.tools has it."""
Environment = Callable[[], Any] | str
"""A callable that makes an environment, or the name of such a class as rollout.environment has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """The records and functions of a program. See `engine.api.train`; None leaves those of the configuration."""

    data: Data | None = None
    mix: Sequence[tuple[Data, float]] | None = None
    validation: Data | None = None
    rewards: Sequence[Reward | tuple[Reward, float]] | None = None
    tools: Sequence[Tool] | None = None
    environment_factory: Environment | None = None

    def put_into(self, config: RunConfig, opened: ExitStack) -> tuple[RunConfig, Supplied]:
        """Returns the configuration with the names of what is given, and what they name.

        Args:
            opened: closes the sources of records when the run has ended.

        Raises:
            UserError: an argument is of another kind, or clashes with the configuration.
        """
        sources: dict[str, RecordSource] = {}

        def named(argument: str, given: Data) -> str:
            if isinstance(given, (str, PathLike)):
                return fspath(given)
            name = f"{IN_PROGRAM}{argument}"
            sources[name] = opened.enter_context(PythonRecords(argument, given))
            return name

        data, rollout = config.data, config.rollout
        if self.data is not None:
            data = replace(data, train=named("data", self.data))
        if self.mix is not None:
            weighed = enumerate(_weighed(self.mix))
            data = replace(data, mix=tuple(f"{named(f'mix[{at}]', given)}={weight}" for at, (given, weight) in weighed))
        if self.validation is not None:
            data = replace(data, validation=named("validation", self.validation))
        functions: dict[str, Callable[..., Any]] = {}
        if self.rewards is not None:
            entries, weights = _entries(self.rewards, functions)
            rollout = replace(rollout, rewards=entries, reward_weights=weights)
        tools: dict[str, Callable[..., Any]] = {}
        if self.tools is not None:
            rollout = replace(rollout, tools=_tool_entries(self.tools, tools))
        environments: dict[str, Callable[[], Any]] = {}
        if (factory := self.environment_factory) is not None:
            if not (isinstance(factory, str) or callable(factory)):
                raise UserError(
                    f"environment_factory is of type {type(factory).__name__}, but a class is expected, or a text such "
                    "as env.py:Door: correct it."
                )
            entry = factory if isinstance(factory, str) else _named(factory, 0, environments)
            rollout = replace(rollout, environment=entry)
        supplied = Supplied(sources=sources, rewards=functions, tools=tools, environments=environments)
        return replace(config, data=data, rollout=rollout), supplied


def names_of(supplied: Supplied) -> set[str]:
    """Returns the texts in a configuration that name what was supplied."""
    functions = (*supplied.rewards, *supplied.tools, *supplied.environments)
    return {*supplied.sources, *(f"{IN_PROGRAM}{name}" for name in functions)}


def _weighed(mix: object) -> Iterable[tuple[Data, float]]:
    if isinstance(mix, (list, tuple)) and all(map(_is_weighed, mix)):
        return mix
    raise UserError("mix is no list of pairs of records and a weight: write for example mix=[(records, 0.5)].")


def _is_weighed(one: object) -> bool:
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], (int, float))


def _entries(rewards: object, functions: dict[str, Callable[..., Any]]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Returns the entries of rollout.rewards with their weights, and names the functions among them."""
    if not isinstance(rewards, (list, tuple)):
        raise UserError(
            f"rewards is of type {type(rewards).__name__}, but a list of functions is expected: write rewards=[f]."
        )
    entries, weights = [], []
    for place, one in enumerate(rewards):
        reward, weight = one if _is_weighed(one) else (one, 1.0)
        if not (isinstance(reward, str) or callable(reward)):
            raise UserError(
                f"rewards[{place}] is of type {type(reward).__name__}, but a function is expected, a text such as "
                "exact_match, or one of these in a pair with its weight: correct it."
            )
        entries.append(reward if isinstance(reward, str) else _named(reward, place, functions))
        weights.append(float(weight))
    return tuple(entries), tuple(weights) if any(map(_is_weighed, rewards)) else ()


def _tool_entries(tools: object, functions: dict[str, Callable[..., Any]]) -> tuple[str, ...]:
    """Returns the entries of rollout.tools, and names the functions among them."""
    if not isinstance(tools, (list, tuple)):
        raise UserError(
            f"tools is of type {type(tools).__name__}, but a list of functions is expected: write tools=[f]."
        )
    wrong = next((one for one in tools if not (isinstance(one, str) or callable(one))), None)
    if wrong is not None:
        raise UserError(
            f"tools has something of type {type(wrong).__name__}, but functions are expected, or texts such as "
            "tools.py:multiply: correct it."
        )
    return tuple(one if isinstance(one, str) else _named(one, place, functions) for place, one in enumerate(tools))


def _named(reward: Callable[..., Any], place: int, functions: dict[str, Callable[..., Any]]) -> str:
    """Returns the entry of a function of the program, under a name of its own."""
    whole = reward.func if isinstance(reward, functools.partial) else reward
    name = getattr(whole, "__name__", type(whole).__name__)
    name = name if name.isidentifier() else f"reward_{place}"
    while name in functions:
        name += "_"
    functions[name] = reward
    return f"{IN_PROGRAM}{name}"
