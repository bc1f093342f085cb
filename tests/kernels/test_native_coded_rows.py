"""Products of few rows with matrices in vendors' formats, by the compiled kernels.

The numbers of a matrix are those that it is decoded to by the specification, which is compared with the vendors'
libraries in tests/unit, and the products those of torch in fp64 with them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels import reference_formats
from engine.kernels.formats import FORMATS, Format
from engine.kernels.native.formats import few_rows_product
from engine.quantization.encoding import encoding
from tests.kernels.native_support import ON_EVERY_INSTRUCTION_SET, assert_accurate, assert_same_on_any_threads, widened
from tests.support.format_parts import SPELLINGS, drawn_parts

pytestmark = ON_EVERY_INSTRUCTION_SET

KINDS = {
    **SPELLINGS,
    "fp8_block exponents cut": replace(FORMATS["fp8_block"], scale_dtype=torch.uint8, granule=64),
    "int4 half zeros": replace(FORMATS["int4"], group=20, has_zero_points=True, scale_dtype=torch.float16),
    "int4 single": replace(FORMATS["int4"], group=7, scale_dtype=torch.float32),
}
"""Groups of no whole vectors, and ones that begin inside a byte, among them."""
SHAPES = ((5, 123), (1, 64), (3, 1), (0, 64), (4, 0), (60, 300), (7, 1600))
DTYPES = (torch.float32, torch.bfloat16)
of_every_kind = pytest.mark.parametrize("name", list(KINDS))


def _decoded(of: Format, parts: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    numbers = torch.zeros(shape, dtype=dtype)
    reference_formats.block_decode(of, parts, numbers)
    return numbers


def _rows(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)


def _product(of: Format, parts: dict[str, Tensor], x: Tensor, rows: int) -> Tensor:
    """Rows of both factors and of the result with gaps, which stay as they are."""
    out = widened(x.new_zeros(x.shape[0], rows))
    few_rows_product(of, parts, widened(x), out)
    beside = torch.as_strided(out, (x.shape[0], 5), out.stride(), out.storage_offset() + rows)
    assert bool(beside.isnan().all()), "wrote beyond the row"
    return out.clone()


def _plain(of: Format, parts: dict[str, Tensor], x: Tensor, rows: int) -> Tensor:
    out = x.new_empty(x.shape[0], rows)
    few_rows_product(of, parts, x, out)
    return out


@of_every_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_numbers(name: str, dtype: torch.dtype) -> None:
    """Products with unit vectors are the decoded numbers, without an error: all codes, and scales of any size.

    Rows with infinite numbers are left out, as 0 times those is no number.
    """
    of = KINDS[name]
    for seed, shape in enumerate(SHAPES):
        for extreme in (False, True):
            parts = drawn_parts(of, *shape, seed, extreme=extreme)
            found = _product(of, parts, torch.eye(shape[1], dtype=dtype)[:200], shape[0])
            numbers = _decoded(of, parts, shape, dtype)
            finite = numbers.isfinite().all(1)
            assert extreme or bool(finite.all())
            assert torch.equal(found.t()[finite], numbers[finite, :200]), (shape, extreme)


@of_every_kind
def test_products(name: str) -> None:
    """Every height of a tile and more rows than one has, against fp64."""
    of = KINDS[name]
    for seed, shape in enumerate(SHAPES):
        parts = drawn_parts(of, *shape, seed)
        for dtype in DTYPES:
            numbers = _decoded(of, parts, shape, dtype)
            for count in (0, 1, 2, 3, 5, 8, 17):
                x = _rows(count, shape[1], dtype)
                ours, torchs = _product(of, parts, x, shape[0]), (x.float() @ numbers.t().float()).to(dtype)
                terms = x.abs().double() @ numbers.t().abs().double()
                assert_accurate(ours, torchs, x.double() @ numbers.t().double(), terms)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "int4 single"])
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    of, parts = KINDS[name], drawn_parts(KINDS[name], 60, 300, 3)
    for dtype in DTYPES:
        x = _rows(13, 300, dtype)
        whole = _product(of, parts, x, 60)
        for count in (1, 2, 4, 7):
            assert torch.equal(_product(of, parts, x[:count], 60), whole[:count])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "int4", "fp8_channel"])
def test_numbers_that_are_none(name: str) -> None:
    """A NaN among the scales, and an infinite one, reach the outputs of their rows alone, also in bfloat16."""
    of = KINDS[name]
    for value in (255, 127):
        parts = drawn_parts(of, 40, 64, 0)
        scales = parts["scales"].view(torch.uint8).view(40, -1)
        scales[7, -parts["scales"].itemsize :] = value
        for dtype in DTYPES:
            numbers, x = _decoded(of, parts, (40, 64), dtype), _rows(3, 64, dtype).abs() + 1
            expected = (x.float() @ numbers.t().float()).isfinite()
            assert torch.equal(_product(of, parts, x, 40).isfinite(), expected), (value, dtype)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_block", "int4"])
def test_parts_that_are_cut(name: str) -> None:
    """Slices of parts are read as they lie."""
    of = KINDS[name]
    cut = encoding(of).cut(drawn_parts(of, 384, 512, 0), slice(128, 256), slice(128, 384))
    x = torch.eye(256)[:100]
    assert torch.equal(_product(of, cut, x, 128), _decoded(of, cut, (128, 256), torch.float32).t()[:100])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8_block", "int4 zeros"])
def test_any_number_of_threads(name: str) -> None:
    of, parts = KINDS[name], drawn_parts(KINDS[name], 400, 200, 0)

    def run() -> tuple[Tensor, ...]:
        return tuple(_product(of, parts, _rows(6, 200, dtype), 400) for dtype in DTYPES)

    assert_same_on_any_threads(run)


def test_rows_with_gaps() -> None:
    """As torch's product takes them: columns of a matrix, and one row for all."""
    of, parts = KINDS["nvfp4"], drawn_parts(KINDS["nvfp4"], 40, 64, 0)
    for x in (_rows(64, 3, torch.float32).t(), _rows(1, 64, torch.float32).expand(3, -1)):
        assert torch.equal(_product(of, parts, x.contiguous(), 40), _plain(of, parts, x, 40))


def test_another_dtype() -> None:
    """There is no compiled code for float16, and the matrix is decoded."""
    of, parts = KINDS["nvfp4"], drawn_parts(KINDS["nvfp4"], 40, 64, 0)
    x = torch.eye(64, dtype=torch.float16)
    assert torch.equal(_product(of, parts, x, 40), _decoded(of, parts, (40, 64), torch.float16).t())
