"""The interface of an encoding of a frozen weight, and the encodings by name.

A weight is one logical matrix [rows, columns]. It becomes a few tensors, its parts. Each has a row for each row of the
matrix, or for several of them. So a cut along rows is a slice of each part (`part_rows`), and matrices stacked by rows
in one storage (q, k, v; gate, up) are their parts stacked.

Scales look at more than a shard: at the whole row (int8, fp8_row), at the whole matrix (fp8), or, for the scales of its
scales, at the whole matrix too (nf4). A shard therefore gets its parts in one of two ways, with the same bits:

    cut(encode(whole), rows, columns)                          the whole matrix is here
    encode(shard, WholeMatrix(absmax=..., first_row=...))      only its block maxima are: join() of what absmax() gave

Nothing here communicates or knows of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.choices import ENCODED
from engine.errors import UserError
from engine.kernels.codec import PLAIN, Arithmetic
from engine.kernels.formats import FORMATS, Format
from engine.quantization.encoded_parts import WholeMatrix


class Encoding(Protocol):
    """An encoding of a matrix.

    Attributes:
        name: as in model.base_dtype.
        block: columns of a row that share a scale, which no cut may divide; 0 where the row or the matrix shares it
            and a cut may fall anywhere.
        arithmetic: the backend.
        format: of the parts, by which adapters are merged into them; None where nothing writes such a format.
    """

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> int: ...

    @property
    def arithmetic(self) -> Arithmetic: ...

    @property
    def format(self) -> Format | None: ...

    def parts(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and dtype of each stored tensor. The first dimension grows with `rows`; as a rule it is
        their number."""

    def stacked(self, bounds: Iterable[int]) -> Encoding:
        """Returns the encoding for shards and stacks whose matrices begin and end at these rows.

        It means the same numbers. Where several rows share a row of a part, there are so few of them that no bound
        divides it.
        """

    def absmax(self, weight: Tensor) -> Tensor:
        """Returns a shard's contribution to the whole matrix's scales, fp32 [rows, n].

        Args:
            weight: [rows, columns], any float dtype and strides.

        Raises:
            UserError: a number is not finite.
        """

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Returns `absmax` of a matrix from those of its shards along rows (0) or columns (1), in order."""

    def encode(self, weight: Tensor, whole: WholeMatrix | None = None) -> dict[str, Tensor]:
        """Encodes a weight and returns the parts, on its device.

        Args:
            weight: [rows, columns], any float dtype and strides.
            whole: the matrix that it is a shard of; None where it is the whole matrix.

        Raises:
            UserError: a number is not finite, or the shard begins inside a block.
        """

    def cut(self, parts: Mapping[str, Tensor], rows: slice, columns: slice) -> dict[str, Tensor]:
        """Returns the parts of weight[rows, columns], copies or views.

        Args:
            rows, columns: with start and stop, without a step.

        Raises:
            UserError: the cut divides a block.
        """

    def decode(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        """Decodes parts into `out`.

        Args:
            out: [rows, columns], any float dtype; any row stride, columns contiguous.
        """


def part_rows(code: Encoding, rows: slice, columns: int) -> dict[str, slice]:
    """Returns the rows of each part that belong to rows of a matrix of so many columns."""
    first, last = (code.parts(count, columns) for count in (rows.start, rows.stop))
    return {name: slice(first[name][0][0], last[name][0][0]) for name in last}


ENCODING_NAMES = ENCODED


def encoding(which: str | Format, arithmetic: Arithmetic = PLAIN) -> Encoding:
    """Returns an encoding.

    Args:
        which: a format, or a name of one, or of one of ENCODING_NAMES.
        arithmetic: the backend of its loops.

    Raises:
        UserError: there is none of that name.
    """
    name, format = (which, FORMATS.get(which)) if isinstance(which, str) else (which.name, which)
    if format is not None and which != "int8":
        from engine.quantization.block_formats import BlockEncoding

        return BlockEncoding(format, arithmetic)
    if name == "nf4":
        from engine.quantization.nf4 import Nf4

        return Nf4(arithmetic)
    if name == "int8":
        from engine.quantization.int8 import int8

        return int8(arithmetic)
    if name in ("fp8", "fp8_row"):
        from engine.quantization.fp8 import fp8

        return fp8(arithmetic, per_matrix=name == "fp8")
    raise UserError(f"there is no encoding {name!r}: choose one of {', '.join(ENCODING_NAMES)}.")
