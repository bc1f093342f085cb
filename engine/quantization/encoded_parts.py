"""Shared code of the encodings: the record of a shard's matrix, slices, and the refusal of non-finite numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeMatrix:
    """The matrix that a shard is cut from.

    Args:
        absmax: fp32 [all rows, n], `Encoding.absmax` of the whole matrix.
        first_row, first_column: where the shard begins in it.
        largest: fp32 [], the largest magnitude of all matrices that have one scale of their scales; None where it has
            its own.
    """

    absmax: Tensor
    first_row: int = 0
    first_column: int = 0
    largest: Tensor | None = None


def largest_of(*absmax: Tensor) -> Tensor:
    """Returns the largest magnitude of matrices, fp32 [], from their maxima [rows, n]; 0 where they have no numbers."""
    each = [one.amax() if one.numel() else one.new_zeros(()) for one in absmax]
    return torch.stack(each).amax()


def require_finite(absmax: Tensor, encoding: str) -> None:
    """Refuses a matrix with a NaN or an infinity, found in its maxima [rows, n].

    Raises:
        UserError: names the first such row.
    """
    bad = ~torch.isfinite(absmax).all(1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise UserError(
            f"a weight that is to be stored as {encoding} has a number that is not finite in row {row}: "
            "repair the checkpoint, or set model.base_dtype to null."
        )


def bounds(part: slice, length: int) -> tuple[int, int]:
    """Returns the start and stop of a slice without a step, within `length`."""
    start, stop, step = part.indices(length)
    assert step == 1, part
    return start, max(start, stop)
