"""Numbers that numpy has no dtype for, as their bits: bfloat16, tf32, e4m3 and e5m2, rounded as PTX says."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def from_bfloat16(bits: Array) -> Array:
    """Widens uint16 bits to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: Array) -> Array:
    """Rounds float32 to the nearest, ties to even; NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    carry = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + carry) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def from_float16(bits: Array) -> Array:
    """Widens uint16 bits to float32."""
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


def to_float16(values: Array) -> Array:
    """Rounds float32 to the nearest, ties to even; NaN becomes 0x7FFF."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def to_tf32(values: Array) -> Array:
    """Rounds float32 to the bits of tf32, ties away from zero (cvt.rna)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded, np.where(np.isnan(values), np.uint32(0x7FFFFFFF), bits))


def from_tf32(bits: Array) -> Array:
    """Reads float32 bits as a tensor core does, which takes no notice of the lowest 13."""
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def _eight_bits(exponent_bits: int, *, infinities: bool) -> Array:
    """Returns the 256 numbers of a format with a sign, `exponent_bits`, and a mantissa in the rest."""
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    codes = np.arange(256)
    exponent, mantissa = (codes & 0x7F) >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    scaled = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    values = np.ldexp(scaled.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    if infinities:
        values[exponent == (1 << exponent_bits) - 1] = np.nan
        values[(codes & 0x7F) == ((1 << exponent_bits) - 1) << mantissa_bits] = np.inf
    else:
        values[(codes & 0x7F) == 0x7F] = np.nan
    signed: Array = np.where(codes >= 128, -values, values)
    return signed.astype(np.float32)


E4M3 = _eight_bits(4, infinities=False)
"""The float32 of each code."""
E5M2 = _eight_bits(5, infinities=True)


def to_eight_bits(values: Array, table: Array) -> Array:
    """Rounds float32 to the codes of `E4M3` or `E5M2`: the nearest, ties to even, beyond the largest the largest
    (satfinite); NaN becomes 0x7F."""
    finite = table[:128][np.isfinite(table[:128])].astype(np.float64)  # ascending, as their codes
    with np.errstate(invalid="ignore"):
        size = np.minimum(np.abs(values.astype(np.float64)), finite[-1])
    above = np.clip(np.searchsorted(finite, size), 1, len(finite) - 1)
    low, high = size - finite[above - 1], finite[above] - size
    up = (high < low) | ((high == low) & (above % 2 == 0))
    codes = np.where(up, above, above - 1) | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)
