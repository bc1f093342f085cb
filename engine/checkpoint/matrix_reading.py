"""Reads a rank's part of a matrix in few bits: its codes and scales, or the numbers that they mean.

Only the rows and columns that are asked for are decoded, and no whole matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint.safetensors_file import raw_bytes
from engine.distributed.sharding import ShardSpec
from engine.kernels.checksum import Checksum
from engine.kernels.formats import Format, part_shapes
from engine.quantization.shipped.spelling import StoredMatrix

_SUMMED_AT_ONCE = 1 << 22
"""Numbers; bounds the memory of a checksum."""


def parts_of(matrix: StoredMatrix, spec: ShardSpec, format: Format) -> dict[str, Tensor]:
    """Returns a rank's part of a matrix, in the parts of a format.

    Args:
        format: that of the matrix; with a smaller `granule` where rows that do not share a scale lie together.

    Raises:
        UserError: the shard begins or ends inside of numbers that share a scale or a byte.
    """
    found = {
        part: torch.zeros(shape, dtype=dtype) for part, (shape, dtype) in part_shapes(format, *spec.local_shape).items()
    }
    (across,) = spec.runs(1)
    columns = slice(across.global_offset, across.global_offset + across.length)
    for run in spec.runs(0):
        rows = slice(run.global_offset, run.global_offset + run.length)
        for part, value in matrix.parts(rows, columns, format.granule).items():
            step = format.granule if part == "scales" and format.rows > 1 else 1
            first = run.local_offset // step
            found[part][first : first + value.shape[0]].copy_(value)
    return found


@torch.no_grad()
def numbers_of(matrix: StoredMatrix, spec: ShardSpec, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Returns the numbers of a rank's part of a matrix.

    Args:
        dtype: that they are decoded to.
        out: [spec.local_shape], any dtype, device and strides; None allocates one of `dtype` on the host.
    """
    out = torch.empty(spec.local_shape, dtype=dtype) if out is None else out
    if spec.is_padded:
        out.zero_()
    for across in spec.runs(1):
        columns = slice(across.global_offset, across.global_offset + across.length)
        for run in spec.runs(0):
            place = out[run.local_offset : run.local_offset + run.length]
            into = place[:, across.local_offset : across.local_offset + across.length]
            own = into if into.dtype == dtype else torch.empty_like(into, dtype=dtype)
            matrix.decode(own, slice(run.global_offset, run.global_offset + run.length), columns)
            into.copy_(own)
    return out


def sum_of(matrix: StoredMatrix, columns: int, dtype: torch.dtype) -> str:
    """Returns the checksum of the numbers of a matrix, of which a few rows are decoded at a time.

    Args:
        dtype: that they are decoded to.
    """
    height, found = max(1, _SUMMED_AT_ONCE // columns), Checksum()
    for first in range(0, matrix.num_rows, height):
        out = torch.empty(min(height, matrix.num_rows - first), columns, dtype=dtype)
        matrix.decode(out, slice(first, first + out.shape[0]), slice(0, columns))
        found.update(raw_bytes(out))
    return found.text()
