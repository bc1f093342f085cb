"""A process that calls reward functions: requests and answers are frames of JSON over one socket.

A reward function is the user's program. Whatever it does to its process (prints, leaks, hangs, crashes) stays there:
the caller ends the process and starts another. The functions are called as TRL calls them, with the keywords
`prompts`, `completions`, `completion_ids` and one for each further column of the records, all lists of one length; a
function without ** gets those that it names. Their results are checked here, where the types are still known.

Without a torch import, so that a process starts quickly.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import json
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path
from typing import Any

from engine.config.rollout import LARGEST_REWARD
from engine.files import platforms
from engine.foreign.frames import receive_bytes, send_frame
from engine.foreign.streams import LimitedStream
from engine.foreign.supervisor import STOPPING
from engine.rollouts.rewards.built_in import Reward, built_in
from engine.sentences import listed, on_one_line
from engine.telemetry.ending import end_with_parent

REQUEST_BYTES = 1 << 40
"""Maximum bytes of a request, which is as long as the run's prompts and completions: this process trusts its caller."""


def serve(descriptor: int, parent: int) -> None:
    """Answers requests until the other end is closed. The first names the functions: a list of [file or null, function,
    argument, columns]; its answer is a list of sentences on those that cannot be used. Each further one is {"call": a
    number, "function": its place in the list, "prompts", "completions", "completion_ids", "columns"}; its answer is
    that of `scored` with the same number.

    Args:
        descriptor: of the socket.
        parent: process id of this one's, with which it ends.
    """
    with answering(descriptor, parent) as (receive, answer):
        functions, problems = _load_all(receive())
        answer(problems)
        while True:
            request = receive()
            reply = scored(functions[request.pop("function")], request)
            answer({"call": request["call"], **reply})


@contextmanager
def answering(descriptor: int, parent: int) -> Iterator[tuple[Callable[[], Any], Callable[[object], None]]]:
    """Connects a process of a user's program with the run, until the other end is closed, which ends the block.

    Args:
        descriptor: of the socket.
        parent: process id of this one's, with which it ends.

    Yields:
        A function that receives a request of the run, whose records may have anything that a data file may, and one
        that sends an answer.
    """
    end_with_parent(parent)
    ignore_signals()
    with socket.socket(fileno=descriptor) as connection, suppress(EOFError, ConnectionError):
        stream, own = LimitedStream(connection, None, most_bytes=REQUEST_BYTES), os.getpid()

        def answer(message: object) -> None:
            if os.getpid() != own:  # a fork by the user's program, which returned here
                os._exit(0)
            send_frame(stream, message)

        yield lambda: json.loads(receive_bytes(stream)), answer


def limit_memory(most_bytes: int | None) -> None:
    """Limits the address space of this process; None for no limit."""
    if most_bytes is not None:
        platforms.resource.setrlimit(platforms.resource.RLIMIT_AS, (most_bytes, most_bytes))


def ignore_signals() -> None:
    """Ignores the signals that stop a run, which a scheduler may send to all processes: the caller finishes its step
    first, and ends this process. Child processes of the functions keep the system's own handling, and no signal is
    blocked, whatever the caller has blocked in its threads."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def handle(as_what: Any) -> None:
        for number in STOPPING:
            signal.signal(number, as_what)

    handle(lambda number, frame: None)  # unlike one that is ignored, one with a handler is not passed on by exec
    os.register_at_fork(after_in_child=lambda: handle(signal.SIG_DFL))


def _load_all(wanted: Sequence[tuple[str | None, str, str, list[str]]]) -> tuple[list[Reward], list[str]]:
    functions, problems = [], []
    for file, name, argument, columns in wanted:
        try:
            functions.append(built_in(name, argument) if file is None else _load(Path(file), name, columns))
        except BaseException as error:  # the user's module may raise anything, and call sys.exit
            entry = f"{name}:{json.loads(argument)[0]}" if file is None else f"{file}:{name}"
            problems.append(f"{entry} cannot be loaded ({described_error(error)})")
    return functions, problems


def _load(file: Path, name: str, columns: Sequence[str]) -> Reward:
    return with_its_columns(load_object(file, name), columns)


def load_object(file: Path, name: str) -> Any:
    """Returns the function or class of this name in a file, which is executed once in a process: what several of its
    functions share, they share here too.

    Raises:
        Exception: the file raised it, or has no such function.
    """
    path = file.resolve()
    called = f"rankfold_program_{hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()}_{file.stem}"
    if (module := sys.modules.get(called)) is None:
        spec = importlib.util.spec_from_file_location(called, file)
        if spec is None or spec.loader is None:
            raise ValueError("it is no Python file")
        module = sys.modules[called] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent))  # for its imports of files beside it
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(called, None)
            raise
        finally:
            sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"there is no function {name}")
    return function


def with_its_columns(function: Reward, columns: Sequence[str]) -> Reward:
    """Returns a function that is called with all keywords, and passes on those that `function` names.

    Args:
        columns: names of the columns of the records.

    Raises:
        ValueError: it wants an argument that it is not given.
    """
    given = {"prompts", "completions", "completion_ids", *columns}
    parameters = inspect.signature(function).parameters.values()
    missing = [
        one.name
        for one in parameters
        if one.default is one.empty and one.name not in given and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    if missing:
        raise ValueError(
            f"it wants {listed(missing)}, but is given prompts, completions, completion_ids and the columns "
            f"{listed(columns) or '(there are none)'}"
        )
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return function
    named = {one.name for one in parameters}

    def with_those_it_names(**keywords: Any) -> Any:
        return function(**{key: value for key, value in keywords.items() if key in named})

    return with_those_it_names


def scored(function: Reward, request: Mapping[str, Any]) -> dict[str, Any]:
    """Calls a function, and checks its rewards.

    Returns:
        {"rewards": a number, null, or a sentence for each completion}, or {"problem": the reason why there are none}.
    """
    columns = request["columns"]
    count = len(request["completions"])
    try:
        found = function(
            prompts=request["prompts"],
            completions=request["completions"],
            completion_ids=request["completion_ids"],
            **columns,
        )
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        if not isinstance(found, Sequence) and hasattr(found, "tolist"):
            found = found.tolist()  # an array's or a tensor's
        if isinstance(found, str) or not isinstance(found, Sequence):
            return {"problem": f"it returned {_kind(found)}, not a list of rewards"}
        if len(found) != count:
            return {"problem": f"it returned {len(found)} rewards for {count} completion{'s' if count != 1 else ''}"}
        # inside too: a number of the function's own class may raise
        return {"rewards": [_checked(one) for one in found]}
    except BaseException as error:  # the user's function may raise anything, and call sys.exit
        return {"problem": f"it raised {described_error(error)}"}


async def _awaited(promise: Any) -> Any:
    return await promise


def _checked(reward: Any) -> float | str | None:
    """Returns a reward as a number, None where a function gives none, or a sentence on its flaw."""
    if reward is None:
        return None
    if not isinstance(reward, Real) and hasattr(reward, "item"):
        reward = reward.item()
    if not isinstance(reward, Real):
        return f"it returned {_kind(reward)}, not a number"
    try:
        number = float(reward)
    except OverflowError:
        return "it returned a number that is too large for a float"
    if not math.isfinite(number):
        return f"it returned {number}, not a finite number"
    if abs(number) > LARGEST_REWARD:
        return f"it returned {number:g}, and rewards are from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
    return number


def _kind(value: object) -> str:
    return "None" if value is None else f"a {on_one_line(type(value).__name__)}"


def described_error(error: BaseException) -> str:
    """Returns an exception's kind and words, on one line."""
    try:
        kind, words = on_one_line(type(error).__name__), on_one_line(str(error))
        found = f"{kind}: {words}" if words else kind
        return found.encode(errors="backslashreplace").decode()  # halves of characters are no JSON for the caller
    except BaseException:  # an exception's own class words it, and may raise anything too
        return "an exception that cannot be told"
