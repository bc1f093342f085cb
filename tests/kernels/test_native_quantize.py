"""The compiled codes and decoding of quantised weights, bit for bit those of the plain-torch specification.

The specification itself is compared with bitsandbytes, torch's casts and arithmetic by hand in tests/unit.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels import reference_quantize
from engine.kernels.native.quantize import NATIVE_ARITHMETIC
from engine.quantization.encoding import encoding
from tests.kernels.native_support import ON_EVERY_INSTRUCTION_SET, assert_same_on_any_threads, widened

pytestmark = ON_EVERY_INSTRUCTION_SET

SHAPES = ((5, 123), (1, 64), (3, 1), (0, 64), (37, 8), (7, 320), (2, 64 * 300 + 6), (300, 130))
names = pytest.mark.parametrize("name", ["nf4", "int8"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def _weight(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of different sizes, one of zeros, one of numbers that have no reciprocal."""
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator) * (torch.rand(rows, 1, generator=generator) + 0.01)
    if rows > 3:
        weight[1], weight[2] = 0, weight[2] * 1e-39
    return weight.to(dtype)


@names
@dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_and_weights(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = _weight(*shape, dtype)
    ours, plain = encoding(name, NATIVE_ARITHMETIC), encoding(name)
    expected = plain.encode(weight)
    for given in (weight, widened(weight), weight.t().contiguous().t()):
        for part, tensor in ours.encode(given).items():
            assert torch.equal(tensor, expected[part]), part
    for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
        decoded, out = torch.empty(shape, dtype=out_dtype), widened(torch.zeros(shape, dtype=out_dtype))
        plain.decode(expected, decoded)
        ours.decode(expected, out)
        assert torch.equal(out, decoded)
        beside = torch.as_strided(out, (shape[0], 5), out.stride(), shape[1])
        assert bool(beside.isnan().all()), "wrote beyond the row"


def test_numbers_on_and_beside_the_bounds_of_the_table() -> None:
    """Every bound, and the fp32 numbers next to it, against torch's search."""
    bounds = reference_quantize.nf4_bounds(torch.device("cpu"))
    above, below = torch.nextafter(bounds, torch.tensor(2.0)), torch.nextafter(bounds, torch.tensor(-2.0))
    weight = torch.cat((bounds, above, below, torch.ones(1)))[None]
    codes = NATIVE_ARITHMETIC.nf4_codes(weight, torch.ones(1, 1))
    nibbles = torch.stack((codes >> 4, codes & 15), -1).view(-1)[:45]
    low = torch.arange(15)
    assert nibbles.tolist() == [*low.tolist(), *(low + 1).tolist(), *low.tolist()]


def test_halves_go_to_even() -> None:
    weight = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.0] + [3.5] * 30])
    codes = NATIVE_ARITHMETIC.int8_codes(weight, torch.tensor([127.0]))
    assert codes[0, :8].tolist() == [0, 2, 2, 0, -2, 126, 127, 4]


@names
@dtypes
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize("column", [0, 63, 64, 129])
def test_what_is_not_finite_is_refused(name: str, dtype: torch.dtype, value: float, column: int) -> None:
    weight = _weight(40, 130, dtype)
    weight[33, column] = value
    with pytest.raises(UserError, match="not finite in row 33"):
        encoding(name, NATIVE_ARITHMETIC).encode(weight)


@names
@dtypes
def test_parts_that_are_cut(name: str, dtype: torch.dtype) -> None:
    """Slices of parts are decoded as they lie."""
    weight = _weight(50, 64 * 9, dtype)
    plain = encoding(name)
    cut = plain.cut(plain.encode(weight), slice(7, 41), slice(128, 448))
    expected, out = torch.empty(34, 320), torch.empty(34, 320)
    plain.decode(cut, expected)
    encoding(name, NATIVE_ARITHMETIC).decode(cut, out)
    assert torch.equal(out, expected)


@names
def test_any_number_of_threads(name: str) -> None:
    weight = _weight(400, 200, torch.float32)
    code = encoding(name, NATIVE_ARITHMETIC)

    def run() -> tuple[Tensor, ...]:
        parts, out = code.encode(weight), torch.empty(weight.shape)
        code.decode(parts, out)
        return (*parts.values(), out)

    assert_same_on_any_threads(run)
