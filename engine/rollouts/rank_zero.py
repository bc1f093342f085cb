"""Work that rank 0 does alone, and whose result all ranks get.

The other ranks wait in broadcasts of a few seconds each, so that the work may outlast a collective's timeout.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, cast

from engine.config.run import RunConfig
from engine.distributed.collectives import broadcast_object
from engine.distributed.operations import LOG
from engine.errors import UserError

_BEAT_SECONDS = 5.0
"""Maximum seconds of a broadcast in which ranks wait, which is also at most a quarter of train.collective_timeout."""
_Result = TypeVar("_Result", covariant=True)


class Work(Protocol[_Result]):
    """Work that rank 0 has begun."""

    def wait(self, seconds: float) -> bool: ...

    def result(self) -> _Result: ...


def broadcast_result(work: Work[Any] | None, config: RunConfig) -> Any:
    """Returns the result of rank 0's work on all ranks. Collective.

    Args:
        work: on rank 0; None on the others.
        config: of the run.

    Raises:
        UserError: it failed; on all ranks.
    """
    beat = min(_BEAT_SECONDS, config.train.collective_timeout / 4)
    found: tuple[Any, str | None] | None = None
    while found is None:
        if work is not None and work.wait(beat):
            try:
                found = work.result(), None
            except UserError as error:
                found = None, str(error)
        found = cast(tuple[Any, str | None] | None, broadcast_object(found))
        LOG.progressed()
    result, problem = found
    if problem is not None:
        raise UserError(problem)
    return result
