"""The part of a logical tensor that a rank holds: pure data, no process groups.

Every parameter of the engine has a logical name, a global shape, and on each rank one `ShardSpec`. Checkpoints, the
optimizer, clipping, export and initialisation read that one record, so none of them has its own rules for
tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engine.errors import UserError


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous run along the sharded dimension: global [global_offset, +length) lies at [local_offset, +length)."""

    global_offset: int
    local_offset: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """The place of a rank's tensor in the whole, and the reductions that its gradient still needs.

    Args:
        global_shape: shape of the whole tensor, without padding.
        local_shape: shape of this rank's shard, with padding.
        dim: the sharded dimension, or None when every rank holds the whole tensor.
        pieces: runs along `dim`; rows of the local tensor that no piece covers are padding (zero, never saved).
        offsets: where the local tensor begins in each of the other dimensions, of which it may hold a part; one number
            for every dimension, 0 for `dim`. Empty where it holds the other dimensions whole.
        encoding: the format of the bytes: "plain", or the name of the encoding whose parts hold a frozen weight.
        grad_reduce: names of the groups over which this rank's gradient is still a partial sum after backward
            ("tp", "kv_replica"); the sum over `data` is implied for all.
        replicated: names of the groups whose ranks hold equal copies of this tensor.
        data: name of the axis of the ranks that hold copies for different tokens, and sum their gradients: "dp_cp", or
            "edp" for experts that are spread otherwise.
        owner: whether this rank is the one that saves the tensor and counts it in the gradient norm, of those with the
            same place on `data`.
    """

    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dim: int | None = None
    pieces: tuple[Piece, ...] = ()
    offsets: tuple[int, ...] = ()
    encoding: str = "plain"
    grad_reduce: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    data: str = "dp_cp"
    owner: bool = True

    def __post_init__(self) -> None:
        if self.dim is None:
            assert self.local_shape == self.global_shape and not self.pieces and not self.offsets, self
        else:
            for piece in self.pieces:
                assert piece.length > 0 and piece.global_offset >= 0 and piece.local_offset >= 0, self
                assert piece.global_offset + piece.length <= self.global_shape[self.dim], self
                assert piece.local_offset + piece.length <= self.local_shape[self.dim], self
            if self.offsets:
                assert len(self.offsets) == len(self.global_shape) and self.offsets[self.dim] == 0, self

    def runs(self, dim: int) -> tuple[Piece, ...]:
        """Returns which parts of dimension `dim` the local tensor holds, and where."""
        if dim == self.dim:
            return self.pieces
        return (Piece(self.offsets[dim] if self.offsets else 0, 0, self.local_shape[dim]),)

    @property
    def is_padded(self) -> bool:
        """Whether some local entries belong to no piece."""
        return self.dim is not None and sum(piece.length for piece in self.pieces) < self.local_shape[self.dim]


class NamedShard(NamedTuple):
    """A logical tensor's name, this rank's part of it, and where that part lies."""

    name: str
    tensor: Tensor
    spec: ShardSpec


def shard_of(whole: Tensor, spec: ShardSpec) -> Tensor:
    """Returns a rank's shard of a tensor; padding is zero."""
    if spec.dim is None:
        return whole
    found = whole.new_zeros(spec.local_shape)
    for piece in spec.pieces:
        held = whole.narrow(spec.dim, piece.global_offset, piece.length)
        found.narrow(spec.dim, piece.local_offset, piece.length).copy_(held)
    return found


def replicated_spec(
    shape: tuple[int, ...], *, rank: int, size: int, grad_reduce: tuple[str, ...] = (), group: str = "tp"
) -> ShardSpec:
    """Returns the spec of the whole tensor on each of the `size` ranks of `group`; rank 0 owns it."""
    return ShardSpec(
        global_shape=shape,
        local_shape=shape,
        grad_reduce=grad_reduce if size > 1 else (),
        replicated=(group,) if size > 1 else (),
        owner=rank == 0,
    )


def split_spec(shape: tuple[int, ...], dim: int, *, rank: int, size: int, what: str) -> ShardSpec:
    """Returns the spec of an even split of `dim` over `size` ranks.

    Raises:
        UserError: the dimension does not divide; names the value to change.
    """
    length = shape[dim]
    if length % size:
        raise UserError(
            f"{what} is {length}, which does not divide over parallel.tensor {size}: "
            f"use a parallel.tensor that divides {length}."
        )
    part = length // size
    local = (*shape[:dim], part, *shape[dim + 1 :])
    pieces = (Piece(rank * part, 0, part),)
    return ShardSpec(global_shape=shape, local_shape=local, dim=dim, pieces=pieces)


def runs_spec(shape: tuple[int, ...], runs: Sequence[tuple[int, int]]) -> ShardSpec:
    """Returns the spec of a rank that holds these runs of rows, (first row, rows), one after the other, in any order.

    Args:
        shape: of the whole tensor.
    """
    pieces, first = [], 0
    for start, length in runs:
        pieces.append(Piece(start, first, length))
        first += length
    return ShardSpec(global_shape=shape, local_shape=(first, *shape[1:]), dim=0, pieces=tuple(pieces))


def padded_split_spec(shape: tuple[int, ...], dim: int, *, rank: int, size: int) -> ShardSpec:
    """Returns the spec of a split of `dim` into equal local parts of ceil(length / size); the last ranks' surplus is
    padding.

    Used for vocabularies, which seldom divide.
    """
    length = shape[dim]
    part = -(-length // size)
    start = min(rank * part, length)
    held = min(part, length - start)
    local = (*shape[:dim], part, *shape[dim + 1 :])
    pieces = (Piece(start, 0, held),) if held else ()
    return ShardSpec(global_shape=shape, local_shape=local, dim=dim, pieces=pieces)
