"""A rank that died or hangs, as the others see it: one exception that names the peer and the operation.

The backends report a lost rank as a RuntimeError among others, with the address of a socket. An error that says that
contact was lost becomes a `CommunicationError`; anything else, such as sizes that do not fit, is a defect and stays as
it is. With Gloo the error comes out of a start or a wait. With NCCL a wait does not block: a communicator that was
aborted is found at the next start, and a hanging operation is ended by NCCL's watchdog, which prints the group's name
and ends the process. Nothing here costs anything until something fails.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist

_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "application timeout caused pair closure",  # Gloo, after another operation of the pair has timed out
    "communicator was aborted",  # NCCL from here on
    "remote process exited or there was a network error",
)
_TIMED_OUT = ("timed out", "timeout")


class CommunicationError(RuntimeError):
    """A rank that this one waited for is gone or does not answer; the message is a clause without a full stop.

    Args:
        message: the peer, the operation, the axis, and the backend's message.
        timed_out: whether there was no answer in time; else the other side has ended.
    """

    def __init__(self, message: str, *, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


def raise_if_lost(
    error: RuntimeError,
    operation: str,
    *,
    axis: str | None = None,
    group: dist.ProcessGroup | None = None,
    peer: int | None = None,
) -> None:
    """Raises `CommunicationError` where a backend's `error`, just caught, says that contact was lost; else returns.

    Args:
        operation: such as all_reduce.
        axis: its axis; None for all ranks.
        group: the ranks that take part; None for all.
        peer: the one of the group at the other end of a send or a receive.

    Raises:
        CommunicationError: contact was lost.
    """
    text = str(error).lower()
    timed_out = any(words in text for words in _TIMED_OUT)
    is_store = isinstance(error, (dist.DistNetworkError, dist.DistStoreError))
    if not (timed_out or is_store or any(words in text for words in _LOST)):
        return
    where = f" on axis {axis}" if axis else ""
    message = f"{_who(group, peer)} in {operation}{where}{_caller()} ({_first_sentence(str(error))})"
    raise CommunicationError(message, timed_out=timed_out) from error


@contextmanager
def communicating(operation: str, *, axis: str | None = None, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Calls `raise_if_lost` on errors inside; for use outside the step, where a `with` may cost something."""
    try:
        yield
    except RuntimeError as error:
        raise_if_lost(error, operation, axis=axis, group=group)
        raise


def _who(group: dist.ProcessGroup | None, peer: int | None) -> str:
    """ "rank 0 lost rank 1", with the ranks' numbers in the whole run."""
    if not dist.is_initialized():
        return "this rank did not find the others"
    rank = dist.get_rank()
    if peer is not None:
        others = [dist.get_process_group_ranks(group)[peer]]
    else:
        others = [other for other in dist.get_process_group_ranks(group) if other != rank]
    if len(others) == 1:
        return f"rank {rank} lost rank {others[0]}"
    return f"rank {rank} lost one of ranks {_ranges(others)}"


def _ranges(ranks: list[int]) -> str:
    """[0, 2, 3, 4] -> "0, 2 to 4"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _caller() -> str:
    """Returns the function of the engine that started the operation; empty where a test or a tool did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("engine.") and not module.startswith("engine.distributed."):
            return f" for {module}.{frame.f_code.co_qualname.partition('.<locals>')[0]}"
        frame = frame.f_back
    return ""


def _first_sentence(text: str) -> str:
    """Returns the backend's message without its source location and its advice."""
    words = re.sub(r"^\[[^\]]*\]\s*", "", " ".join(text.split()))
    return re.split(r"\.\s", words, maxsplit=1)[0].rstrip(".")
