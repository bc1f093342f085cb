"""Finds in an interpreted launch what a GPU's memory and race checkers would: an address outside its tensors, and one
that a program writes and another reads or writes.

The interpreter runs programs one after the other and looks at no address, so that a store beyond a tensor's end may be
overwritten by the next program, or be memory that nobody looks at. A GPU runs programs in any order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_Program = tuple[int, int, int]
_Access = tuple[int, np.ndarray]
"""The number of the storage that all addresses are in, or `_SEVERAL`; and the addresses."""
_SEVERAL = -1


class Accesses:
    """The memory of a launch: where its tensors lie, and what each program reads and writes.

    Args:
        kernel: its name, for messages.
        arguments: of the launch.
    """

    def __init__(self, kernel: str, arguments: Iterable[object]) -> None:
        self._kernel = kernel
        storages = [tensor.untyped_storage() for tensor in _tensors(arguments)]
        bounds = sorted({(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages if one.nbytes() > 0})
        self._starts, self._ends = np.array(bounds or [(0, 0)], dtype=np.uint64).T
        self._read: dict[_Program, list[_Access]] = defaultdict(list)
        self._written: dict[_Program, list[_Access]] = defaultdict(list)

    def note(self, program: _Program, pointers: TensorHandle, mask: TensorHandle, *, writes: bool) -> None:
        """Raises AssertionError where an access that is not masked lies outside."""
        addresses = pointers.data[mask.data.astype(bool)]
        if addresses.size == 0:
            return
        size = np.uint64(max(pointers.get_element_ty().primitive_bitwidth // 8, 1))
        storage = int(self._storages(addresses.min()))
        if storage < 0 or addresses.max() + size > self._ends[storage]:
            storages = self._storages(addresses)
            outside = (storages < 0) | (addresses + size > self._ends[storages])
            verb = "writes" if writes else "reads"
            assert not outside.any(), f"{self._kernel} {verb} outside its tensors at {int(outside.sum())} places"
            storage = _SEVERAL
        (self._written if writes else self._read)[program].append((storage, addresses))

    def _storages(self, addresses: np.ndarray | np.uint64) -> np.ndarray:
        """Returns the number of the last storage that begins before each address, -1 where none does."""
        return np.searchsorted(self._starts, addresses, side="right") - 1

    def assert_programs_agree(self) -> None:
        """Raises AssertionError where a program writes what another one reads or writes."""
        if not self._written:
            return
        parts = [np.unique(np.concatenate([one for _, one in accesses])) for accesses in self._written.values()]
        addresses = np.concatenate(parts)
        order = np.argsort(addresses, kind="stable")
        addresses = addresses[order]
        twice = addresses[1:] == addresses[:-1]
        assert not twice.any(), f"{self._kernel}: two programs write {int(twice.sum())} of the same places"
        owner = np.repeat(np.arange(len(parts)), [part.size for part in parts])[order]
        numbers = {program: number for number, program in enumerate(self._written)}
        storages = {storage for accesses in self._written.values() for storage, _ in accesses}
        for program, accesses in self._read.items():
            for storage, read in accesses:
                if storage != _SEVERAL and not {storage, _SEVERAL} & storages:
                    continue  # nobody writes there
                place = np.minimum(np.searchsorted(addresses, read), addresses.size - 1)
                others = (addresses[place] == read) & (owner[place] != numbers.get(program, -1))
                found = np.unique(read[others]).size
                assert found == 0, f"{self._kernel}: a program reads {found} places that another writes"


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


class MemoryChecks:
    """Watches the launches of a test, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._current: Accesses | None = None
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def checked_load(builder: Any, pointers: TensorHandle, mask: TensorHandle, *rest: Any) -> TensorHandle:
            if self._current is not None:
                self._current.note(builder.grid_idx, pointers, mask, writes=False)
            return load(builder, pointers, mask, *rest)

        def checked_store(builder: Any, pointers: TensorHandle, value: Any, mask: TensorHandle, *rest: Any) -> None:
            if self._current is not None:
                self._current.note(builder.grid_idx, pointers, mask, writes=True)
            store(builder, pointers, value, mask, *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)

    def watch(self, kernel: str, arguments: Iterable[object], launch: Callable[[], None]) -> None:
        """Launches, and fails as `Accesses` says."""
        self._current = Accesses(kernel, arguments)
        try:
            launch()
            self._current.assert_programs_agree()
        finally:
            self._current = None
