"""Spellings of integers of 4 and 8 bits, several to an int32, with a scale for each group of a row.

    compressed-tensors   weight_packed [O, I / n] by columns, weight_scale [O, G], weight_zero_point [O / n, G] by rows,
                         weight_shape
    GPTQ                 qweight [I / n, O] by columns, scales [G, O], qzeros [G, O / n] by rows, g_idx [I]
    AWQ                  qweight [I, O / 8] and qzeros [G, O / 8] by rows in the order 0 2 4 6 1 3 5 7, scales [G, O]

Of n = 32 / bits integers in an int32 the first has the lowest bits. The zero points of GPTQ's first version are one
less than they mean, 1 taken from each of an int32's as one integer (ModelCloud/GPTQModel); those of `gptq_v2` are not.
Integers of 8 bits in groups are decoded: no format has them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels.formats import FORMATS, Format
from engine.quantization.shipped.spelling import NUMBERS, Layout, Spelling

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ has the row of each place in an int32."""
_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The reverse: the row at each place."""
_WORD = (torch.int32,)


@dataclass(frozen=True, kw_only=True)
class Integers(Spelling):
    """Integers with a scale, and perhaps a zero point, for each group of a row.

    Args:
        bits: 4 or 8.
        columns_of_group: that share a scale; 0 for the whole row.
        has_zeros: zero points are subtracted from the codes; without them 2^(bits - 1) is.
        scale_dtype: of the scales, fp16 until the tensors are known.
    """

    bits: int = 4
    columns_of_group: int = 128
    has_zeros: bool = False
    scale_dtype: torch.dtype = torch.float16

    @property
    def name(self) -> str:
        return f"INT{self.bits}"

    @property
    def group(self) -> int:
        return self.columns_of_group

    @property
    def per_word(self) -> int:
        """Integers in an int32."""
        return 32 // self.bits

    @property
    def format(self) -> Format:
        if self.bits != 4:
            raise UserError(
                f"integers of {self.bits} bits with scales for groups or zero points are in no format that is trained "
                "on: set model.base_dtype to null, which decodes them."
            )
        return replace(
            FORMATS["int4"],
            group=self.columns_of_group,
            scale_dtype=self.scale_dtype,
            has_zero_points=self.has_zeros,
        )

    @property
    @abstractmethod
    def scales(self) -> str:
        """The ending of the scales."""

    def known(self, dtypes: Mapping[str, torch.dtype], shapes: Mapping[str, tuple[int, ...]]) -> Self:
        return replace(self, scale_dtype=dtypes[self.scales])

    @abstractmethod
    def unpacked(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> dict[str, Tensor]:
        """Returns `codes` uint8 [rows, columns] or, of 4 bits, two to a byte, `scales` [rows, G] and `zeros`."""

    def load(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> dict[str, Tensor]:
        return self.unpacked(tensors, rows, columns)

    def group_of(self, tensors: Mapping[str, Tensor], columns: slice) -> Tensor:
        """Returns the group of each column."""
        every = torch.arange(columns.start, columns.stop)
        return every // self.columns_of_group if self.columns_of_group else torch.zeros_like(every)

    @property
    def has_format(self) -> bool:
        """Whether a format holds the parts."""
        return self.bits == 4

    def decode(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], rows: slice, columns: slice, out: Tensor
    ) -> None:
        if self.has_format:
            super().decode(tensors, shape, rows, columns, out)
            return
        height = max(self.row_step, (1 << 22) // max(1, shape[1]) // self.row_step * self.row_step)
        for first in range(rows.start // self.row_step * self.row_step, rows.stop, height):
            last = min(first + height, shape[0])
            cuts = {one.ending: one.cut(tensors[one.ending], shape, slice(first, last), slice(0, shape[1]))
                    for one in self.layouts}  # fmt: skip
            parts = self.unpacked(cuts, last - first, shape[1])
            codes = nibbles(parts["codes"])[:, : shape[1]] if self.bits == 4 else parts["codes"]
            group = self.group_of(tensors, columns)
            zeros = parts["zeros"][:, group].float() if self.has_zeros else float(1 << (self.bits - 1))
            values = (codes[:, columns].float() - zeros) * parts["scales"][:, group].float()
            begin, end = max(first, rows.start), min(last, rows.stop)
            out[begin - rows.start : end - rows.start].copy_(values[begin - first : end - first])


def nibbles(codes: Tensor) -> Tensor:
    """Returns the integers of 4 bits in bytes [n, m], the lower half first, as uint8 [n, 2 m]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def joined_nibbles(values: Tensor) -> Tensor:
    """Returns integers of 4 bits [n, 2 m] two to a byte, the reverse of `nibbles`."""
    return values[:, ::2] | (values[:, 1::2] << 4)


def _seen_as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bytes of a matrix, row by row, as another dtype."""
    is_dense = values.stride() == (values.shape[1], 1)  # is_contiguous says nothing of the stride of one row
    dense = values if is_dense else values.clone(memory_format=torch.contiguous_format)
    return dense.view(-1).view(dtype).view(values.shape[0], -1)


def from_words(words: Tensor, bits: int) -> Tensor:
    """Returns the integers in int32 [n, m], the lowest bits first, as uint8 [n, m * 32 / bits]."""
    found = _seen_as(words, torch.uint8)
    return nibbles(found) if bits == 4 else found


def to_words(values: Tensor, bits: int) -> Tensor:
    """Returns integers uint8 [n, m] in int32 [n, ceil(m * bits / 32)], the reverse of `from_words`."""
    per_word = 32 // bits
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % per_word))
    packed = joined_nibbles(values) if bits == 4 else values
    return _seen_as(packed, torch.int32)


def _as_bytes(words: Tensor, columns: int, bits: int) -> Tensor:
    """Returns codes as a format has them, of int32 [rows, n] that are packed along columns."""
    return _seen_as(words, torch.uint8)[:, : -(-columns * bits // 8)]


def _words_of(codes: Tensor, bits: int) -> Tensor:
    """Returns int32 [rows, n] of codes as a format has them, the reverse of `_as_bytes`."""
    return _seen_as(torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)), torch.int32)


@dataclass(frozen=True, kw_only=True)
class PackedIntegers(Integers):
    """`pack-quantized` of compressed-tensors."""

    scale_dtype: torch.dtype = torch.bfloat16

    @property
    def scales(self) -> str:
        return ".weight_scale"

    @property
    def row_step(self) -> int:
        return self.per_word if self.has_zeros else 1

    @property
    def column_step(self) -> int:
        return self.per_word

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        group, step = self.columns_of_group, self.per_word
        found = [
            Layout(ending=".weight_packed", dtypes=_WORD, columns=step),
            Layout(ending=".weight_scale", dtypes=NUMBERS, columns=group),
            Layout(ending=".weight_shape", dtypes=(torch.int64, torch.int32), rows=0, columns=0, last=2),
        ]
        if self.has_zeros:
            found.append(Layout(ending=".weight_zero_point", dtypes=_WORD, rows=step, columns=group))
        return tuple(found)

    def shape(self, stored: Mapping[str, tuple[int, ...]], read: Mapping[str, Tensor]) -> tuple[int, int]:
        rows, columns = read[".weight_shape"].tolist() if ".weight_shape" in read else (0, 0)
        return int(rows), int(columns)

    def unpacked(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> dict[str, Tensor]:
        found = {
            "codes": _as_bytes(tensors[".weight_packed"], columns, self.bits),
            "scales": tensors[".weight_scale"],
        }
        if self.has_zeros:
            found["zeros"] = from_words(tensors[".weight_zero_point"].t(), self.bits).t()[:rows]
        return found

    def store(self, parts: Mapping[str, Tensor], columns: int) -> dict[str, Tensor]:
        found = {
            ".weight_packed": _words_of(parts["codes"], self.bits),
            ".weight_scale": parts["scales"].contiguous(),
            ".weight_shape": torch.tensor([parts["codes"].shape[0], columns]),
        }
        if self.has_zeros:
            found[".weight_zero_point"] = to_words(parts["zeros"].t(), self.bits).t().contiguous()
        return found


@dataclass(frozen=True, kw_only=True)
class Gptq(Integers):
    """GPTQ's.

    Args:
        is_v2: zero points are stored as they are.
        is_sorted: columns are in groups one after the other, as `g_idx` says; what a format can hold.
    """

    is_v2: bool = False
    is_sorted: bool = True

    @property
    def scales(self) -> str:
        return ".scales"

    @property
    def row_step(self) -> int:
        return self.per_word

    @property
    def column_step(self) -> int:
        return self.per_word

    @property
    def has_format(self) -> bool:
        return self.bits == 4 and self.is_sorted

    @property
    def format(self) -> Format:
        if not self.is_sorted:
            raise UserError(
                "columns are in groups in another order than they lie (GPTQ's desc_act, as g_idx says), which no "
                "format has: set model.base_dtype to null, which decodes them."
            )
        return super().format

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        group, step = self.columns_of_group, self.per_word
        return (
            Layout(ending=".qweight", dtypes=_WORD, columns=step, transposed=True),
            Layout(ending=".scales", dtypes=NUMBERS, columns=group, transposed=True),
            Layout(ending=".qzeros", dtypes=_WORD, rows=step, columns=group, transposed=True),
            Layout(ending=".g_idx", dtypes=(torch.int32, torch.int64), rows=0),
        )

    def shape(self, stored: Mapping[str, tuple[int, ...]], read: Mapping[str, Tensor]) -> tuple[int, int]:
        columns, rows, *_ = (*stored[".qweight"], 0, 0)
        return rows, columns * self.per_word

    def sorted_as(self, groups: Tensor) -> Self:
        """Returns the spelling of a matrix with this `g_idx`."""
        group = self.columns_of_group
        every = torch.arange(groups.numel(), device=groups.device)
        straight = every // group if group else torch.zeros_like(every)
        return replace(self, is_sorted=torch.equal(groups.long().flatten(), straight))

    def group_of(self, tensors: Mapping[str, Tensor], columns: slice) -> Tensor:
        return tensors[".g_idx"].flatten()[columns].long()

    def unpacked(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> dict[str, Tensor]:
        words = tensors[".qzeros"].t()
        zeros = from_words(words if self.is_v2 else words + _ones(self.bits), self.bits).t()[:rows]
        middle = 1 << (self.bits - 1)
        if not self.has_zeros and not bool((zeros == middle).all()):
            raise UserError(
                f"quantization_config has sym true, but qzeros has others than {middle - (not self.is_v2)}: set sym "
                "to false in config.json if they are meant, or copy the model again."
            )
        found = {"codes": _as_bytes(tensors[".qweight"], columns, self.bits), "scales": tensors[".scales"]}
        return {**found, "zeros": zeros} if self.has_zeros else found

    def store(self, parts: Mapping[str, Tensor], columns: int) -> dict[str, Tensor]:
        rows, groups = parts["scales"].shape
        middle = torch.full((rows, groups), 1 << (self.bits - 1), dtype=torch.uint8)
        words = to_words(parts.get("zeros", middle).t(), self.bits)
        every = torch.arange(columns, dtype=torch.int32)
        return {
            ".qweight": _words_of(parts["codes"], self.bits).t().contiguous(),
            ".scales": parts["scales"].t().contiguous(),
            ".qzeros": words if self.is_v2 else words - _ones(self.bits),
            ".g_idx": every // self.columns_of_group if self.columns_of_group else torch.zeros_like(every),
        }


def _ones(bits: int) -> int:
    """Returns an int32 of ones."""
    return sum(1 << place for place in range(0, 32, bits))


@dataclass(frozen=True, kw_only=True)
class Awq(Integers):
    """AWQ's, as its `gemm` kernels read it."""

    has_zeros: bool = True

    @property
    def row_step(self) -> int:
        return 8

    @property
    def scales(self) -> str:
        return ".scales"

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        group = self.columns_of_group
        return (
            Layout(ending=".qweight", dtypes=_WORD, rows=8, transposed=True),
            Layout(ending=".scales", dtypes=NUMBERS, columns=group, transposed=True),
            Layout(ending=".qzeros", dtypes=_WORD, rows=8, columns=group, transposed=True),
        )

    def shape(self, stored: Mapping[str, tuple[int, ...]], read: Mapping[str, Tensor]) -> tuple[int, int]:
        columns, words, *_ = (*stored[".qweight"], 0, 0)
        return words * 8, columns

    def unpacked(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> dict[str, Tensor]:
        codes = _in_order(from_words(tensors[".qweight"].t(), 4), _ORDER).t()
        if columns % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        return {
            "codes": joined_nibbles(codes),
            "scales": tensors[".scales"],
            "zeros": _in_order(from_words(tensors[".qzeros"].t(), 4), _ORDER).t(),
        }

    def store(self, parts: Mapping[str, Tensor], columns: int) -> dict[str, Tensor]:
        return {
            ".qweight": to_words(_in_order(nibbles(parts["codes"])[:, :columns].t(), _PLACES), 4),
            ".scales": parts["scales"].t().contiguous(),
            ".qzeros": to_words(_in_order(parts["zeros"].t(), _PLACES), 4),
        }


def _in_order(values: Tensor, order: tuple[int, ...]) -> Tensor:
    """Returns values [n, 8 m] with those of each eight in another order."""
    return values.reshape(values.shape[0], -1, 8)[..., list(order)].flatten(1)
