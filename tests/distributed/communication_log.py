"""What a rank does, in program order: collectives as they start and are waited for, and torch's operations between.

Nothing starts on the wire before its start here, and nothing runs while a rank waits, so an operation that stands
between the two is one that the communication has time to travel behind. How much of it that is, no log can say.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from engine.distributed.collectives import Handle

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_"})
ARITHMETIC = PRODUCTS | {"mul", "mul_", "add", "add_", "silu", "sigmoid", "exp", "rsqrt", "pow", "sum"}


@dataclass(kw_only=True)
class Communication:
    """A collective or transfer from its start to its wait.

    Args:
        operation, axis: as in an error's sentence.
        caller: the function that it is for, as module.function, engine.distributed left out.
        between: operations of torch in between, with their number.
        waited: whether somebody waited; a send that had left meanwhile is dropped.
    """

    operation: str
    axis: str
    caller: str
    between: Counter[str] = field(default_factory=Counter)
    waited: bool = False

    def count(self, operations: frozenset[str]) -> int:
        return sum(self.between[name] for name in operations)


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Communication] = []
        self.under_way: dict[int, Communication] = {}
        self.works: list[Any] = []
        """Kept, so that no two have one id."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for communication in self.under_way.values():
            communication.between[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def start(self, part: Any) -> None:
        work, operation, axis, *_ = part
        if any(work is known for known in self.works):  # one handle made of two
            return
        self.works.append(work)
        communication = Communication(operation=operation, axis=axis.name, caller=_caller())
        self.found.append(communication)
        self.under_way[id(work)] = communication

    def wait(self, part: Any) -> None:
        communication = self.under_way.pop(id(part[0]), None)
        if communication is not None:
            communication.waited = True


def _caller() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals["__name__"]
        if module.startswith("engine.") and not module.startswith("engine.distributed."):
            return f"{module.removeprefix('engine.')}.{frame.f_code.co_qualname.partition('.<locals>')[0]}"
        frame = frame.f_back
    return ""


@contextmanager
def communication_log() -> Iterator[list[Communication]]:
    """Records what this thread does; for a process of its own, whose handles it watches."""
    log = _Log()
    make, wait = Handle.__init__, Handle.wait

    def watched_make(self: Handle, *parts: Any) -> None:
        make(self, *parts)
        for part in parts:
            log.start(part)

    def watched_wait(self: Handle) -> None:
        for part in self._parts:
            log.wait(part)
        wait(self)

    with mock.patch.object(Handle, "__init__", watched_make), mock.patch.object(Handle, "wait", watched_wait), log:
        yield log.found
