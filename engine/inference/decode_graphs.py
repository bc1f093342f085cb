"""Decode passes as graphs: for a token of each row the host launches one graph, and not all of a pass's kernels.

On a GPU they are CUDA graphs, on a CPU lists of recorded calls (engine.layers.recorded_calls).

A graph repeats launches with the arguments of its capture. So a pass has a shape, the rows that it computes and the
most tokens that it has room for in each, and all that changes from pass to pass lies in tensors with fixed addresses:
the newest tokens, which the pass itself leaves there, the pages of each row, and one small tensor that the host sends
before each pass (`PassInputs`). Rows that have ended, or are not there yet, are computed too; their tokens go to a page
of no row and are not read.

Pages of a row that begins or moves are sent as a whole; of one that continues, the page of the new token is among the
inputs of the pass, which enters it. Copies of shared pages are a graph of their own, which most passes do not need.

Graphs live as long as the cache that they write to. Weights may change in place meanwhile, as a graph reads them where
they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from engine.choices import DecodeGraph
from engine.inference.key_value_cache import WRITTEN, KeyValues, NextPass, copies_pages
from engine.layers.graph_capture import Capture, Captured, CudaCapture, Replayable
from engine.layers.host_copies import HostCopy, send_into
from engine.layers.recorded_calls import CallCapture

SHORTEST = 1024
"""Tokens of a row that any pass has room for."""
WARMUP_PASSES = 2
"""Passes of each shape before its capture by CUDA: they compile and load kernels, and make communicators and
workspaces."""


def decode_capture(choice: DecodeGraph, device: torch.device) -> Capture | None:
    """Returns the way to capture decode passes on a device; None where each kernel is to be launched by itself."""
    if choice != "auto":
        return None
    return CudaCapture(device) if device.type == "cuda" else CallCapture()


class PassInputs(NamedTuple):
    """What a decode pass is given beside the newest tokens; of N rows, those that only fill up the pass last.

    Args:
        rotations_N: int64, positions for rotary embeddings.
        rows_N: int64, numbers of the rows in the run, coordinates of their random numbers.
        places_N: int64, place in the row of the token that is chosen; another one.
        written: int64 [tables, 5, N], what `KeyValues.write` returned.
    """

    rotations_N: Tensor
    rows_N: Tensor
    places_N: Tensor
    written: Tensor

    @classmethod
    def of(cls, packed: Tensor) -> Self:
        """Returns the views of a packed tensor."""
        rotations, rows, places = packed[:3]
        return cls(rotations, rows, places, _written(packed))


def packed_inputs(
    rotations: Sequence[int], rows: Sequence[int], places: Sequence[int], written: np.ndarray
) -> np.ndarray:
    """Returns int64 [3 + 5 x tables, N], `PassInputs` of a pass in one array; zeros in the rows that fill it up."""
    width = written.shape[2]
    packed = np.zeros((3 + WRITTEN * len(written), width), dtype=np.int64)
    packed[:3, : len(rows)] = rotations, rows, places
    packed[3:] = written.reshape(-1, width)
    return packed


def pass_widths(slots: int, multiple: int, *, halfway: bool = False) -> list[int]:
    """Returns the numbers of rows that passes are filled up to, ascending: powers of two and all slots, each rounded up
    to a multiple.

    Args:
        halfway: numbers halfway between two powers of two too, for a device on which rows that fill up take their time.
    """
    powers = [2**power for power in range(slots.bit_length())]
    sizes = {*powers, *(power * 3 // 2 for power in powers if halfway), slots}
    return sorted({-(-size // multiple) * multiple for size in sizes if size <= slots})


def _written(packed: Any) -> Any:
    """Returns `PassInputs.written` of packed inputs, of the host or the device."""
    return packed[3:].reshape(-1, WRITTEN, packed.shape[1])


Prepare = Callable[[PassInputs, Tensor], Callable[[NextPass], Tensor]]
"""Given the static inputs of passes of one shape, and int64 [N] newest tokens, returns what computes such a pass: it
takes the cache as the pass sees it, puts the next tokens in the place of the newest, and returns what `Chosen` takes.
"""


class _Graph:
    """A function that runs a few times as it is, and then as a graph.

    Args:
        function: on static tensors.
        warmup: the times that it runs as it is.
    """

    def __init__(self, function: Captured, warmup: int) -> None:
        self._function = function
        self._graph: Replayable | None = None
        self._warmup = warmup

    def launch(self, capture: Capture, pool: Any) -> tuple[Tensor, ...]:
        """Runs it; the next launch may overwrite what it returns."""
        if self._warmup:
            self._warmup -= 1
            return self._function()
        if self._graph is None:
            self._graph = capture.capture(self._function, pool)
        self._graph.replay()
        return self._graph.outputs


class _Shape(NamedTuple):
    """The passes of one shape.

    Args:
        packed: their inputs.
        pass_, copies: the pass, and copies of pages before it.
    """

    packed: Tensor
    pass_: _Graph
    copies: _Graph


class DecodeGraphs:
    """The decode passes of one cache.

    Args:
        cache: of the rows.
        capture: the way to capture.
        widths: see `pass_widths`.
        last_W: int64, the newest token of the row in each slot, for as many rows as the widest pass has.
    """

    def __init__(self, cache: KeyValues, capture: Capture, *, widths: Sequence[int], last_W: Tensor) -> None:
        self._cache, self._capture, self._widths = cache, capture, widths
        self._last_W, self._pool = last_W, capture.new_pool()
        self._tables = {
            capacity: torch.zeros((widths[-1], table.table.shape[1]), dtype=torch.int32, device=last_W.device)
            for capacity, table in cache.tables.items()
        }
        self._by_shape: dict[tuple[int, int, bool], _Shape] = {}

    def width(self, count: int) -> int:
        """Returns the width of a pass of `count` rows."""
        return next(width for width in self._widths if width >= count)

    def launch(self, packed: np.ndarray, prepare: Prepare, *, adapters: bool) -> HostCopy:
        """Launches a pass.

        Args:
            packed: of `packed_inputs`, as wide as `width` says.
            prepare: computes passes; what it returns is kept as long as the graphs, itself is not.
            adapters: whether the pass computes them; such passes have graphs of their own.

        Returns:
            The pass's result, on its way to the host.
        """
        longest = max(SHORTEST, 1 << (int(packed[2].max()) - 1).bit_length())
        key = packed.shape[1], longest, adapters
        one = self._by_shape.get(key)
        if one is None:
            one = self._by_shape[key] = self._made(packed, prepare, longest)
        with self._capture.running():
            for capacity, table in self._cache.tables.items():
                if table.changed:  # rows between them are sent too
                    slots = slice(min(table.changed), max(table.changed) + 1)
                    send_into(self._tables[capacity][slots], torch.from_numpy(table.table[slots]))
                    table.changed.clear()
            send_into(one.packed, torch.from_numpy(packed))
            if copies_pages(_written(packed)):
                one.copies.launch(self._capture, self._pool)
            return HostCopy(*one.pass_.launch(self._capture, self._pool))  # before the next one overwrites it

    def _made(self, packed: np.ndarray, prepare: Prepare, longest: int) -> _Shape:
        """Makes the static tensors of a shape."""
        width, cache = packed.shape[1], self._cache
        on_device = torch.zeros(packed.shape, dtype=torch.int64, device=self._last_W.device)
        inputs = PassInputs.of(on_device)
        run = prepare(inputs, self._last_W[:width])
        tables = {capacity: table[:width] for capacity, table in self._tables.items()}

        def compute() -> tuple[Tensor, ...]:
            num_rows = min(width, cache.slots)
            return (run(cache.static_pass(tables, inputs.written, num_rows, longest=longest)),)

        def copy() -> tuple[Tensor, ...]:
            cache.copy_pages(inputs.written)
            return ()

        warmup = 0 if isinstance(self._capture, CallCapture) else WARMUP_PASSES
        return _Shape(on_device, _Graph(compute, warmup), _Graph(copy, warmup))
