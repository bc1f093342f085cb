"""The images of a micro-batch, as transformers' image processor hands them to a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from engine.batch import BatchPart


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageInputs(BatchPart):
    """The images of a micro-batch, in the order of the tokens that stand for them, row after row.

    Args:
        names: of arguments of the model's forward, such as pixel_values and image_grid_thw.
        tensors: their values, float32 or integers.
    """

    graphs_ignore: ClassVar[bool] = True
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Returns the part with `change` applied to each of its tensors."""
        return replace(self, tensors=tuple(map(change, self.tensors)))

    def split(self, count: int) -> list[Self]:
        """Returns the images of so many documents that have the same number of images of the same sizes."""
        pieces = [one.chunk(count) for one in self.tensors]
        return [replace(self, tensors=own) for own in zip(*pieces, strict=True)]

    def without_input(self) -> Self:
        """Returns the part without pixels; sizes, of which positions are made, stay."""
        kept = [(name, one) for name, one in zip(self.names, self.tensors, strict=True) if not one.is_floating_point()]
        return replace(self, names=tuple(name for name, _ in kept), tensors=tuple(one for _, one in kept))


def joined(parts: Sequence[ImageInputs]) -> ImageInputs:
    """Returns the images of several documents; all have the same names."""
    tensors = tuple(torch.cat(own) for own in zip(*(one.tensors for one in parts), strict=True))
    return replace(parts[0], tensors=tensors)
