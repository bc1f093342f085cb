"""The conversations of one copy of the model while it samples their turns: which of them it can continue.

One of the copy's ranks leads: it has the conversations and the processes of their environments, and tells the others
which tokens follow. A conversation that waits for its environment has no slot; its keys and values stay in the cache
until it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from engine.distributed.collectives import gather_objects
from engine.distributed.mesh import Mesh
from engine.distributed.operations import LOG
from engine.inference.rows import Answer, Request
from engine.rollouts.sampler import Conversing, Sampled

_WAIT_SECONDS = 0.2
"""Seconds for which ranks wait in one exchange, where there is nothing to compute."""
_PASSES = 8
"""Passes between two exchanges while there are rows to compute, where the copy has several ranks."""


class _Next(NamedTuple):
    """The step that followed an answer.

    Args:
        row: number of the conversation in the run.
        ids: that the model continues; None where the conversation has ended.
        room: the most tokens of its next turn.
        defect: an exception that is none of the environment's.
        noise: see `Conversing`.
    """

    row: int
    ids: tuple[int, ...] | None
    room: int = 0
    defect: BaseException | None = None
    noise: int = 0


class TurnFeed:
    """See `engine.inference.generate.Further`. To be closed.

    Args:
        conversations: by their rows in the run, in their order; None on ranks that do not lead.
        count: of those that begin here; 0 where the first prompts of all are known and given to the generation itself.
        mesh: of the ranks.
        seats: conversations with an environment at a time; the calls of tools at a time where there is none.
    """

    def __init__(self, conversations: dict[int, Conversing] | None, count: int, mesh: Mesh, seats: int) -> None:
        self._conversations, self._mesh = conversations, mesh
        self._waiting, self._passes = count, 0
        self._ended: list[int] = []
        self._found: SimpleQueue[_Next] = SimpleQueue()
        self._pools: list[ThreadPoolExecutor] = []
        if conversations is not None:
            # those that begin may wait for a seat, which those under way must not wait behind
            self._pools = [ThreadPoolExecutor(seats, thread_name_prefix=name) for name in ("begin", "turn")]
            for row in conversations if count else ():
                self._submit(0, row, self._begun)

    @property
    def pending(self) -> bool:
        return self._waiting > 0

    def answered(self, answer: Answer) -> None:
        self._waiting += 1
        if self._conversations is not None:
            tokens, logps = list(answer.ids), list(answer.logps)
            self._submit(1, answer.request.row, lambda row: self._continued(row, tokens, logps))

    def arrived(self, *, wait: bool) -> list[Request]:
        several = self._mesh.tp.size * self._mesh.pp.size > 1
        self._passes += 1
        if several and not wait and self._passes % _PASSES:
            return []
        found: list[_Next] = self._shared(None if self._conversations is None else self._taken(wait))
        LOG.progressed()
        self._waiting -= len(found)
        self._ended = [one.row for one in found if one.ids is None]
        return [
            Request(row=one.row, ids=one.ids, max_new=one.room, noise=one.noise) for one in found if one.ids is not None
        ]

    def ended(self) -> list[int]:
        ended, self._ended = self._ended, []
        return ended

    def sampled(self) -> list[Sampled]:
        """Returns all completions of the copy, on all its ranks, when none is pending."""
        own = self._conversations
        found: list[Sampled] = self._shared(None if own is None else [one.sampled() for one in own.values()])
        return found

    def close(self) -> None:
        """Lets go of the threads."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def _taken(self, wait: bool) -> list[_Next]:
        """Returns what has followed since this was last called; waits a while for a first one, where asked to."""
        found: list[_Next] = []
        begin = time.monotonic()
        while True:
            try:
                left = _WAIT_SECONDS - (time.monotonic() - begin)
                waits = wait and not found and left > 0
                found.append(self._found.get(timeout=left) if waits else self._found.get(block=False))
            except Empty:
                break
        for one in found:
            if one.defect is not None:
                raise one.defect
        return sorted(found, key=lambda one: one.row)

    def _submit(self, pool: int, row: int, call: Callable[[int], _Next]) -> None:
        def run() -> None:
            try:
                self._found.put(call(row))
            except BaseException as error:  # raised again by the thread that samples
                self._found.put(_Next(row, None, defect=error))

        self._pools[pool].submit(run)

    def _begun(self, row: int) -> _Next:
        one = self._of(row)
        one.begin()
        return _Next(row, one.ids, one.room, noise=one.noise)

    def _continued(self, row: int, tokens: Sequence[int], logps: Sequence[float]) -> _Next:
        one = self._of(row)
        if not one.take(tokens, logps):
            return _Next(row, None)
        return _Next(row, one.ids, one.room, noise=one.noise)

    def _of(self, row: int) -> Conversing:
        assert self._conversations is not None
        return self._conversations[row]

    def _shared(self, value: Any) -> Any:
        """Returns the value of the rank that leads, on all ranks of the copy."""
        for axis in (self._mesh.tp, self._mesh.pp):
            value = gather_objects(value, axis)[0]
        return value


def leads(mesh: Mesh) -> bool:
    """Returns whether this rank has the conversations of its copy of the model."""
    return mesh.tp.rank == 0 and mesh.pp.rank == 0
