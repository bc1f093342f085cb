"""The stored tensors of a checkpoint that arranges them in another way than the model's; see
`engine.adopted.arrangement`.

A stored tensor that is one run of a logical one after another is copied block by block; of any other kind, one is in
memory at a time. So is a logical tensor that training changed, where it is cut into several.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.adopted.arrangement import Arrangement, StoredPart, contiguous_strides
from engine.adopted.config import AdoptedNames
from engine.adopted.source import box_of
from engine.checkpoint.copying.contents import Concatenated, Content
from engine.checkpoint.copying.direct_io import BLOCK_BYTES, Scratch
from engine.checkpoint.copying.file_writers import Piece
from engine.checkpoint.reshard import Box
from engine.checkpoint.safetensors_file import num_bytes, raw_bytes
from engine.checkpoint.weight_source import TIED_HEAD, WeightSource

_TABLE = "embed_tokens.weight"


def arranged_pieces(source: WeightSource, names: AdoptedNames) -> tuple[dict[str, list[str]], list[Piece]]:
    """Returns stored name -> the logical tensors that have a part in it, and the pieces to be written.

    Pieces that are made of the same logical tensor have one order, so that it is read once for all of them.
    """
    if names.arrangement is None:  # a model that began with random values
        names = names.arranged(None, source.label)
    arrangement = _with_own_head(names, source)
    contents: dict[StoredPart, Content] = {}
    order: dict[str, int] = {}
    changed = set(source.changed_names())
    for place, name in enumerate(source.tensor_names()):
        contents |= _contents(source, name, arrangement.by_name[name], is_changed=name in changed)
        for part in arrangement.by_name[name]:
            order.setdefault(part.stored, place)
    if source.has_tied_head:
        table = source.content(_TABLE, Box())
        contents |= dict.fromkeys(arrangement.by_name[TIED_HEAD], table)
    made_of: dict[str, list[str]] = {}
    pieces = []
    for stored in sorted(arrangement.by_stored, key=lambda stored: order.get(stored, len(order))):
        parts = [part for part in arrangement.by_stored[stored] if part in contents]
        if not parts:  # a copy of the head that is tied
            continue
        logical = (part.name if part.name in source else _TABLE for part in parts)  # of a tied head
        made_of[stored] = list(dict.fromkeys(logical))
        dtype, shape = source.dtype(made_of[stored][0]), arrangement.shapes[stored]
        content = _assembled(parts, [contents[part] for part in parts], dtype, shape)
        pieces.append(Piece(key=stored, dtype=dtype, shape=shape, content=content, order=order.get(stored, len(order))))
    return made_of, pieces


def _with_own_head(names: AdoptedNames, source: WeightSource) -> Arrangement:
    """Returns the arrangement with a head of its own, where training has made one of a tied one that is not stored."""
    arrangement = names.arrangement
    assert arrangement is not None
    if TIED_HEAD not in source or TIED_HEAD in arrangement.by_name:
        return arrangement
    shape, stored = source.shape(TIED_HEAD), names.to_hf(TIED_HEAD).name
    head = StoredPart(TIED_HEAD, (0,) * len(shape), shape, stored, 0, contiguous_strides(shape))
    return replace(arrangement, shapes={**arrangement.shapes, stored: shape}, parts=(*arrangement.parts, head))


def _contents(
    source: WeightSource, name: str, parts: Sequence[StoredPart], *, is_changed: bool
) -> dict[StoredPart, Content]:
    boxes = [box_of(part, source.shape(name)) for part in parts]
    if boxes == [Box()] or not is_changed:
        return dict(zip(parts, source.contents(name, boxes), strict=True))
    whole = _Held(source.content(name, Box()), source.dtype(name), source.shape(name), uses=len(parts))
    return {part: _HeldPart(whole, box) for part, box in zip(parts, boxes, strict=True)}


def _assembled(
    parts: Sequence[StoredPart], contents: Sequence[Content], dtype: torch.dtype, shape: tuple[int, ...]
) -> Content:
    if all(part.is_run for part in parts):
        return contents[0] if len(contents) == 1 else Concatenated(contents)
    return ArrangedContent(parts, contents, dtype, shape)


class ArrangedContent(Content):
    """A stored tensor whose parts lie between each other.

    Args:
        parts, contents: that make it up.
        dtype, shape: of it.
    """

    def __init__(
        self, parts: Sequence[StoredPart], contents: Sequence[Content], dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        self._parts, self._contents, self._dtype, self._shape = parts, contents, dtype, shape

    def blocks(self, scratch: Scratch, unit: int = 1) -> Iterator[memoryview]:
        whole = torch.empty(self._shape, dtype=self._dtype)
        for part, content in zip(self._parts, self._contents, strict=True):
            _fill(part.of(whole), content, scratch)
        yield from _cut(raw_bytes(whole), unit)

    def facts(self) -> dict[str, Any]:
        return {key: value for content in self._contents for key, value in content.facts().items()}


class _Held:
    """A whole logical tensor, which is made when a part of it is first asked for and kept until the last one was."""

    def __init__(self, content: Content, dtype: torch.dtype, shape: tuple[int, ...], *, uses: int) -> None:
        self.content, self.dtype, self.shape, self._uses = content, dtype, shape, uses
        self._value: Tensor | None = None
        self._lock = threading.Lock()

    def part(self, box: Box, scratch: Scratch) -> Tensor:
        """Returns a box of it."""
        with self._lock:
            if self._value is None:
                self._value = torch.empty(self.shape, dtype=self.dtype)
                _fill(self._value, self.content, scratch)
            part = self._value[tuple(slice(*ends) for ends in box.ranges(self.shape))].contiguous()
            self._uses -= 1
            if self._uses <= 0:  # computed again where a part is read twice
                self._value = None
            return part


class _HeldPart(Content):
    def __init__(self, whole: _Held, box: Box) -> None:
        self._whole, self._box = whole, box

    def blocks(self, scratch: Scratch, unit: int = 1) -> Iterator[memoryview]:
        yield from _cut(raw_bytes(self._whole.part(self._box, scratch)), unit)

    def facts(self) -> dict[str, Any]:
        return self._whole.content.facts()


def _cut(every: memoryview, unit: int) -> Iterator[memoryview]:
    size = max(1, BLOCK_BYTES // unit) * unit
    for first in range(0, len(every), size):
        yield every[first : first + size]


def _fill(out: Tensor, content: Content, scratch: Scratch) -> None:
    """Writes a content into a tensor, row by row."""
    row, rest = 0, tuple(out.shape[1:])
    for block in content.blocks(scratch, num_bytes(out.dtype, rest)):
        rows = torch.frombuffer(block, dtype=out.dtype).view(-1, *rest)
        out[row : row + rows.shape[0]] = rows
        row += rows.shape[0]
    assert row == out.shape[0], (row, out.shape)
