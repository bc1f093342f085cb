"""Activations in fewer bits: bfloat16, or float8 (e4m3) with one scale a row, and how far that is from the original.

A scale is a power of two, so that scaling itself rounds nothing in any dtype: a row's largest element comes to lie
between half of the largest float8 number and that number. Elements above 1/14336 of the row's largest keep four
significant bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.telemetry.format import format_bytes

FLOAT8 = torch.float8_e4m3fn
_TOP_MANTISSA, _TOP_EXPONENT = 0.875, 9
"""448, the largest float8 number, as frexp gives it."""
_SMALLEST_EXPONENT = -100
"""Smallest exponent of a scale; rows of nothing but smaller numbers, and of zeros, get this one."""
_BLOCK_ELEMENTS = 2**24
"""Elements compared at a time to measure the error, so that the first step needs little more memory than others."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded matrix.

    Args:
        codes: the elements, [rows, width].
        scales: fp32 [rows, 1] that float8 elements are multiplied by; None for bfloat16.
    """

    codes: Tensor
    scales: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (self.scales.nbytes if self.scales is not None else 0)


def round_rows(x: Tensor, dtype: torch.dtype) -> Rounded:
    """Rounds `x`, [rows, width], to `dtype`: torch.bfloat16 or FLOAT8, where a row that is not finite becomes NaN."""
    if dtype != FLOAT8:
        return Rounded(x.to(dtype), None)
    largest = x.abs().amax(dim=1, keepdim=True).to(torch.float32)
    mantissa, exponent = torch.frexp(largest)
    exponent = (exponent - _TOP_EXPONENT + (mantissa > _TOP_MANTISSA)).clamp_(min=_SMALLEST_EXPONENT)
    one = torch.ones_like(largest)
    codes = (x * torch.ldexp(one, -exponent).to(x.dtype)).to(FLOAT8)
    return Rounded(codes, torch.where(largest.isfinite(), torch.ldexp(one, exponent), torch.nan))


def restored(rounded: Rounded, dtype: torch.dtype) -> Tensor:
    """Returns the matrix [rows, width] in `dtype`."""
    x = rounded.codes.to(dtype)
    return x if rounded.scales is None else x.mul_(rounded.scales.to(dtype))


class RoundingReport:
    """Measures what rounding did, without waiting for the device until it is asked."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._squares: list[Tensor] = []
        self._before = self._after = 0

    def add(self, x: Tensor, rounded: Rounded) -> None:
        """Takes account of `x`, [rows, width], and what it was rounded to."""
        self._before += x.nbytes
        self._after += rounded.nbytes
        step = max(1, _BLOCK_ELEMENTS // x.shape[1])
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            scales = rounded.scales[rows] if rounded.scales is not None else None
            exact = x[rows].to(torch.float32)
            error = restored(Rounded(rounded.codes[rows], scales), torch.float32) - exact
            self._squares.append(torch.stack([part.square().sum(dtype=torch.float64) for part in (error, exact)]))

    def error(self) -> float:
        """Returns the root of the squared errors' sum over that of all squared elements; waits for the device."""
        error, exact = torch.stack(self._squares).sum(0).tolist() if self._squares else (0.0, 0.0)
        return (error / exact) ** 0.5 if exact else 0.0

    def line(self) -> str:
        """Returns the line for the log; waits for the device."""
        name = str(self._dtype).removeprefix("torch.")
        return (
            f"activations kept as {name}: {format_bytes(self._after)} in place of {format_bytes(self._before)} a "
            f"micro-batch, rms relative error {self.error():.2e}"
        )
