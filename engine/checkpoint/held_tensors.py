"""Whole tensors in memory, read by shard like those of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.checkpoint.reader import TensorReader
from engine.checkpoint.reshard import Box


class HeldTensors(TensorReader):
    """Whole tensors in memory.

    Args:
        tensors: by their names.
        label: of them all, for a message.
    """

    def __init__(self, tensors: Mapping[str, Tensor], label: str) -> None:
        self._tensors, self._label = tensors, label

    @property
    def label(self) -> str:
        return self._label

    def tensor_names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def boxes(self, name: str) -> Sequence[Box]:
        return (Box(),)

    def view(self, name: str, index: int) -> Tensor:
        return self._tensors[name]
