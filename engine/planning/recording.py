"""Records the storages that operations allocate and free while the engine's own code runs on the meta device.

Tensors on the meta device have shapes, dtypes and storages, and no numbers. Running a layer on them allocates and frees
every storage in the order of a real step, in milliseconds whatever its size. Recorded are the allocations that torch
sees: the results of operations, not their internal buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.planning.ledger import LOGITS, PARTS, TEMPORARY, Parts
from engine.planning.meta_results import result_on_meta


@dataclass(frozen=True, slots=True)
class Event:
    """One allocation or release of a storage.

    Args:
        storage: its number.
        nbytes: negative where it is freed.
    """

    storage: int
    nbytes: int


class EagerMode(TorchDispatchMode):
    """A mode that sees eager operations alone, as all of the engine's are."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from wrapping the mode for its compiler, whose import takes seconds."""
        return False


class Recording(EagerMode):
    """Records the storages that operations allocate inside its block, autograd functions included.

    Attributes:
        events: in their order.
        parts: the part that each storage counts to.
        widths: columns of the matrices that are logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.parts: list[str] = []
        self.widths: frozenset[int] = frozenset()
        self._alive: dict[int, Event] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = result_on_meta(func, args, kwargs or {})
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self._see(value)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        event = Event(len(self.parts), storage.nbytes())
        self._alive[key] = event
        is_logits = tensor.dim() == 2 and tensor.shape[1] in self.widths
        self.parts.append(LOGITS if is_logits else TEMPORARY)
        self.events.append(event)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        event = self._alive.pop(key)
        self.events.append(Event(event.storage, -event.nbytes))

    def number(self, tensor: Tensor) -> int:
        """Returns the number of the storage behind a tensor that was allocated here."""
        return self._alive[tensor.untyped_storage()._cdata].storage

    def name(self, storages: Iterable[int], part: str) -> None:
        """Names the part that storages count to, for their whole lifetime."""
        for storage in storages:
            if self.parts[storage] == TEMPORARY:
                self.parts[storage] = part

    def alive(self) -> frozenset[int]:
        """Returns the storages that are allocated now."""
        return frozenset(event.storage for event in self._alive.values())

    def held(self, storages: Collection[int]) -> Parts:
        """Returns the bytes of those of `storages` that are allocated now, by part."""
        held: dict[str, int] = {}
        for event in self._alive.values():
            if event.storage in storages:
                part = self.parts[event.storage]
                held[part] = held.get(part, 0) + event.nbytes
        return held

    def peak(self, first: int, pinned: Collection[int] = ()) -> Parts:
        """Returns the peak from the event `first` on, beside earlier allocations, by purpose.

        Args:
            pinned: storages that count as never freed.
        """
        held, total, most, fullest = dict.fromkeys(PARTS, 0), 0, 0, {}
        for event in self.events[first:]:
            if event.nbytes < 0 and event.storage in pinned:
                continue
            held[self.parts[event.storage]] += event.nbytes
            total += event.nbytes
            if total > most:
                most, fullest = total, dict(held)
        return {part: nbytes for part, nbytes in fullest.items() if nbytes}
