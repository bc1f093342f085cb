"""The common interface of all sources of tensors.

A `TensorReader` knows logical tensors: their shapes, dtypes, and the stored pieces that make each up. Reading a shard
is then the same for all of them, whatever the layout on either side. Subclasses provide the pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.checkpoint.reshard import Box, box_spec, plan_copies
from engine.checkpoint.safetensors_file import num_bytes
from engine.distributed.sharding import Piece, ShardSpec
from engine.errors import UserError

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TensorReader(ABC):
    """Logical tensors in pieces, read by shard."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of this source in error sentences: its folder."""

    @abstractmethod
    def tensor_names(self) -> list[str]:
        """Returns the logical names, in a stable order."""

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """Returns whether there is a tensor of this logical name."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the global shape, without padding."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Returns the stored dtype."""

    @abstractmethod
    def boxes(self, name: str) -> Sequence[Box]:
        """Returns the stored pieces; together they cover the tensor."""

    @abstractmethod
    def view(self, name: str, index: int) -> Tensor:
        """Returns piece `index` as stored; where it has a recorded checksum, all of it is checked before it is used.

        Raises:
            UserError: it is damaged.
        """

    def piece_bytes(self, name: str, index: int) -> int:
        """Returns the bytes of piece `index`."""
        return num_bytes(self.dtype(name), self.boxes(name)[index].shape(self.shape(name)))

    def read(self, name: str, spec: ShardSpec, out: Tensor | None = None) -> Tensor:
        """Returns a rank's part of a tensor.

        Args:
            name: logical name.
            spec: which part; entries that belong to no piece are set to zero.
            out: [spec.local_shape], any dtype, device and strides; None allocates one of the stored dtype on the host.

        Returns:
            `out`, or the new tensor.

        Raises:
            UserError: there is no such tensor here, it has another shape, or it is damaged.
        """
        self.require(name, spec.global_shape)
        if out is None:
            out = torch.empty(spec.local_shape, dtype=self.dtype(name))
        assert tuple(out.shape) == spec.local_shape, (name, out.shape, spec)
        boxes = self.boxes(name)
        with torch.no_grad():
            if spec.is_padded:
                out.zero_()
            for copy in plan_copies(spec, boxes):
                out[copy.local_slices].copy_(self.view(name, copy.source)[copy.source_slices])
        return out

    def read_whole(self, name: str) -> Tensor:
        """Returns the whole tensor; a view of the file where it is stored in one piece."""
        if len(self.boxes(name)) == 1:
            return self.view(name, 0)
        return self.read(name, box_spec(self.shape(name), Box()))

    def read_rows(self, name: str, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Returns the rows [start, stop) along the first dimension, a number being one row; `out` as of `read`."""
        shape = self.shape(name)
        if not shape:
            return self.read(name, box_spec(shape, Box()), None if out is None else out.view(())).view(1)
        spec = ShardSpec(
            global_shape=shape,
            local_shape=(stop - start, *shape[1:]),
            dim=0,
            pieces=(Piece(start, 0, stop - start),),
        )
        return self.read(name, spec, out)

    def expect_rows(self, name: str, rows: Sequence[int]) -> None:  # noqa: B027 - a hint may be ignored
        """Hints that these rows will be read soon, so that many are prefetched from the disk together."""

    def require_numbers(self, name: str) -> None:
        """Raises UserError where `name` is stored in a dtype of codes, or of an encoding, which are not values yet."""
        if (dtype := self.dtype(name)) not in WEIGHT_DTYPES:
            raise UserError(
                f"{self.label} stores {name} as {str(dtype).removeprefix('torch.')}, but numbers with a point are "
                "expected: save it in float32 or bfloat16."
            )

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises UserError unless `name` is here with this global shape."""
        if name not in self:
            raise UserError(f"{self.label} has no tensor {name} {list(shape)}: use the checkpoint that it is in.")
        if self.shape(name) != shape:
            raise UserError(
                f"{self.label} has {name} with shape {list(self.shape(name))}, but {list(shape)} is expected: "
                "use a checkpoint of the same model."
            )


class Renamed(TensorReader):
    """Another reader's tensors by other names.

    Args:
        reader: has the tensors.
        stored: name -> that of the tensor in `reader`.
    """

    def __init__(self, reader: TensorReader, stored: Mapping[str, str]) -> None:
        self._reader, self.stored = reader, stored

    @property
    def label(self) -> str:
        return self._reader.label

    def tensor_names(self) -> list[str]:
        return list(self.stored)

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(self.stored[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(self.stored[name])

    def boxes(self, name: str) -> Sequence[Box]:
        return self._reader.boxes(self.stored[name])

    def view(self, name: str, index: int) -> Tensor:
        return self._reader.view(self.stored[name], index)
