"""Several servers of completions as one: each has every adapter, and groups of completions are dealt out in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from engine.config.rollout import RolloutOptions
from engine.rollouts.servers.dialects import Answer, Question, SamplingSettings
from engine.rollouts.servers.server import Asked, CompletionServer, Shown

_Made = TypeVar("_Made")


class CompletionServers:
    """The servers of a run. The calls are those of `CompletionServer`, which has their docstrings; a call that fails on
    one server fails.

    Args:
        options: rollout.server and the options that go with it.
        vocabulary: entries of the trained model's.
        key: that the servers ask for; None for none.
    """

    def __init__(self, options: RolloutOptions, *, vocabulary: int, key: str | None) -> None:
        self._servers = [CompletionServer(url, options, vocabulary=vocabulary, key=key) for url in options.servers]
        self._group = options.num_generations

    def check(self, shown: Shown, settings: SamplingSettings) -> list[str]:
        return [note for notes in self._each(lambda one: one.check(shown, settings)) for note in notes]

    def without_routes(self, shown: Shown, settings: SamplingSettings) -> list[str]:
        """Returns the addresses of the servers that do not say which experts they chose; see
        `CompletionServer.gives_routes`."""
        return [one.url for one in self._servers if not one.gives_routes(shown, settings)]

    def unload_all(self, prefix: str) -> None:
        self._each(lambda one: one.unload_all(prefix))

    def load(self, adapter: str, folder: str) -> None:
        self._each(lambda one: one.load(adapter, folder))

    def unload(self, adapter: str) -> None:
        self._each(lambda one: one.unload(adapter))

    def ask(self, adapter: str, questions: Sequence[Question], settings: SamplingSettings) -> Asked[Answer]:
        """Begins to sample completions, as many at a time on each server as rollout.slots says. All of a group go to
        one server, which then runs their prompt once."""
        count, answers = len(self._servers), dict[int, Future[Answer]]()
        for number, server in enumerate(self._servers):
            places = [place for place in range(len(questions)) if place // self._group % count == number]
            asked = server.ask(adapter, [questions[place] for place in places], settings)
            answers |= dict(zip(places, asked.answers, strict=True))
        return Asked([answers[place] for place in range(len(questions))])

    def sample(self, adapter: str, place: int, question: Question, settings: SamplingSettings) -> Answer:
        """Samples one completion, when the server has room for it.

        Args:
            place: of the completion in its generation batch, by which groups are dealt out.
        """
        server = self._servers[place // self._group % len(self._servers)]
        return server.ask(adapter, [question], settings).result()[0]

    def ask_logps(self, adapter: str | None, rows: Sequence[Sequence[int]]) -> Asked[list[float] | None]:
        """Begins to ask each server for the same log-probabilities; those of the first server come first."""
        return Asked([answer for one in self._servers for answer in one.ask_logps(adapter, rows).answers])

    def close(self) -> None:
        for one in self._servers:
            one.close()

    def _each(self, call: Callable[[CompletionServer], _Made]) -> list[_Made]:
        """Calls all servers at once; returns the results, or raises the error of the first of them, in their order."""
        with ThreadPoolExecutor(len(self._servers), thread_name_prefix="servers") as pool:
            outcomes = [pool.submit(call, one) for one in self._servers]
            wait(outcomes)
        return [outcome.result() for outcome in outcomes]
