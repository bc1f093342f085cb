"""A process in which tools, and one environment, are called: requests and answers are frames of JSON over one socket.

Tools and environments have TRL's interface. A tool is a function; an environment is what a factory without arguments
returns: its public methods are tools, `reset` begins a conversation and may return a text that is added to the prompt,
and `get_reward`, where it has one, scores the conversation. An exception of a tool is told to the model; one of `reset`
or `get_reward` is a failure of the completion. So is a process that ends or hangs, which ends no other conversation.

Without a torch import, so that a process starts quickly.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from engine.config.rollout import LARGEST_REWARD, NamedObject
from engine.rollouts.rewards.worker import answering, described_error, limit_memory, load_object
from engine.rollouts.turns.openenv import EpisodeLost, OpenEnvironment
from engine.rollouts.turns.schemas import NoSchema, tool_schema

LONGEST_RESULT = 1 << 20
"""Maximum characters of a result; what is behind them is cut off."""


def serve(descriptor: int, parent: int) -> None:
    """Answers requests until the other end is closed; see `Host`. The first names the tools and the environment, as
    {"tools": a list of names, "environment": a name or null, "memory": bytes or null}.

    Args:
        descriptor: of the socket.
        parent: process id of this one's, with which it ends.
    """
    with answering(descriptor, parent) as (receive, answer):
        wanted = receive()
        limit_memory(wanted["memory"])
        host = _loaded(wanted)
        answer({"problem": host} if isinstance(host, str) else host.description())
        while not isinstance(host, str):
            request = receive()
            answer({"call": request["call"], **host.answer(request)})


def _loaded(wanted: Mapping[str, Any]) -> Host | str:
    """Returns the host of what is wanted, or why there is none."""
    found: list[Any] = []
    named = [("rollout.tools", name) for name in wanted["tools"]]
    if wanted["environment"]:
        named.append(("rollout.environment", wanted["environment"]))
    for option, name in named:
        parsed = NamedObject.parse(option, name)
        if parsed.server is not None:
            found.append(partial(OpenEnvironment, parsed.server))
            continue
        assert parsed.file is not None, "the entries of a Python program are called there"
        try:
            found.append(load_object(Path(parsed.file), parsed.name))
        except BaseException as error:  # the user's module may raise anything, and call sys.exit
            return f"{name} cannot be loaded ({described_error(error)})"
    factory = found.pop() if wanted["environment"] else None
    return host_of(found, factory)


def host_of(tools: Sequence[Callable[..., Any]], factory: Callable[[], Any] | None) -> Host | str:
    """Returns the host of some tools and an environment, or why they cannot be used, in words."""
    try:
        return Host(tools, factory)
    except NoSchema as error:
        return str(error)
    except BaseException as error:  # so may the factory
        return f"the environment cannot be made ({described_error(error)})"


class Host:
    """Calls tools, and an environment, whose state is that of one conversation at a time.

    Args:
        tools: functions.
        factory: makes an environment; None for none.

    Raises:
        NoSchema: one of them cannot be described to a model, or is no environment.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], factory: Callable[[], Any] | None) -> None:
        environment = None if factory is None else factory()
        self._remote = environment if isinstance(environment, OpenEnvironment) else None
        self._environment = None if self._remote is not None else environment
        named = [(getattr(tool, "__name__", type(tool).__name__), tool) for tool in tools]
        if self._environment is not None:
            if not callable(getattr(self._environment, "reset", None)):
                raise NoSchema("the environment has no method reset")
            named += _methods(self._environment)
        self._schemas = [_schema(name, tool) for name, tool in named]
        if self._remote is not None:
            self._schemas += [tool.schema for tool in self._remote.tools]
            named += [(tool.schema["function"]["name"], tool.call) for tool in self._remote.tools]
        self._tools = dict(named)
        twice = sorted({name for name, _ in named if [other for other, _ in named].count(name) > 1})
        if twice:
            raise NoSchema(f"there are two tools of the name {twice[0]}: rename one of them")

    def description(self) -> dict[str, Any]:
        """Returns {"schemas": of the tools, "rewards": whether the environment scores its conversations}."""
        scores = self._remote is not None or callable(getattr(self._environment, "get_reward", None))
        return {"schemas": self._schemas, "rewards": scores}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answers one request.

        Args:
            request: {"do": "reset", "columns": {...}}, {"do": "call", "name": ..., "arguments": {...}} or {"do":
                "reward"}.

        Returns:
            {"observation": a text or null}, {"result": a text, "failed": whether the call failed, "done": whether the
            environment has ended the conversation} or {"reward": a number or null}; {"problem": a sentence} where the
            conversation cannot be continued.
        """
        try:
            if request["do"] == "reset":
                return self._reset(request["columns"])
            if request["do"] == "reward":
                return self._reward()
            return self._called(request["name"], request["arguments"])
        except EpisodeLost as lost:
            return {"problem": str(lost)}
        except BaseException as error:  # the user's program may raise anything, and call sys.exit
            name = "reset" if request["do"] == "reset" else "get_reward"
            return {"problem": f"its {name} raised {described_error(error)}"}

    def _reset(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        if self._remote is not None:
            shown = self._remote.reset({name: value for name, value in columns.items() if name != "prompt"})
            return {"observation": None if shown is None else _clean(shown)}
        assert self._environment is not None
        observation = _awaited(self._environment.reset(**_those_it_names(self._environment.reset, columns)))
        if not (observation is None or isinstance(observation, str)):
            return {"problem": f"its reset returned a {type(observation).__name__}, not a text or None"}
        return {"observation": None if observation is None else _clean(observation)}

    def _reward(self) -> dict[str, Any]:
        if self._remote is not None:
            reward: Any = self._remote.reward()
        else:
            assert self._environment is not None
            reward = _awaited(self._environment.get_reward())
        if reward is not None and not isinstance(reward, Real) and hasattr(reward, "item"):
            reward = reward.item()
        if reward is None:
            return {"reward": None}
        if not isinstance(reward, Real):
            return {"problem": f"its get_reward returned a {type(reward).__name__}, not a number"}
        number = float(reward)
        if not math.isfinite(number) or abs(number) > LARGEST_REWARD:
            return {
                "problem": f"its get_reward returned {number:g}, and rewards are from {-LARGEST_REWARD:g} to "
                f"{LARGEST_REWARD:g}"
            }
        return {"reward": number}

    def _called(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if name not in self._tools:
                raise ValueError(f"Tool {name} not found.")
            text, failed = _clean(str(_awaited(self._tools[name](**arguments)))), False
        except EpisodeLost:
            raise
        except BaseException as error:
            text, failed = failure_text(_words(error)), True
        return {"result": text, "failed": failed, "done": self._remote is not None and self._remote.ended}


def failure_text(words: str) -> str:
    """Returns what the model is told of a call that failed."""
    return _clean(str({"error": words}))


def _schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    try:
        return tool_schema(tool)
    except NoSchema as error:
        raise NoSchema(f"the tool {name} cannot be described to the model, as {error}") from None


def _methods(environment: Any) -> list[tuple[str, Callable[..., Any]]]:
    """Returns the tools of an environment: the public functions of its class, bound to it."""
    # of the class: on the object, properties would be evaluated
    names = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    return [
        (name, getattr(environment, name))
        for name in names
        if not name.startswith("_") and name not in ("reset", "get_reward")
    ]


def _those_it_names(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that a function takes: all where it has **, else those that it names."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(columns)
    named = {one.name for one in parameters}
    return {name: value for name, value in columns.items() if name in named}


def _awaited(found: Any) -> Any:
    return asyncio.run(_promise(found)) if inspect.isawaitable(found) else found


async def _promise(found: Any) -> Any:
    return await found


def _words(error: BaseException) -> str:
    try:
        return str(error)[:LONGEST_RESULT] or type(error).__name__
    except BaseException:  # an exception's own class words it, and may raise anything too
        return "an exception that cannot be told"


def _clean(text: str) -> str:
    """Returns a text that is valid Unicode and not too long; halves of characters become U+FFFD."""
    return text[:LONGEST_RESULT].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
