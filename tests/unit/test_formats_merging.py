"""An adapter added to a base and rounded to the base's format again: what keeps its bits, and what becomes of the rest.

The oracle goes through the numbers one by one in numpy: it looks for the nearest value in a table of the format's grid
that continues beyond its largest code, and a block keeps its scale where no number would take one of the added values.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import reference_formats
from engine.kernels.formats import FORMATS, Format
from engine.quantization.encoding import encoding
from tests.support.format_parts import SPELLINGS, bits, drawn_parts, same_numbers, same_parts

NAMES = list(SPELLINGS)


def _decoded(of: Format, parts: dict[str, Tensor], columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(parts["codes"].shape[0], columns, dtype=dtype)
    encoding(of).decode(parts, out)
    return out


def _merged(of: Format, parts: dict[str, Tensor], b: Tensor, a: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    out = torch.empty(b.shape[0], a.shape[1], dtype=dtype)
    reference_formats.merged_decode(of, parts, b, a, scale, out)
    return out


def _factors(rows: int, columns: int, rank: int, size: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    b = torch.randn(rows, rank, generator=draw) * size
    return b.bfloat16(), torch.randn(rank, columns, generator=draw).bfloat16()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    rows=st.integers(1, 140),
    columns=st.integers(1, 140),
    seed=st.integers(0, 2**31),
    extreme=st.booleans(),
)
def test_unchanged_numbers_keep_their_parts(name: str, rows: int, columns: int, seed: int, extreme: bool) -> None:
    """Codes that no quantiser writes among them: -0, any code under a scale of 0 or of subnormal numbers."""
    of = SPELLINGS[name]
    parts = drawn_parts(of, rows, columns, seed, extreme=extreme)
    numbers = _decoded(of, parts, columns)
    assert same_parts(reference_formats.requantise(of, parts, numbers), parts)


@pytest.mark.parametrize("name", NAMES)
def test_every_code_under_every_scale_is_kept(name: str) -> None:
    """Scales under which all numbers are finite; NVFP4's products of scales are tiny, ordinary and very large."""
    of = SPELLINGS[name]
    for seed, of_matrix in enumerate((1e-38, 3.7, 1e35)):
        parts = drawn_parts(of, 256, 384, seed, extreme=True)
        if of.scale_dtype.itemsize == 1:
            largest = {"nvfp4": 127, "mxfp4": 252, "mxfp8": 246, "fp8_block": 246}[of.name]
            every = torch.arange(largest, dtype=torch.uint8).repeat(100)[: parts["scales"].numel()]
            parts["scales"] = every.view(parts["scales"].shape).view(of.scale_dtype)
        if of.name == "nvfp4":
            parts["tensor_scale"][:] = 1 / of_matrix if of.divides else of_matrix
        numbers = _decoded(of, parts, 384)
        assert numbers.isfinite().all()
        assert same_parts(reference_formats.requantise(of, parts, numbers), parts), seed


@pytest.mark.parametrize("name", ["int4", "int8", "fp8_channel", "fp8_block"])
def test_negative_scales_keep_their_parts(name: str) -> None:
    of = SPELLINGS[name]
    parts = drawn_parts(of, 130, 140, 3)
    parts["scales"] = -parts["scales"]
    assert same_parts(reference_formats.requantise(of, parts, _decoded(of, parts, 140)), parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_of_zeros_gives_the_base(name: str, dtype: torch.dtype) -> None:
    of = SPELLINGS[name]
    parts = drawn_parts(of, 130, 140, 4, extreme=True)
    b, a = _factors(130, 140, 4, 0.0)
    for scale in (2.0, -2.0):
        assert same_numbers(_merged(of, parts, b, a, scale, dtype), _decoded(of, parts, 140, dtype))
        assert same_parts(reference_formats.merge(of, parts, b, a, scale), parts)


@pytest.mark.parametrize("size", [1e-3, 0.05, 3.0])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_computed_with_is_what_is_written(name: str, size: float) -> None:
    """merged_decode, merge and requantise of the sum, and once more of what they gave."""
    of, rows, columns = SPELLINGS[name], 200, 160
    parts = drawn_parts(of, rows, columns, 5)
    b, a = _factors(rows, columns, 3, size)
    merged = reference_formats.merge(of, parts, b, a, 0.7)
    product = torch.zeros(rows, columns)
    for place in range(3):
        product = product + b[:, place, None].float() * a[place].float()
    numbers = _decoded(of, parts, columns) + product * 0.7
    assert same_parts(reference_formats.requantise(of, parts, numbers), merged)
    written = _decoded(of, merged, columns)
    assert same_numbers(_merged(of, parts, b, a, 0.7, torch.float32), written)
    assert same_numbers(_merged(of, parts, b, a, 0.7, torch.bfloat16), written.bfloat16())
    assert same_parts(reference_formats.requantise(of, merged, written), merged)
    if of.name == "nvfp4":
        assert torch.equal(merged["tensor_scale"], parts["tensor_scale"])


def test_the_product_is_summed_in_order() -> None:
    """2^24 + 1 is 2^24 in fp32, so that 2^24 + 1 - 2^24 is 0 from the first to the last, and 1 in other orders; and
    1 + 2^-12 squared, less 1 + 2^-11, is 0 where the product is rounded before it is added, and 2^-24 where it is not.
    """
    of = replace(FORMATS["int8"])
    parts = {"codes": torch.zeros(1, 2, dtype=torch.int8), "scales": torch.ones(1)}
    a = torch.tensor([[2.0**24, 1 + 2.0**-11], [1.0, 1 + 2.0**-12], [-(2.0**24), 0.0]])
    b = torch.tensor([[1.0, 1.0, 1.0]])
    assert _merged(of, parts, b, a, 1.0, torch.float32)[0, 0] == 0
    fine = {"codes": torch.zeros(1, 1, dtype=torch.int8), "scales": torch.full((1,), 2.0**-24)}
    a = torch.tensor([[-(1 + 2.0**-11)], [1 + 2.0**-12]])
    assert _merged(of, fine, torch.tensor([[1.0, 1 + 2.0**-12]]), a, 1.0, torch.float32)[0, 0] == 0


def test_a_scale_is_kept_up_to_half_a_step_beyond_the_largest_code() -> None:
    """For e2m1 under the scale 1: up to 7, which is rounded to 6. With 7.5 the largest, m / 2^e is in [3.5, 7) for e
    of 1: 7.5 / 2 = 3.75 is 4, so 8; 0.9 / 2 = 0.45 is 0.5, so 1. Under the kept scale 0.9 is 0.8 of the way from 0.5 to
    1, and the point of an old 1 in the third column is 0.93 of it."""
    of = FORMATS["mxfp4"]
    parts = {"codes": torch.zeros(2, 16, dtype=torch.uint8), "scales": torch.full((2, 1), 127, dtype=torch.uint8)}
    parts["codes"][:] = 2
    numbers = _decoded(of, parts, 32)
    numbers[0, 0], numbers[0, 2], numbers[1, 0], numbers[1, 2] = -7.0, 0.9, 7.5, 0.9
    new = reference_formats.requantise(of, parts, numbers)
    assert new["scales"].tolist() == [[127], [128]]
    assert _decoded(of, new, 32)[:, :4].tolist() == [[-6.0, 0.0, 0.5, 0.0], [8.0, 0.0, 1.0, 0.0]]
    ends = {
        "int4": (7.5, -8.5, 7.0, -8.0),
        "int8": (127.5, -128.5, 127.0, -128.0),
        "fp8_channel": (464, -464, 448, -448),
    }
    for name, (high, low, high_kept, low_kept) in ends.items():
        row = replace(FORMATS[name], group=0)
        parts = drawn_parts(row, 2, 8, 1)
        parts["scales"].fill_(1.0)
        numbers = _decoded(row, parts, 8)
        numbers[0, 0], numbers[0, 1], numbers[1, 0] = high, low, high * 1.01
        new = reference_formats.requantise(row, parts, numbers)
        assert _decoded(row, new, 8)[0, :2].tolist() == [high_kept, low_kept], name
        assert new["scales"].flatten()[0] == 1 and new["scales"].flatten()[1] > 1, name


def test_a_zero_under_a_scale_of_zero_is_kept_until_a_number_is_there() -> None:
    of = FORMATS["nvfp4"]
    parts = drawn_parts(of, 2, 32, 1)
    parts["scales"] = torch.zeros(2, 2).to(torch.float8_e4m3fn)
    numbers = _decoded(of, parts, 32)
    numbers[1, 16:] = 0.0
    numbers[1, 20] = float(parts["tensor_scale"][0]) * 12.0
    new = reference_formats.requantise(of, parts, numbers)
    assert new["scales"].float().tolist() == [[0.0, 0.0], [0.0, 2.0]]
    assert torch.equal(new["codes"][0], parts["codes"][0]) and torch.equal(new["codes"][1, :8], parts["codes"][1, :8])
    assert new["codes"][1, 8:].tolist() == [0, 0, 7, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_shows(name: str, bad: float) -> None:
    """Its block becomes NaN, so that the loss does; other blocks are as they would be."""
    of = SPELLINGS[name]
    parts = drawn_parts(of, 256, 256, 6)
    b, a = _factors(256, 256, 2, 0.0)
    b[140, 0], a[0, 130] = bad, 1.0
    a[0] = 0.0
    a[0, 130] = 1.0
    out = _merged(of, parts, b, a, 1.0, torch.float32)
    assert out[140, 130].isnan()
    clean = _decoded(of, parts, 256)
    broken = out.isnan()
    assert torch.equal(out[~broken], clean[~broken])
    # nan * 0 and inf * 0 are NaN: the whole row is, and what shares a scale with it
    expected = torch.zeros_like(broken)
    expected[128 : 256 if of.rows > 1 else 129] = of.rows > 1
    expected[140] = True
    assert torch.equal(broken, expected)


@pytest.mark.parametrize("name", NAMES)
def test_an_infinity_makes_its_block_no_numbers(name: str) -> None:
    of = SPELLINGS[name]
    parts = drawn_parts(of, 2, 300, 6)
    numbers = _decoded(of, parts, 300)
    numbers[1, 0] = float("-inf")
    new = _decoded(of, reference_formats.requantise(of, parts, numbers), 300)
    width = of.group or 300
    assert new[1, :width].isnan().all()
    assert torch.equal(new[0, width:], numbers[0, width:]) and torch.equal(new[1, width:], numbers[1, width:])


def test_blocks_cut_into_granules_are_rounded_as_whole_ones() -> None:
    whole, cut = FORMATS["fp8_block"], SPELLINGS["fp8_block cut"]
    parts = drawn_parts(whole, 200, 300, 7)
    repeated = {"codes": parts["codes"], "scales": parts["scales"].repeat_interleave(4, 0)[:7]}
    b, a = _factors(200, 300, 4, 40.0)
    ours, theirs = (reference_formats.merge(of, held, b, a, 1.0) for of, held in ((cut, repeated), (whole, parts)))
    assert torch.equal(bits(ours["codes"]), bits(theirs["codes"]))
    assert torch.equal(ours["scales"], theirs["scales"].repeat_interleave(4, 0)[:7])
    assert not torch.equal(theirs["scales"], parts["scales"])


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _grid(of: Format, zero: int) -> list[float]:
    """The values of all codes under a scale of 1, and one more at each end."""
    if of.name in ("int4", "int8"):
        low, high = (-zero, 15 - zero) if of.name == "int4" else (-128, 127)
        return [float(value) for value in range(low - 1, high + 2)]
    positive = [*E2M1, 8.0] if of.name in ("nvfp4", "mxfp4") else _e4m3()
    return sorted({*positive, *(-value for value in positive)})


def _e4m3() -> list[float]:
    small = [mantissa * 2.0**-9 for mantissa in range(8)]
    normal = [(1 + mantissa / 8) * 2.0**exponent for exponent in range(-6, 9) for mantissa in range(8)]
    return [*small, *normal]  # the last, 480, is e4m3's NaN


def _nearest(of: Format, quotient: float, grid: np.ndarray, *, continued: bool) -> float:
    """The value in the grid, halves to the even code, but not to one that is beyond the format's."""
    distance = np.abs(grid - quotient)
    best = list(np.flatnonzero(distance == distance.min()))
    if continued:
        best = [place for place in best if 0 < place < len(grid) - 1] or best
    odd = _odd(of, grid)
    return float(grid[min(best, key=lambda place: odd[place])])


def _bound(old: np.float32, scale: np.float32, column: int) -> float:
    """The share of the way between two codes beyond which the farther is taken, by the old number, its scale, and its
    column in the block."""
    (bits,) = struct.unpack("<I", struct.pack("<f", abs(old) + scale))
    mixed = bits * 0x9E3779B1 % 2**32
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA77 % 2**32
    return ((mixed // 2**20 + 2531 * column) % 4096 + 0.5) / 4096


def _beyond(of: Format, quotient: float, grid: np.ndarray, bound: float) -> float:
    """The value in the grid, of the two that the quotient lies between; the farther from 0, of integers the upper."""
    integers = of.name in ("int4", "int8")
    size = float(np.clip(quotient if integers else abs(quotient), 0 if not integers else grid[0], grid[-1]))
    below = max(value for value in grid if value <= size)
    above = min((value for value in grid if value > size), default=below)
    value = above if size - below > bound * (above - below) else below
    return float(value if integers else np.copysign(value, quotient))


def _expected(of: Format, parts: dict[str, Tensor], numbers: Tensor, fresh: Any) -> Tensor:
    """Goes through blocks and numbers; `fresh` gives the worth of a code of 1, and the zero point, of a new block."""
    rows, columns = numbers.shape
    base, out = _decoded(of, parts, columns), torch.empty_like(numbers)
    width = of.group or columns
    for top in range(0, rows, of.rows):
        for left in range(0, columns, width):
            place = slice(top, min(top + of.rows, rows)), slice(left, min(left + width, columns))
            block, old = numbers[place].numpy(), base[place].numpy()
            zero = int(parts["zeros"][top, left // width]) if of.has_zero_points else 8
            scale = np.float32(reference_formats.row_scales(of, parts, rows)[top, left // width])
            grid = np.array(_grid(of, zero))
            taken = [_nearest(of, float(x / scale), grid, continued=True) for x in block.flat]
            fits = all(grid[0] < t < grid[-1] or x == w for t, x, w in zip(taken, block.flat, old.flat, strict=True))
            if fits or of.keeps_scales:
                bounds = [_bound(w, scale, column) for row in old for column, w in enumerate(row)]
                pairs = zip(block.flat, bounds, strict=True)
                taken = [_beyond(of, float(x / scale), grid[1:-1], bound) for x, bound in pairs]
            else:
                scale, zero = fresh(block, top)
                grid = np.array(_grid(of, zero))[1:-1]
                taken = [_nearest(of, float(x / scale), grid, continued=False) for x in block.flat]
            fits |= of.keeps_scales
            worth = [
                w if fits and x == w else np.float32(t) * scale
                for t, x, w in zip(taken, block.flat, old.flat, strict=True)
            ]
            out[place] = torch.tensor(np.array(worth, dtype=np.float32).reshape(block.shape))
    return out


def _odd(of: Format, grid: np.ndarray) -> np.ndarray:
    if of.name in ("int4", "int8"):
        return grid % 2 != 0
    _, exponent = np.frexp(np.abs(grid))  # for numbers in [0.5, 1) * 2^exponent
    steps, least = (4, -1) if of.name in ("nvfp4", "mxfp4") else (16, -9)
    step = 2.0 ** np.maximum(exponent - np.log2(steps), least)
    return np.round(np.abs(grid) / step) % 2 != 0


def _stored(value: float, dtype: torch.dtype) -> np.float32:
    rounded = torch.tensor(value, dtype=torch.float32).to(dtype).float()
    return np.float32(rounded if rounded != 0 else torch.finfo(dtype).eps)


def _fresh(of: Format, parts: dict[str, Tensor]) -> Any:
    """Scales as the table in `engine.kernels.reference_formats` has them, from Python's own arithmetic."""

    def scale(block: np.ndarray, row: int) -> tuple[np.float32, int]:
        largest = np.float32(np.abs(block).max())
        if of.name == "nvfp4":
            g = np.float32(parts["tensor_scale"][row])
            if of.divides:
                raw = min(np.float32(largest / np.float32(6)) * g, np.float32(448))
            else:
                raw = min(max(largest / np.float32(np.float32(6) * g), np.float32(2.0**-9)), np.float32(448))
            stored = _stored(float(raw), torch.float8_e4m3fn)
            return (stored / g if of.divides else stored * g), 8
        if of.name in ("mxfp4", "mxfp8"):
            low = 3.5 if of.name == "mxfp4" else 224.0
            exponent = next(e for e in range(-127, 128) if float(largest) / 2.0**e < 2 * low)
            return np.float32(2.0**exponent), 8
        if of.has_zero_points:
            low, high = min(np.float32(block.min()), np.float32(0)), max(np.float32(block.max()), np.float32(0))
            span = np.float32(np.float32(high - low) / np.float32(15))
            return _stored(float(span), of.scale_dtype), int(np.round(np.float32(-low / span)))
        raw = largest / np.float32({"int4": 7.5, "int8": 127}.get(of.name, 448))
        if of.scale_dtype == torch.uint8:
            return np.float32(2.0 ** np.ceil(np.log2(float(raw)))), 8
        return _stored(float(raw), of.scale_dtype), 8

    return scale


@pytest.mark.parametrize("size", [0.02, 0.5, 5.0])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "fp8_block cut"])
def test_every_number_has_a_code_beside_it_under_its_blocks_scale(name: str, size: float) -> None:
    of = SPELLINGS[name]
    rows, columns = (130, 16) if of.rows > 1 else (12, 140)
    parts = drawn_parts(of, rows, columns, 8)
    base = _decoded(of, parts, columns)
    draw = torch.Generator().manual_seed(9)
    change = torch.randn(rows, columns, generator=draw) * base.abs().mean() * size
    numbers = base + change * (torch.rand(rows, columns, generator=draw) < 0.7)
    expected = _expected(of, parts, numbers, _fresh(of, parts))
    assert torch.equal(_decoded(of, reference_formats.requantise(of, parts, numbers), columns), expected)
    assert (expected != base).float().mean() > 0.01 or size < 0.1


@pytest.mark.parametrize("name", NAMES)
def test_a_small_change_is_kept_in_the_mean(name: str) -> None:
    """Numbers go a share of the way to their next code, and that share of them takes it; of the nearest codes none
    would below a half, and all above."""
    of = SPELLINGS[name]
    parts = drawn_parts(of, 128, 512, 3)
    packed = parts["codes"].dtype == torch.uint8
    codes = parts["codes"].view(torch.uint8) & (0xBB if packed else 0xBF)  # to each of which 1 may be added
    after = (codes + (0x11 if packed else 1)).view(parts["codes"].dtype)
    parts["codes"] = codes.view(parts["codes"].dtype)
    base, following = (_decoded(of, {**parts, "codes": held}, 512) for held in (parts["codes"], after))
    for share in (0.02, 0.3, 0.9):
        numbers = base + share * (following - base)
        new = _decoded(of, reference_formats.requantise(of, parts, numbers), 512)
        taken = new == following
        assert torch.equal(new, torch.where(taken, following, base))
        assert abs(float(taken.float().mean()) - share) < 0.01
