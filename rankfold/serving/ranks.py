"""What the ranks of a server tell each other beside their passes. Rank 0 has the client's commands and the files.

All ranks execute the same commands in the same order. What a rank could decide otherwise than another, such as what a
disk or a clock says, rank 0 decides for all.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from engine.distributed.failures import communicating
from engine.errors import UserError
from engine.files.refusals import FileError, sentence_of

_TIMEOUT_SECONDS = 600.0
BEAT_SECONDS = 20.0
"""Rank 0 tells the others something at least as often, so that none waits in vain for one that is gone."""
_Result = TypeVar("_Result")


class Ranks:
    """All ranks of a server, as this one sees them. Collective.

    Args:
        rank: this one.
        size: how many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._group: dist.ProcessGroup | None = None
        if size > 1:
            with communicating("making the group of commands"):
                self._group = dist.new_group(
                    backend="gloo", timeout=timedelta(seconds=_TIMEOUT_SECONDS), group_desc="commands"
                )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def told(self, value: Any) -> Any:
        """Returns rank 0's value on all ranks. Collective."""
        if self.size == 1:
            return value
        box = [value]
        with communicating("broadcast of a command"):
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        """Returns all ranks' values, in their order, on rank 0, and nothing elsewhere. Collective."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.is_first else None
        with communicating("gathering results"):
            dist.gather_object(value, found, dst=0, group=self._group)
        return found or []

    def decided(self, work: Callable[[], _Result]) -> _Result:
        """Returns on all ranks what a function returns on rank 0, where alone it is called. Collective.

        Raises:
            UserError: it raised one, or the system an error about a file; on all ranks.
        """
        found, problem = None, None
        if self.is_first:
            try:
                found = work()
            except UserError as error:
                problem = error
            except OSError as error:
                if (sentence := sentence_of(error)) is None:
                    raise
                problem = FileError(sentence)
        kind = None if problem is None else type(problem) if type(problem) is FileError else UserError
        result, kind, sentence = self.told((found, kind, str(problem)))
        if problem is not None:
            raise problem
        if kind is not None:
            raise kind(sentence)
        return result  # type: ignore[no-any-return]
