"""Where the tensors of a checkpoint lie that arranges them in another way than the model's modules do.

A checkpoint may store each expert's matrix by itself where the model has one tensor of all experts, or one matrix where
the model has two, transposed or by turns. Each stored tensor then consists of parts, each of which is also a box of one
logical tensor, with the same numbers in an order that strides describe. Reading and writing both follow these parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from engine.errors import UserError


class StoredPart(NamedTuple):
    """A box of a logical tensor, as numbers of a stored one.

    Args:
        name: of the logical tensor.
        starts, sizes: of the box, a number for each dimension.
        stored: name of the stored tensor.
        offset: of the box's first number in the stored tensor, which is row-major.
        strides: between neighbours along each dimension of the box, in the stored tensor.
    """

    name: str
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: str
    offset: int
    strides: tuple[int, ...]

    def of(self, stored: Tensor) -> Tensor:
        """Returns the box as a view of the stored tensor, which is contiguous."""
        return stored.as_strided(self.sizes, self.strides, stored.storage_offset() + self.offset)

    @property
    def num_elements(self) -> int:
        """How many numbers the box has."""
        return prod(self.sizes)

    @property
    def is_run(self) -> bool:
        """Whether the box's numbers, row-major, follow each other in the stored tensor."""
        return all(
            size == 1 or stride == wanted
            for size, stride, wanted in zip(self.sizes, self.strides, contiguous_strides(self.sizes), strict=True)
        )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a row-major tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Arrangement:
    """The parts of all tensors of a checkpoint.

    Args:
        shapes: stored name -> shape, in the checkpoint's order.
        parts: of all of them, in any order.
        shapes_made: logical name -> the shape that its parts make together.
        others: stored names that no logical tensor is made of.
        ignored: those of `others` that transformers leaves out of the model without a word.
    """

    shapes: Mapping[str, tuple[int, ...]]
    parts: tuple[StoredPart, ...]
    shapes_made: Mapping[str, tuple[int, ...]]
    others: tuple[str, ...] = ()
    ignored: frozenset[str] = frozenset()

    def record(self) -> dict[str, Any]:
        """Returns what `recorded_shapes` reads, as JSON."""
        return {"stored": {name: list(shape) for name, shape in self.shapes.items() if name not in self.others}}

    @staticmethod
    def recorded_shapes(record: Mapping[str, Any], label: str) -> dict[str, tuple[int, ...]] | None:
        """Returns stored name -> shape of the checkpoint that a partitioned base was made from; None where it has none.

        Raises:
            UserError: the record is damaged.
        """
        stored = record.get("stored")
        if stored is None:
            return None
        if not isinstance(stored, dict) or not all(isinstance(shape, list) for shape in stored.values()):
            raise UserError(f"{label} is damaged: model.stored has no shapes; use another copy of it.")
        return {name: tuple(shape) for name, shape in stored.items()}

    @cached_property
    def by_name(self) -> dict[str, tuple[StoredPart, ...]]:
        """Logical name -> its parts, in the order of their boxes."""
        return _grouped((part.name, part) for part in sorted(self.parts, key=lambda part: part.starts))

    @cached_property
    def by_stored(self) -> dict[str, tuple[StoredPart, ...]]:
        """Stored name -> its parts, in the order in which they begin there."""
        return _grouped((part.stored, part) for part in sorted(self.parts, key=lambda part: part.offset))


def _grouped(pairs: Iterable[tuple[str, StoredPart]]) -> dict[str, tuple[StoredPart, ...]]:
    found: dict[str, list[StoredPart]] = {}
    for key, part in pairs:
        found.setdefault(key, []).append(part)
    return {key: tuple(parts) for key, parts in found.items()}
