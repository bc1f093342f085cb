"""Casts to numbers of 8 and 16 bits, against torch's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.ptx import numbers


def _values() -> np.ndarray:
    """Random bits of float32, numbers of every size, and those halfway between two of the narrow formats."""
    bits = np.random.default_rng(1).integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    sizes = np.random.default_rng(2).standard_normal(20000) * np.exp2(np.random.default_rng(3).integers(-30, 20, 20000))
    halves = []
    for table in (numbers.E4M3, numbers.E5M2):
        known = np.sort(table[np.isfinite(table)])
        halves.append((known[1:] + known[:-1]) / 2)
    short = np.arange(0, 2**16, dtype=np.uint32) << 16
    halfway = (short | 0x8000).view(np.float32)
    edges = np.array([0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, 57344, 61440, 65504, 65520], np.float32)
    return np.concatenate([bits, sizes.astype(np.float32), *halves, halfway, short.view(np.float32), edges])


@pytest.mark.parametrize(
    ("narrow", "widen", "dtype"),
    [
        (numbers.to_bfloat16, numbers.from_bfloat16, torch.bfloat16),
        (numbers.to_float16, numbers.from_float16, torch.float16),
    ],
    ids=["bfloat16", "float16"],
)
def test_sixteen_bits(
    narrow: Callable[[np.ndarray], np.ndarray], widen: Callable[[np.ndarray], np.ndarray], dtype: torch.dtype
) -> None:
    values = _values()
    ours = widen(narrow(values))
    torchs = torch.from_numpy(values).to(dtype)
    np.testing.assert_array_equal(ours, torchs.float().numpy())
    finite = ~np.isnan(values)
    assert (narrow(values)[finite] == torchs.view(torch.int16).numpy().view(np.uint16)[finite]).all()
    assert (narrow(values)[~finite] == 0x7FFF).all()


@pytest.mark.parametrize(
    ("table", "dtype", "largest"),
    [(numbers.E4M3, torch.float8_e4m3fn, 448), (numbers.E5M2, torch.float8_e5m2, 57344)],
    ids=["e4m3", "e5m2"],
)
def test_eight_bits(table: np.ndarray, dtype: torch.dtype, largest: float) -> None:
    """Beyond the largest number, where torch has NaN or infinity, a GPU's cast (satfinite) has the largest one."""
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(table, codes.view(dtype).float().numpy())
    values = _values()
    torchs = torch.from_numpy(np.clip(values, -largest, largest)).to(dtype).view(torch.uint8).numpy()
    finite = ~np.isnan(values)
    ours = numbers.to_eight_bits(values, table)
    np.testing.assert_array_equal(ours[finite], torchs[finite])
    assert (ours[~finite] == 0x7F).all()


def test_tf32_rounds_ties_away() -> None:
    values = np.array([1 + 2**-11, 1 + 2**-11 - 2**-20, -(1 + 2**-11), 1 + 3 * 2**-11, np.inf], np.float32)
    expected = np.array([1 + 2**-10, 1, -(1 + 2**-10), 1 + 2**-9, np.inf], np.float32)
    np.testing.assert_array_equal(numbers.to_tf32(values).view(np.float32), expected)
    np.testing.assert_array_equal(numbers.from_tf32(np.array([1 + 2**-11], np.float32).view(np.uint32)), [1])
