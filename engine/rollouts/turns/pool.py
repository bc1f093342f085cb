"""The processes in which tools and environments are called. Each belongs to one conversation at a time.

A process that hangs or ends costs that conversation; the next one gets a new process. Functions of the Python program
that trains are called in its own process, in threads, as its reward functions are.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, LifoQueue
from typing import Any, Protocol

from engine.config.rollout import IN_PROGRAM, NamedObject, RolloutOptions
from engine.files import platforms
from engine.foreign.deadline import Deadline
from engine.foreign.fields import described, is_number
from engine.rollouts.agents.worker import MOST_METRICS, is_metric_name
from engine.rollouts.turns.worker import LONGEST_RESULT, Host, host_of
from engine.rollouts.user_process import CallFailed, UserProcess
from engine.sentences import on_one_line

_START_SECONDS = 120.0
"""Seconds that a process gets to import the files."""
_ANSWER_BYTES = 12 * LONGEST_RESULT + (1 << 16)
"""Maximum bytes of an answer: a character of a result has up to 12 in JSON."""
_TASKS_BYTES = 1 << 30
"""The same of the tasks of an agent."""
_LONGEST_SENTENCE = 1000
"""Maximum characters of a sentence."""
_LOOK_SECONDS = 0.2
"""Seconds after which one who waits for a process looks whether the run has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """Tools and an environment of a Python program, by the names that their options have after python:."""

    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    environments: Mapping[str, Callable[[], Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """The tools of a run.

    Args:
        schemas: of the tools, for the chat template.
        rewards: whether the environment scores its conversations.
    """

    schemas: tuple[dict[str, Any], ...]
    rewards: bool


class Seat(Protocol):
    """A place at which the tools and the environment of one conversation are called."""

    def describe(self) -> dict[str, Any]:
        """Returns what `Host.description` does, or {"problem": a sentence}.

        Raises:
            CallFailed: there is none.
        """
        ...

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request; see `Host.answer`.

        Raises:
            CallFailed: there is none.
        """
        ...

    def end(self) -> None: ...


class _ProcessSeat:
    """A seat in a process of its own.

    Args:
        wanted: the first request, which says what is called.
        timeout: seconds of a call.
        module: of the process; see `UserProcess`.
    """

    def __init__(self, wanted: dict[str, Any], timeout: float, module: str) -> None:
        self._wanted, self._timeout = wanted, timeout
        self._process, self._calls = UserProcess(module), 0
        self._description: dict[str, Any] = {}

    def describe(self) -> dict[str, Any]:
        platforms.require_posix("a tool or an environment, which runs in a process of its own,")
        if self._process.start():
            found = self._process.exchange(self._wanted, Deadline(_START_SECONDS), most_bytes=_ANSWER_BYTES)
            if not isinstance(found, dict):
                raise self._process.malformed(f"{described(found)}, where an object was expected")
            self._description = found
        return self._description

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        problem = self.describe().get("problem")
        if problem is not None:
            self._process.close()
            raise CallFailed(on_one_line(str(problem), most=_LONGEST_SENTENCE))
        self._calls += 1
        message = {"call": self._calls, **request}
        most = _TASKS_BYTES if request["do"] == "tasks" else _ANSWER_BYTES
        reply = self._process.exchange(message, Deadline(self._timeout), most_bytes=most)
        if not isinstance(reply, dict) or reply.get("call") != self._calls or not _is_answer(request["do"], reply):
            raise self._process.malformed(f"{described(reply)} that answers another question")
        return _without_problem(reply)

    def end(self) -> None:
        self._process.end()


class _ProgramSeat:
    """A seat in this process. A call that hangs leaves its thread, and the environment with it, behind."""

    def __init__(self, tools: Sequence[Callable[..., Any]], factory: Callable[[], Any] | None, timeout: float) -> None:
        self._tools, self._factory, self._timeout = tools, factory, timeout
        self._host: Host | str | None = None

    def describe(self) -> dict[str, Any]:
        if self._host is None:
            self._host = self._within(lambda: host_of(self._tools, self._factory))
        return {"problem": self._host} if isinstance(self._host, str) else self._host.description()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.describe()
        host = self._host
        if not isinstance(host, Host):
            raise CallFailed(on_one_line(str(host), most=_LONGEST_SENTENCE))
        copied = json.loads(json.dumps(request))  # the program may change what it is given, as one in a process may
        reply: dict[str, Any] = self._within(lambda: host.answer(copied))
        return _without_problem(reply)

    def _within(self, call: Callable[[], Any]) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(call()), name="environment", daemon=True)
        thread.start()
        thread.join(self._timeout)
        if not found:
            self._host = None
            raise CallFailed(f"it did not come to an end within {self._timeout:g} s", hung=True)
        return found[0]

    def end(self) -> None:
        """Does nothing: the environment ends with this process."""


def _is_answer(do: str, reply: Mapping[str, Any]) -> bool:
    """Returns whether the fields of an answer are those of this request."""
    if isinstance(reply.get("problem"), str):
        return True
    if do == "reset":
        return reply.get("observation") is None or isinstance(reply["observation"], str)
    if do == "tasks":
        return isinstance(reply.get("tasks"), list) and all(isinstance(one, dict) for one in reply["tasks"])
    if do == "run":
        metrics = reply.get("metrics")
        return (reply.get("reward") is None or is_number(reply["reward"])) and (
            isinstance(metrics, dict)
            and len(metrics) <= MOST_METRICS
            and all(is_metric_name(name) and is_number(value) for name, value in metrics.items())
        )
    if do == "reward":
        return reply.get("reward") is None or is_number(reply["reward"])
    return isinstance(reply.get("result"), str) and all(
        isinstance(reply.get(name), bool) for name in ("failed", "done")
    )


def _without_problem(reply: dict[str, Any]) -> dict[str, Any]:
    if (problem := reply.get("problem")) is not None:
        raise CallFailed(on_one_line(str(problem), most=_LONGEST_SENTENCE))
    return reply


class EnvironmentPool:
    """The seats of a run's conversations. Also a context manager, which ends the processes.

    Args:
        options: of rollouts.
        programs: tools and environments of a Python program.
        seats: how many there are; None for as many as the options say.
    """

    def __init__(self, options: RolloutOptions, programs: Programs, *, seats: int | None = None) -> None:
        if seats is None:
            seats = options.environment_workers or options.slots
        self.has_environment = options.environment is not None or options.agent is not None
        self._names = "rollout.tools or rollout.environment" if options.agent is None else "rollout.agent"
        self._seats = [_seat(options, programs) for _ in range(seats)]
        self._free: LifoQueue[Seat] = LifoQueue()
        for seat in reversed(self._seats):  # those that have started are taken first
            self._free.put(seat)
        self._has_ended = threading.Event()

    @property
    def size(self) -> int:
        """The number of seats."""
        return len(self._seats)

    def describe(self) -> Description | str:
        """Returns the tools, or why they cannot be used, in one sentence."""
        try:
            found = self._seats[0].describe()
        except CallFailed as failure:
            return f"{self._names} cannot be loaded ({failure}): correct the file, or the entry."
        if (problem := found.get("problem")) is not None:
            words = on_one_line(str(problem), most=_LONGEST_SENTENCE)
            return f"{self._names}: {words}; correct the file, or the entry."
        schemas = found.get("schemas")
        if not isinstance(schemas, list) or not all(isinstance(one, dict) for one in schemas):
            return f"{self._names} describe no tools: correct the files."
        return Description(schemas=tuple(schemas), rewards=found.get("rewards") is True)

    def take(self) -> Seat:
        """Takes a free seat; waits for one.

        Raises:
            CallFailed: the run ended.
        """
        while not self._has_ended.is_set():
            try:
                return self._free.get(timeout=_LOOK_SECONDS)
            except Empty:
                continue
        raise CallFailed("the run ended")

    def give_back(self, seat: Seat) -> None:
        """Lets another conversation have a seat."""
        self._free.put(seat)

    @contextmanager
    def seat(self) -> Iterator[Seat]:
        """Takes a seat for a call, and gives it back."""
        seat = self.take()
        try:
            yield seat
        finally:
            self.give_back(seat)

    def close(self) -> None:
        """Ends the processes; calls under way fail."""
        self._has_ended.set()
        for seat in self._seats:
            seat.end()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def workers_note(options: RolloutOptions) -> str | None:
    """Returns a note where there are fewer processes than slots, so that some of these stay empty; None elsewhere."""
    workers, slots = options.environment_workers, options.slots
    own = options.environment is not None or options.agent is not None
    if not own or workers is None or workers >= slots:
        return None
    return (
        f"rollout.environment_workers is {workers}, which is how many conversations are under way at a time, so that "
        f"{slots - workers} of {slots} rollout.slots stay empty: raise it where the machine has room for more "
        "processes, or lower rollout.slots"
    )


def _seat(options: RolloutOptions, programs: Programs) -> Seat:
    names = [text for _, text in options.named_programs]
    if any(text.startswith(IN_PROGRAM) for text in names):
        tools = [programs.tools[NamedObject.parse("rollout.tools", text).name] for text in options.tools]
        factory = None
        if options.environment is not None:
            factory = programs.environments[NamedObject.parse("rollout.environment", options.environment).name]
        return _ProgramSeat(tools, factory, options.environment_timeout)
    memory = None if options.environment_memory is None else int(options.environment_memory * 2**30)
    if options.agent is not None:
        agent = {"agent": options.agent, "memory": memory}
        return _ProcessSeat(agent, options.agent_timeout, "engine.rollouts.agents.worker")
    wanted = {"tools": list(options.tools), "environment": options.environment, "memory": memory}
    return _ProcessSeat(wanted, options.environment_timeout, "engine.rollouts.turns.worker")
