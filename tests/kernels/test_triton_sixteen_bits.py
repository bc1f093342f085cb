"""The interpreter's arithmetic in 16 bits, as `sixteen_bits` makes it and kernel tests rely on it, against torch's."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from tests.kernels.comparing import interpreted_only
from tests.kernels.sixteen_bits import bfloat16_bits, compute_as_on_a_gpu

pytestmark = interpreted_only
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
OPERATIONS = ("add", "sub", "mul", "truediv", "lt", "ge", "eq")


@InterpretedFunction
def _cast_kernel(from_ptr, to_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < size), mask=at < size)


@InterpretedFunction
def _pair_kernel(left_ptr, right_ptr, to_ptr, size, OPERATION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    left, right = tl.load(left_ptr + at, mask=at < size), tl.load(right_ptr + at, mask=at < size)
    if OPERATION == "add":
        result = left + right
    elif OPERATION == "sub":
        result = left - right
    elif OPERATION == "mul":
        result = left * right
    elif OPERATION == "truediv":
        result = left / right
    elif OPERATION == "lt":
        result = left < right
    elif OPERATION == "ge":
        result = left >= right
    else:
        result = left == right
    tl.store(to_ptr + at, result, mask=at < size)


@InterpretedFunction
def _dot_kernel(left_ptr, right_ptr, to_ptr):
    at = tl.arange(0, 16)
    place = at[:, None] * 16 + at[None, :]
    tl.store(to_ptr + place, tl.dot(tl.load(left_ptr + place), tl.load(right_ptr + place)))


@InterpretedFunction
def _sum_kernel(from_ptr, to_ptr):
    tl.store(to_ptr, tl.sum(tl.load(from_ptr + tl.arange(0, 16)), 0))


@pytest.fixture(autouse=True)
def as_on_a_gpu(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_as_on_a_gpu(monkeypatch)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    _cast_kernel[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), BLOCK=4096)
    return out


def _assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    """NaN may have any bits, as long as it is one."""
    assert ours.dtype == theirs.dtype and torch.equal(ours.isnan(), theirs.isnan())
    as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.dtype.itemsize]
    assert torch.equal(*(one[~ours.isnan()].view(as_bits) for one in (ours, theirs)))


def _numbers() -> Tensor:
    """fp32 bits drawn at random (every exponent, subnormals, NaN), ties between two numbers of 16 bits, the ends."""
    drawn = torch.randint(-(2**31), 2**31, (20000,), generator=torch.Generator().manual_seed(0))
    exponents = torch.arange(256)[:, None] << 23
    ties_of_bfloat16, ties_of_float16 = ((torch.arange(32) << bit) + (1 << (bit - 1)) for bit in (16, 13))
    beside = torch.tensor([-1, 0, 1])
    ties = torch.cat([(exponents + one)[:, :, None] + beside for one in (ties_of_bfloat16, ties_of_float16)])
    bits = torch.cat((drawn, ties.flatten(), ties.flatten() - 2**31)).to(torch.int32)
    ends = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0, 65520.0, 65519.996, 3.3895e38, 3.4e38]
    return torch.cat((bits.view(torch.float32), torch.tensor(ends)))


@DTYPES
def test_casts_are_torchs(dtype: torch.dtype) -> None:
    x = _numbers()
    _assert_same_bits(_cast(x, dtype), x.to(dtype))
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    _assert_same_bits(_cast(every, torch.float32), every.float())


def test_ties_go_to_the_even_neighbour() -> None:
    """By hand: bfloat16 has 7 bits after the point, so around 1 they lie 1/128 apart."""
    x = np.array([1 + 1 / 256, 1 + 3 / 256, 1 + 1 / 256 + 2**-20, -1 - 3 / 256, 2 - 1 / 256, 3.4e38], np.float32)
    rounded = torch.from_numpy(bfloat16_bits(x)).view(torch.bfloat16).tolist()
    assert rounded == [1.0, 1 + 2 / 128, 1 + 1 / 128, -1 - 2 / 128, 2.0, float("inf")]


def test_e4m3_is_torchs() -> None:
    x = _numbers().clamp(-448, 448)
    _assert_same_bits(_cast(x, torch.float8_e4m3fn).float(), x.to(torch.float8_e4m3fn).float())
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    _assert_same_bits(_cast(every, torch.float32), every.float())


@DTYPES
@pytest.mark.parametrize("operation", OPERATIONS)
def test_elementwise_arithmetic_is_torchs(dtype: torch.dtype, operation: str) -> None:
    left, right = (_numbers()[:4096].view(torch.int32).to(torch.int16).view(dtype).roll(n) for n in (0, 1))
    right[:64] = left[:64]
    theirs = getattr(operator, operation)(left, right)
    ours = torch.empty(4096, dtype=theirs.dtype)
    with np.errstate(all="ignore"):
        _pair_kernel[(1,)](left, right, ours, 4096, OPERATION=operation, BLOCK=4096)
    assert torch.equal(ours, theirs) if theirs.dtype == torch.bool else _assert_same_bits(ours, theirs) is None


@DTYPES
def test_a_dot_is_summed_in_fp32(dtype: torch.dtype) -> None:
    left, right = (torch.randn(16, 16, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1, 2))
    out = torch.empty(16, 16)
    _dot_kernel[(1,)](left, right, out)
    torch.testing.assert_close(out, (left.double() @ right.double()).float(), rtol=0, atol=1e-5)


def test_a_sum_in_bfloat16_is_refused() -> None:
    with pytest.raises(Exception, match="widen it first"):
        _sum_kernel[(1,)](torch.ones(16, dtype=torch.bfloat16), torch.empty(1))
