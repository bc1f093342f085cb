"""Scores completions in worker processes, so that a function that crashes or hangs costs its own sample alone.

A call takes a share of the completions. Where it fails, each of them is tried by itself, and those that fail again get
no reward from this function, with a sentence. A process that hangs is killed, and another is started in its place.

Rewards are a function of texts: neither the number of processes nor their order matters to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config.rollout import LARGEST_REWARD, MODEL_REWARD, RewardSource
from engine.files import platforms
from engine.foreign.deadline import Deadline
from engine.foreign.fields import described, is_number
from engine.rollouts.rewards.program_functions import ProgramFunction
from engine.rollouts.user_process import CallFailed, UserProcess
from engine.sentences import on_one_line

_START_SECONDS, _MODEL_SECONDS = 120.0, 1800.0
"""Seconds that a process gets to import the files of the functions, and to read reward models."""
_HANGS = 3
"""Consecutive completions of one failed call that may hang before the rest of it is skipped."""
_TRIES = 4
"""Multiple of rollout.reward_timeout after which no more completions of a failed call are tried one by one."""
_ANSWER_BYTES, _SENTENCE_BYTES = 1 << 16, 1 << 13
"""Maximum bytes of an answer, and further bytes for each completion or function, which may have a sentence."""
_LONGEST_SENTENCE = 1000
"""Maximum characters of a sentence."""
_KINDS = 5
"""Kinds of failure of one function in one generation batch that have their own sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A completion to be scored.

    Args:
        place: where its prompt comes from, for messages.
        prompt: a text, or a list of messages.
        completion: a text, or a list of messages where the prompt is one of messages.
        completion_ids: its tokens.
        columns: the other fields of its record.
        environment: the score that its environment gave; None for none.
        failure: why it has no reward whatever it is; None where it may have one.
    """

    place: str
    prompt: Any
    completion: Any
    completion_ids: Sequence[int]
    columns: Mapping[str, Any]
    environment: float | None = None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The rewards of some completions.

    Args:
        rewards: fp64 [N, functions]; NaN where there is none.
        problems: sentences on failures, a few for each function.
    """

    rewards: NDArray[np.float64]
    problems: tuple[str, ...]


def _sentence(words: str) -> str:
    """Returns a sentence of a process on one line, as it may be meant to look like lines of the log."""
    return on_one_line(words, most=_LONGEST_SENTENCE)


class _Worker:
    """A process that calls functions; started where it is first called, and again after a failure.

    Args:
        wanted: the functions, as `engine.rollouts.rewards.worker.serve` takes them.
        timeout: seconds of a call.
    """

    def __init__(self, wanted: list[tuple[str | None, str, str, list[str]]], timeout: float) -> None:
        self._wanted, self._timeout = wanted, timeout
        self.call_seconds = 0.0
        """Seconds that all calls took, without the start of processes."""
        self._process = UserProcess("engine.rollouts.rewards.worker")
        self._calls = 0

    def start(self) -> list[str]:
        """Starts the process, where there is none; returns the problems of the functions.

        Raises:
            CallFailed: it does not start.
            UserError: this is Windows.
        """
        platforms.require_posix("a reward function, which runs in a process of its own,")
        if not self._process.start():
            return []
        seconds = _MODEL_SECONDS if any(one[:2] == (None, MODEL_REWARD) for one in self._wanted) else _START_SECONDS
        problems = self._exchange(self._wanted, Deadline(seconds), sentences=len(self._wanted))
        if not isinstance(problems, list) or not all(isinstance(one, str) for one in problems):
            raise self._process.malformed(f"{described(problems)}, where a list of sentences was expected")
        return problems

    def call(self, request: dict[str, Any]) -> list[float | str | None]:
        """Calls a function.

        Raises:
            CallFailed: it gave no rewards.
        """
        problems = self.start()
        if problems:
            self._process.close()
            raise CallFailed(problems[0])
        self._calls += 1
        begin = time.monotonic()
        count = len(request["completions"])
        try:
            reply = self._exchange({"call": self._calls, **request}, Deadline(self._timeout), sentences=count)
        finally:
            self.call_seconds += time.monotonic() - begin
        malformed = self._process.malformed
        if not isinstance(reply, dict) or reply.get("call") != self._calls:
            raise malformed(f"{described(reply)} to another call")
        if isinstance(problem := reply.get("problem"), str):
            raise CallFailed(_sentence(problem))
        rewards = reply.get("rewards")
        if not isinstance(rewards, list) or len(rewards) != count:
            raise malformed(f"{described(rewards)}, where a list of {count} rewards was expected")
        for one in rewards:
            if not (one is None or isinstance(one, str) or (is_number(one) and abs(one) <= LARGEST_REWARD)):
                raise malformed(f"{described(one)} for a reward")
        return [_sentence(one) if isinstance(one, str) else one for one in rewards]

    def _exchange(self, message: object, deadline: Deadline, *, sentences: int) -> Any:
        """Sends a message and returns its answer; see `UserProcess.exchange`.

        Args:
            sentences: that the answer may have.
        """
        most_bytes = _ANSWER_BYTES + sentences * _SENTENCE_BYTES
        return self._process.exchange(message, deadline, most_bytes=most_bytes)

    def end(self) -> None:
        """Ends the process; no other is started."""
        self._process.end()


class Failures:
    """The failures of one function in one generation batch.

    Args:
        name: of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.of_completions: list[tuple[int, str]] = []
        """Place of a completion without a reward, and the reason."""
        self.of_calls: list[tuple[int, CallFailed]] = []
        """Completions of a call that failed, each of which could be scored by itself, and the failure."""

    def sentences(self, samples: Sequence[Sample]) -> Iterator[str]:
        """Yields a sentence for each kind of failure, the most frequent first, and one for those that are left."""
        kinds: dict[str, list[int]] = {}
        for place, why in sorted(self.of_completions):
            kinds.setdefault(why, []).append(place)
        frequent = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
        for why, places in frequent[:_KINDS]:
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            yield f"{self._name} gave no reward for a completion of {samples[places[0]].place}{more}: {why}"
        if left := [len(places) for _, places in frequent[_KINDS:]]:
            yield f"{self._name} gave no reward for {sum(left)} other completions, for {len(left)} other reasons"
        if self.of_calls:
            count, failure = self.of_calls[0]
            times = f" ({len(self.of_calls)} times)" if len(self.of_calls) > 1 else ""
            advice = "correct it, as each completion now costs a call of its own"
            if failure.hung:
                advice = "raise rollout.reward_timeout, or rollout.reward_workers, among which they are shared out"
            yield (
                f"{self._name} was given {count} completions at once, and {failure}{times}, but it scored each by "
                f"itself: {advice}"
            )


class Scoring:
    """Scores that are being computed.

    Args:
        calls: to be waited for.
        collect: makes the scores when they have ended.
    """

    def __init__(self, calls: Sequence[Future[None]], collect: Callable[[], Scores]) -> None:
        self._calls, self._collect = calls, collect

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds`; returns whether the scores are there."""
        return not wait(self._calls, seconds).not_done

    def result(self) -> Scores:
        """Returns the scores, when they are there."""
        for call in self._calls:
            call.result()
        return self._collect()


class RewardPool:
    """Scores completions with some functions. Also a context manager, which ends its processes.

    Args:
        sources: of the functions.
        workers: processes.
        timeout: seconds that a call may take.
        columns: names of the columns that all samples have.
        group: samples that belong together, one after the other: a call has all of them or none.
        in_program: the functions of this program, by the names of their sources.
    """

    def __init__(
        self,
        sources: Sequence[RewardSource],
        *,
        workers: int,
        timeout: float,
        columns: Sequence[str],
        group: int = 1,
        in_program: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._sources, self._num_workers, self._group, self._timeout = sources, workers, group, timeout
        self._own = {
            place: ProgramFunction((in_program or {})[one.function], columns, timeout)
            for place, one in enumerate(sources)
            if one.in_program
        }
        """The functions of this program, by their places among the sources."""
        served = [place for place in range(len(sources)) if place not in self._own]
        self._served = {place: number for number, place in enumerate(served)}
        """The places of the functions that processes call -> those in the processes' lists."""
        chosen = [sources[place] for place in served]
        wanted = [(one.file, one.function, one.passed, list(columns)) for one in chosen]
        self._workers = [_Worker(wanted, timeout) for _ in range(workers)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")

    def check(self) -> str | None:
        """Loads the functions once; returns a sentence where one cannot be loaded."""
        for place, function in self._own.items():
            if (problem := function.problem()) is not None:
                return f"the reward function {self._sources[place].function} cannot be called ({problem}); correct it."
        if not self._served:
            return None
        try:
            problems = self._threads.submit(self._workers[0].start).result()
        except CallFailed as failure:
            files = ", ".join(sorted(one.opened for one in self._sources if one.opened is not None))
            problems = [f"{files} cannot be loaded ({failure})"]
        return f"rollout.rewards: {problems[0]}; correct the file, or the entry." if problems else None

    def begin(self, samples: Sequence[Sample], group: int | None = None) -> Scoring:
        """Starts to score completions.

        Args:
            group: samples that belong together, where these are others than usual.
        """
        group = group or self._group
        rewards = np.full((len(samples), len(self._sources)), np.nan)
        failures = [Failures(source.name) for source in self._sources]
        size = -(-len(samples) // (self._num_workers * group)) * group
        chunks = [range(first, min(first + size, len(samples))) for first in range(0, len(samples), max(size, 1))]

        def score(function: int, chunk: range) -> None:
            with self._caller(function) as caller:
                for place, found in self._try(caller, function, samples, chunk, failures[function]):
                    if isinstance(found, str):
                        failures[function].of_completions.append((place, found))
                    elif found is not None:
                        rewards[place, function] = found

        calls = [
            self._threads.submit(score, function, chunk) for function in range(len(self._sources)) for chunk in chunks
        ]
        return Scoring(calls, lambda: _scores(samples, rewards, failures))

    @contextmanager
    def _caller(self, function: int) -> Iterator[_Worker | ProgramFunction]:
        """Takes what calls a function, and returns it afterwards."""
        if (own := self._own.get(function)) is not None:
            with own.lock:
                yield own
            return
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def _try(
        self,
        worker: _Worker | ProgramFunction,
        function: int,
        samples: Sequence[Sample],
        chunk: range,
        failures: Failures,
    ) -> list[tuple[int, float | str | None]]:
        """Returns the reward of each completion, or the reason why there is none."""
        try:
            found = worker.call(_request(self._served.get(function, function), [samples[place] for place in chunk]))
            return list(zip(chunk, found, strict=True))
        except CallFailed as failure:
            if len(chunk) == 1:
                return [(chunk[0], str(failure))]
            why = failure
        alone: list[tuple[int, float | str | None]] = []
        hung, failed, ends = 0, 0, worker.call_seconds + _TRIES * self._timeout
        for place in chunk:
            if hung == _HANGS:
                alone.append((place, f"it was not called, as {_HANGS} others hung"))
                continue
            if worker.call_seconds > ends:
                alone.append((place, f"it was not called, as others took more than {_TRIES * self._timeout:g} s"))
                continue
            try:
                alone.append((place, worker.call(_request(self._served.get(function, function), [samples[place]]))[0]))
                hung = 0
            except CallFailed as failure:
                alone.append((place, str(failure)))
                hung, failed = hung + 1 if failure.hung else 0, failed + 1
        if not failed:
            failures.of_calls.append((len(chunk), why))
        return alone

    def close(self) -> None:
        """Ends the processes; nothing is scored afterwards."""
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _scores(samples: Sequence[Sample], rewards: NDArray[np.float64], failures: Sequence[Failures]) -> Scores:
    return Scores(rewards=rewards, problems=tuple(sentence for one in failures for sentence in one.sentences(samples)))


def _request(function: int, samples: Sequence[Sample]) -> dict[str, Any]:
    columns = samples[0].columns
    return {
        "function": function,
        "prompts": [one.prompt for one in samples],
        "completions": [one.completion for one in samples],
        "completion_ids": [list(one.completion_ids) for one in samples],
        "columns": {name: [one.columns[name] for one in samples] for name in columns},
    }
