"""A process in which an agent runs: requests and answers are frames of JSON over one socket.

An agent is the user's program: a function, or a class whose objects are called. It is given the fields of a record and
where the model answers, holds the conversation, and returns its reward. Each call has the process for itself.

Without a torch import, so that a process starts quickly.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from engine.config.rollout import LARGEST_REWARD, NamedObject
from engine.rollouts.agents.verifiers_agent import VerifiersAgent
from engine.rollouts.rewards.worker import answering, described_error, limit_memory, load_object
from engine.sentences import on_one_line

ENDPOINT = ("base_url", "api_key", "model")
"""What an agent is given beside the fields of its record."""
MOST_METRICS = 64
"""Maximum number of metrics."""
_NAME = re.compile(r"[\w.@ /-]{1,80}", re.ASCII)


def serve(descriptor: int, parent: int) -> None:
    """Answers requests until the other end is closed; see `answered`. The first names the agent, as {"agent": a name,
    "memory": bytes or null}.

    Args:
        descriptor: of the socket.
        parent: process id of this one's, with which it ends.
    """
    with answering(descriptor, parent) as (receive, answer):
        wanted = receive()
        limit_memory(wanted["memory"])
        agent = _loaded(wanted["agent"])
        answer({"problem": agent} if isinstance(agent, str) else {"schemas": [], "rewards": True})
        while not isinstance(agent, str):
            request = receive()
            reply = tasks_of(agent) if request["do"] == "tasks" else answered(agent, request)
            answer({"call": request["call"], **reply})


def _loaded(name: str) -> Callable[..., Any] | str:
    """Returns an agent, or why there is none."""
    parsed = NamedObject.parse("rollout.agent", name)
    try:
        if parsed.is_package:
            return VerifiersAgent(parsed.name)
        assert parsed.file is not None
        found = load_object(Path(parsed.file), parsed.name)
        agent = found() if inspect.isclass(found) else found
    except BaseException as error:  # the user's module may raise anything, and call sys.exit
        return f"{name} cannot be loaded ({described_error(error)})"
    return agent if callable(agent) else f"{name} makes an object that cannot be called"


def tasks_of(agent: Any) -> dict[str, Any]:
    """Returns {"tasks": the records of an agent that has its own}, or {"problem": a sentence}."""
    try:
        return {"tasks": agent.tasks()}
    except BaseException as error:  # an environment is a program of its authors
        return {"problem": described_error(error)}


def answered(agent: Callable[..., Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Has an agent hold a conversation.

    Args:
        request: {"columns": the fields of a record, "base_url", "api_key", "model"}.

    Returns:
        {"reward": a number or null, "metrics": numbers by their names}; {"problem": a sentence} where there is none.
    """
    given = {**request["columns"], **{name: request[name] for name in ENDPOINT}}
    # where clients, and commands that the agent starts, look for them
    os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = request["base_url"], request["api_key"]
    try:
        parameters = inspect.signature(agent).parameters.values()
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            named = {one.name for one in parameters}
            given = {name: value for name, value in given.items() if name in named}
        found = agent(**given)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        return checked(found)
    except BaseException as error:  # the user's program may raise anything, and call sys.exit
        return {"problem": f"it raised {described_error(error)}"}


def checked(found: Any) -> dict[str, Any]:
    """Returns what an agent returned, a reward, None, or {"reward": ..., "metrics": {...}}, or a problem."""
    reward: Any = found
    metrics: Any = {}
    if isinstance(found, Mapping):
        if other := sorted(str(name) for name in found if name not in ("reward", "metrics")):
            return {"problem": f"it returned {on_one_line(other[0])}, where reward and metrics are expected"}
        reward, metrics = found.get("reward"), found.get("metrics") or {}
    if not isinstance(metrics, Mapping) or len(metrics) > MOST_METRICS:
        return {"problem": f"it returned metrics that are no mapping of up to {MOST_METRICS} numbers"}
    if wrong := [str(name) for name in metrics if not is_metric_name(name)]:
        return {"problem": f"it returned a metric of the name {on_one_line(wrong[0])}: use letters, digits and _"}
    given = {} if reward is None else {"reward": reward}
    for name, value in [*given.items(), *metrics.items()]:
        if _number(value) is None:
            words = f"{value}" if isinstance(value, Real) else f"a {on_one_line(type(value).__name__)}"
            return {"problem": f"its {name} is {words}, where a finite number up to {LARGEST_REWARD:g} is expected"}
    return {
        "reward": None if reward is None else _number(reward),
        "metrics": {name: _number(value) for name, value in metrics.items()},
    }


def is_metric_name(name: object) -> bool:
    """Returns whether a metric can have this name in the files of a run."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _number(value: Any) -> float | None:
    if not isinstance(value, Real) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST_REWARD else None


async def _awaited(found: Any) -> Any:
    return await found
