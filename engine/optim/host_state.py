"""Optimizer state in host memory: streamed to the device a piece at a time, and updated there.

A piece is a range of the masters. Its masters and two moments are fetched into one of two slots, the backend updates
them with the gradient, which is on the device, the new weights are rounded from the slot, and all three are copied
back, while the other slot's piece is fetched or updated. The arithmetic of each element is that of an update without
offload, so the bits are the same, and the host never waits for the device: an update on the CPU would have to wait for
the gradient and for the clip factor, which depends on all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.layers.host_copies import HostMemory
from engine.optim.backends import AdamWState, OptimizerBackend, Update
from engine.optim.flat import FlatParameters, Span
from engine.optim.flat_layout import ALIGNMENT
from engine.optim.publish import runs_of

NUM_SLOTS = 2
"""While a piece is updated, the one before it is copied back and the one after it is fetched."""
PIECE_ELEMENTS = 1 << 22
"""48 MiB of state."""
NUM_STATES = 3
"""States kept for each parameter: the fp32 master and two moments."""


class _Piece:
    """Elements [start, stop) of the masters, all of one span, as a backend updates them in a slot.

    Args:
        span: the span that it is cut from.
        slot: fp32 [NUM_STATES, elements] on the device.
        targets: the weights that its masters are rounded into, each with the place of its first element among them.
    """

    is_sharded = True  # it is not cut by parameters

    def __init__(self, span: Span, start: int, stop: int, slot: Tensor, targets: Iterable[tuple[int, Tensor]]) -> None:
        self.start, self.stop = start, stop
        self.gradient = span.gradient[start - span.start : stop - span.start]
        self.here = [state[: stop - start] for state in slot]
        self.master = self.here[0]
        self.spans = (replace(span, start=0, stop=stop - start, gradient=self.gradient),)
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        for first, target in targets:
            self._targets.append(target)
            self._sources.append(self.master[first : first + target.numel()].view(target.shape))
        self.update: Update
        self.sent: Any = None
        """The event after which it was last complete in host memory."""

    def publish_async(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


class StreamedUpdate:
    """A backend's update of state that is kept in host memory.

    Args:
        state: `flat`, `exp_avg` and `exp_avg_sq` in host memory, the rest on the device.
        backend: updates each piece.
        elements: of a piece, at most.
    """

    def __init__(self, state: AdamWState, backend: OptimizerBackend, *, elements: int) -> None:
        flat = state.flat
        assert isinstance(flat, FlatParameters) and flat.host is not None
        self._flat: FlatParameters = flat
        self._memory: HostMemory = flat.host
        self._states = [flat.master, state.exp_avg, state.exp_avg_sq]
        elements = min(_aligned(elements), max((span.stop - span.start for span in flat.spans), default=0))
        self.slots = [flat.gradient.new_zeros((NUM_STATES, elements)) for _ in range(NUM_SLOTS)]
        self._pieces: list[_Piece] = []
        for span in flat.spans:
            for start in range(span.start, span.stop, elements):
                stop = min(start + elements, span.stop)
                slot = self.slots[len(self._pieces) % NUM_SLOTS]
                piece = _Piece(span, start, stop, slot, _targets(flat, start, stop))
                piece.update = backend.bind(
                    replace(state, flat=piece, exp_avg=piece.here[1], exp_avg_sq=piece.here[2]),
                )
                self._pieces.append(piece)

    def __call__(self) -> None:
        fetched = self._fetch(0)
        for place, piece in enumerate(self._pieces):
            current, fetched = fetched, self._fetch(place + 1)
            self._memory.wait(current)
            piece.update()
            piece.sent = self._memory.send(self._places(piece), piece.here)
        flat = self._flat
        if flat.is_sharded:
            flat.publish_async()
        if flat.gradient.numel() > flat.master.numel():
            flat.gradient.zero_()  # the other ranks' parts

    def _places(self, piece: _Piece) -> list[Tensor]:
        return [state[piece.start : piece.stop] for state in self._states]

    def _fetch(self, place: int) -> Any:
        """Starts copying a piece into its slot, once the slot's piece before it, and its own last update, are copied
        back."""
        if place >= len(self._pieces):
            return None
        piece = self._pieces[place]
        before = self._pieces[place - NUM_SLOTS].sent if place >= NUM_SLOTS else None
        return self._memory.fetch(piece.here, self._places(piece), after=(before, piece.sent, *self._last_sent(place)))

    def _last_sent(self, place: int) -> Iterator[Any]:
        """Yields, for the first pieces, the copies of the last step's last pieces, which used the same slots."""
        if place < NUM_SLOTS:
            yield from (piece.sent for piece in self._pieces[-NUM_SLOTS:])


def device_bytes(elements: int, piece: int = PIECE_ELEMENTS) -> int:
    """Returns the device bytes that offloaded masters and moments of `elements` take: the slots."""
    return NUM_SLOTS * NUM_STATES * 4 * min(_aligned(piece), elements)


def _aligned(elements: int) -> int:
    return max(ALIGNMENT, elements // ALIGNMENT * ALIGNMENT)


def _targets(flat: FlatParameters, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Yields the tensors that elements [start, stop) of the masters are rounded into, each with its offset in them."""
    if flat.rounded is not None:
        yield 0, flat.rounded[start:stop]
        return
    for slot in flat.slots:
        first, last = max(start - slot.offset, 0), min(stop - slot.offset, slot.size)
        if first < last:
            at = slot.offset + first - start
            for box in runs_of(flat.target(slot), first, last):
                yield at, box
                at += box.numel()
