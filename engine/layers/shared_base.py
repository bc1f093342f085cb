"""The memory of a frozen base that several models read, each with adapters, masters and moments of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Storage = TypeVar("Storage")


class FrozenStorages:
    """The storages of one part of the base.

    The first model makes them; each later one of the same layers and layout is given the same, in the order in which
    its layers ask.
    """

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._next: int | None = None

    def begin(self) -> None:
        """Begins a model: after the first, its storages are those of the first."""
        if self._made:
            assert self._next in (None, len(self._made)), "the model before this one has other layers"
            self._next = 0

    def take(self, make: Callable[[], Storage]) -> Storage:
        """Returns what `make` returned in the first model."""
        if self._next is None:
            self._made.append(make())
            return self._made[-1]  # type: ignore[no-any-return]
        self._next += 1
        return self._made[self._next - 1]  # type: ignore[no-any-return]


class SharedBase:
    """The base that several models of one layout read on this rank."""

    def __init__(self) -> None:
        self._parts: dict[int, FrozenStorages] = {}
        self.is_filled = False
        """Whether the weights have been read, which the first model does."""

    def begin(self, stage: int) -> FrozenStorages:
        """Begins a model's part of this stage, and returns its storages."""
        storages = self._parts.setdefault(stage, FrozenStorages())
        storages.begin()
        return storages
