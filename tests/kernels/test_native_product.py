"""The compiled product against torch's in fp64, with torch in fp32 as the measure of the error allowed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.ops.native.loader import native_status, select
from engine.ops.native.product import FEWEST, multiply, product
from tests.kernels.native_support import INSTRUCTION_SETS, assert_accurate, assert_same_on_any_threads, widened

pytestmark = pytest.mark.skipif(not native_status().available, reason=native_status().reason)

SHAPES = (
    (1, 1, 1),
    (0, 8, 8),
    (5, 7, 0),
    (7, 130, 33),
    (97, 300, 257),
    (110, 65, 2600),
    (13, 4200, 70),
)
"""(rows, columns, depth): one element; empty; remainders; several parts of the depth; wide blocks of columns."""


@pytest.fixture(params=INSTRUCTION_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    select(request.param)
    yield
    select(None)


def _operands(rows: int, columns: int, depth: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + columns + depth)
    return torch.randn(rows, depth, generator=generator), torch.randn(depth, columns, generator=generator)


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_product(rows: int, columns: int, depth: int, transposed: bool) -> None:
    left, right = _operands(rows, columns, depth)
    kept = widened(right.t()).t() if transposed else widened(right)
    out = widened(torch.zeros(rows, columns))
    assert multiply(widened(left), kept, out=out) is out
    assert_accurate(out, left @ right, left.double() @ right.double())
    assert out.untyped_storage().size() == 4 * rows * (columns + 5)
    beside = out.as_strided((rows, 5), (columns + 5, 1), columns)
    assert beside.isnan().all(), "nothing is written beside the product"
    assert torch.equal(multiply(left, kept), out)


def test_long_sums_of_one_sign() -> None:
    """Nothing cancels, so a running sum that is too long shows: its rounding grows with what it holds."""
    left, right = (x.abs() for x in _operands(40, 70, 1100))
    assert_accurate(multiply(left, right), left @ right, left.double() @ right.double())


def test_threads_do_not_change_the_result() -> None:
    left, right = _operands(230, 300, 1400)
    assert_same_on_any_threads(lambda: (multiply(left, right), multiply(left, right.t().contiguous().t())))


def test_other_rows_do_not_change_a_row() -> None:
    left, right = _operands(200, 140, 1400)
    assert torch.equal(multiply(left, right)[30:107], multiply(left[30:107], right))


def test_a_non_finite_input_is_not_hidden() -> None:
    left, right = _operands(9, 20, 40)
    left[3, 5] = float("nan")
    out = multiply(left, right)
    assert out[3].isnan().all() and out[:3].isfinite().all() and out[4:].isfinite().all()


def test_what_it_is_not_made_for_goes_to_torch() -> None:
    left, right = _operands(FEWEST, FEWEST, FEWEST)
    columns = right.t().contiguous().t()
    assert_accurate(product(left, columns), left @ columns, left.double() @ columns.double())
    assert torch.equal(product(left, right), left @ right)
    assert torch.equal(product(left[:3], right), left[:3] @ right)
    assert torch.equal(product(left.bfloat16(), right.bfloat16()), left.bfloat16() @ right.bfloat16())
    twice = right.repeat_interleave(2, 1).repeat_interleave(2, 0)[::2, ::2]
    assert torch.equal(product(left, twice), left @ twice)
