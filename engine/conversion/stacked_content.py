"""The bytes of a tensor that holds a linear of all experts, put together expert by expert.

Memory is one expert's part of it, since gate and up may take turns row by row there, or be transposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import Content, block_tensor
from engine.checkpoint.copying.direct_io import BLOCK_BYTES, Scratch
from engine.checkpoint.safetensors_file import num_bytes, raw_bytes
from engine.models.stacked_parts import ExpertPart


class Member(NamedTuple):
    """A weight or bias of one expert.

    Args:
        place: in the tensor of all experts.
        shape: [out, in] or [out].
        content: its bytes.
    """

    place: ExpertPart
    shape: tuple[int, ...]
    content: Content


class StackedContent(Content):
    """A tensor of all experts.

    Args:
        members: all that is in it, in any order.
        dtype: of all of them.
    """

    def __init__(self, members: Sequence[Member], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._members: dict[int, list[Member]] = {}
        for member in members:
            self._members.setdefault(member.place.expert, []).append(member)
        first = members[0]
        self._whole = first.place.part.whole_shape(first.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._members), *self._whole)

    def blocks(self, scratch: Scratch, unit: int = 1) -> Iterator[memoryview]:
        size = max(1, BLOCK_BYTES // unit) * unit
        for expert in range(len(self._members)):
            whole = block_tensor(scratch, "stacked", self._dtype, self._whole)
            for member in self._members[expert]:
                self._fill(member, member.place.part.of(whole), scratch)
            every = raw_bytes(whole)
            for first in range(0, len(every), size):
                yield every[first : first + size]

    def _fill(self, member: Member, out: Tensor, scratch: Scratch) -> None:
        row, rest = 0, member.shape[1:]
        for block in member.content.blocks(scratch, num_bytes(self._dtype, rest)):
            rows = torch.frombuffer(block, dtype=self._dtype).view(-1, *rest)
            out[row : row + rows.shape[0]] = rows
            row += rows.shape[0]
        assert row == member.shape[0], (member.place, row)

    def facts(self) -> dict[str, Any]:
        every = (member for members in self._members.values() for member in members)
        return {key: value for member in every for key, value in member.content.facts().items()}
