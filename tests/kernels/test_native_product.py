"""The compiled products against torch's in fp64, with torch in fp32 as the measure of the error allowed."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from engine.kernels.native import loader
from engine.kernels.native import product as native_product
from engine.kernels.native.product import (
    FEWEST,
    MOST_OF_FEW,
    add_product,
    add_transposed,
    has_tiles,
    multiply,
    multiply_by_tiles,
    multiply_few_rows,
    product,
)
from tests.kernels.native_support import (
    INSTRUCTION_SETS,
    assert_accurate,
    assert_same_on_any_threads,
    needs_native,
    widened,
)

pytestmark = needs_native

SHAPES = (
    (1, 1, 1),
    (0, 8, 8),
    (5, 7, 0),
    (7, 130, 33),
    (97, 300, 257),
    (110, 65, 2600),
    (13, 4200, 70),
    (2090, 40, 530),
)
"""(rows, columns, depth): one element; empty; remainders; several parts of the depth; many columns; many rows."""

Multiply = Callable[..., Tensor]


def _few_rows(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    kept = right if right.stride(0) == 1 else right.t().contiguous().t()
    return multiply_few_rows(left, kept, out=out)


KERNELS = (*((name, way) for name in INSTRUCTION_SETS for way in ("vectors", "few rows")), ("avx512", "tiles"))


@pytest.fixture(params=KERNELS, ids="-".join)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Multiply:
    """Each kernel that this processor can run."""
    instruction_set, way = request.param
    if way == "tiles":
        if not has_tiles():
            pytest.skip("this processor, system or compiler has no AMX tiles")
        return multiply_by_tiles
    monkeypatch.setattr(loader, "best_instruction_set", lambda: instruction_set)
    return multiply if way == "vectors" else _few_rows


def _operands(rows: int, columns: int, depth: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + columns + depth)
    return torch.randn(rows, depth, generator=generator), torch.randn(depth, columns, generator=generator)


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_product(rows: int, columns: int, depth: int, transposed: bool, kernel: Multiply) -> None:
    left, right = _operands(rows, columns, depth)
    kept = widened(right.t()).t() if transposed else widened(right)
    out = widened(torch.zeros(rows, columns))
    assert kernel(widened(left), kept, out=out) is out
    assert_accurate(out, left @ right, left.double() @ right.double())
    assert out.untyped_storage().size() == 4 * rows * (columns + 5)
    beside = out.as_strided((rows, 5), (columns + 5, 1), columns)
    assert beside.isnan().all(), "nothing is written beside the product"
    assert torch.equal(kernel(left, kept), out)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(("rows", "columns", "depth"), [*SHAPES, (4200, 40, 20)])
def test_a_gradient_is_added(
    rows: int, columns: int, depth: int, instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "best_instruction_set", lambda: instruction_set)
    left, right = _operands(rows, columns, depth)
    before = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    buffer = widened(before)
    add_transposed(buffer, widened(left.t()), widened(right), -0.75)
    exact = before.double() - 0.75 * (left.double() @ right.double())
    assert_accurate(buffer, before - 0.75 * (left @ right), exact)
    beside = buffer.as_strided((rows, 5), (columns + 5, 1), columns)
    assert beside.isnan().all(), "nothing is written beside the sum"


def test_a_gradient_has_the_same_bits_on_any_threads() -> None:
    left, right = _operands(230, 300, 1400)

    def added() -> tuple[Tensor]:
        buffer = torch.ones(230, 300)
        add_transposed(buffer, left.t().contiguous(), right)
        return (buffer,)

    assert_same_on_any_threads(added)


@pytest.mark.parametrize("has_avx512", [False, True])
def test_gradients_that_the_kernel_takes(has_avx512: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes a large transpose in fp32 where torch multiplies by AVX2; else torch computes it."""
    monkeypatch.setattr(native_product, "_torch_has_avx512", lambda: has_avx512)
    left, right = _operands(FEWEST, FEWEST, FEWEST)
    turned = left.t().contiguous().t()
    cases = [
        (turned, right, not has_avx512),
        (left, right, False),
        (turned[1:], right, False),
        (turned[:, 1:], right[1:], False),
        (turned.bfloat16(), right.bfloat16(), False),
    ]
    for one, other, by_kernel in cases:
        buffer = torch.zeros(one.shape[0], other.shape[1])
        with mock.patch.object(native_product, "add_transposed", wraps=add_transposed) as kernel:
            add_product(buffer, one, other, 2.0)
        taken = by_kernel and loader.native_status().instruction_set == "avx512"
        assert kernel.called == taken
        torch.testing.assert_close(buffer, 2 * (one @ other).float(), rtol=1e-4, atol=1e-4)


def test_long_sums_of_one_sign(kernel: Multiply) -> None:
    """Nothing cancels, so a running sum that is too long shows: its rounding grows with what it holds."""
    left, right = (x.abs() for x in _operands(40, 70, 1100))
    assert_accurate(kernel(left, right), left @ right, left.double() @ right.double())


def test_numbers_of_all_sizes(kernel: Multiply) -> None:
    """Nothing is lost of small numbers because others in the same row are large."""
    generator = torch.Generator().manual_seed(5)
    left, right = _operands(64, 48, 200)
    left *= torch.empty(64, 200).uniform_(-12, 12, generator=generator).exp()
    right *= torch.empty(200, 48).uniform_(-12, 12, generator=generator).exp()
    exact, magnitude = left.double() @ right.double(), left.double().abs() @ right.double().abs()

    def worst(found: Tensor) -> float:
        return float(((found - exact).abs() / magnitude).max())

    assert worst(kernel(left, right)) <= 2 * worst(left @ right)
    lone = torch.zeros(64, 200).scatter_(1, torch.randint(200, (64, 1), generator=generator), torch.pi)
    exact = lone.double() @ right.double()
    assert float(((kernel(lone, right) - exact) / exact).abs().max()) <= 2**-22, "a single product"


def test_threads_do_not_change_the_result(kernel: Multiply) -> None:
    left, right = _operands(230, 300, 1400)
    assert_same_on_any_threads(lambda: (kernel(left, right), kernel(left, right.t().contiguous().t())))


def test_other_rows_and_columns_do_not_change_an_element(kernel: Multiply) -> None:
    left, right = _operands(200, 140, 1400)
    whole = kernel(left, right)
    assert torch.equal(whole[30:107], kernel(left[30:107], right))
    assert torch.equal(whole[:, 17:90], kernel(left, right[:, 17:90]))


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
def test_a_non_finite_input_is_not_hidden(value: float, kernel: Multiply) -> None:
    left, right = _operands(9, 20, 40)
    left[3, 5] = value
    out = kernel(left, right)
    assert not out[3].isfinite().any() and out[:3].isfinite().all() and out[4:].isfinite().all()
    left, right = _operands(9, 20, 40)
    right[5, 3] = value
    out = kernel(left, right)
    assert not out[:, 3].isfinite().any() and out[:, :3].isfinite().all() and out[:, 4:].isfinite().all()


@pytest.mark.parametrize("size", (FEWEST, 2 * FEWEST))
def test_what_it_is_not_made_for_goes_to_torch(size: int) -> None:
    left, right = _operands(size, size, size)
    columns = right.t().contiguous().t()
    assert_accurate(product(left, columns), left @ columns, left.double() @ columns.double())
    assert_accurate(product(left, right), left @ right, left.double() @ right.double())
    assert torch.equal(product(left[:3], right), left[:3] @ right)
    assert torch.equal(product(left.bfloat16(), right.bfloat16()), left.bfloat16() @ right.bfloat16())
    twice = right.repeat_interleave(2, 1).repeat_interleave(2, 0)[::2, ::2]
    assert torch.equal(product(left, twice), left @ twice)


@pytest.mark.parametrize(
    ("rows", "transposed", "beside_avx512", "beside_avx2"),
    [(8, False, None, "multiply"), (25, True, None, "multiply"), (25, False, None, "multiply"),
     (200, True, "multiply", "multiply"), (200, False, None, "multiply"), (512, False, "multiply", "multiply"),
     (1, True, "multiply_few_rows", "multiply_few_rows"), (24, True, "multiply_few_rows", "multiply_few_rows"),
     (1, False, None, None)],
)  # fmt: skip
def test_the_kernel_follows_from_rows_and_from_how_torch_multiplies(
    rows: int, transposed: bool, beside_avx512: str | None, beside_avx2: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loader.native_status().instruction_set != "avx512":
        pytest.skip("the compiled products for vectors are chosen with AVX-512 alone")
    left, right = torch.randn(rows, FEWEST), torch.randn(FEWEST, FEWEST)
    right = right.t() if transposed else right
    monkeypatch.setattr(native_product, "has_tiles", lambda: False)
    for has, expected in ((True, beside_avx512), (False, beside_avx2)):
        monkeypatch.setattr(native_product, "_torch_has_avx512", lambda has=has: has)
        compiled = {name: mock.Mock() for name in ("multiply", "multiply_few_rows")}
        for name, stand_in in compiled.items():
            monkeypatch.setattr(native_product, name, stand_in)
        product(left, right)
        assert [name for name, stand_in in compiled.items() if stand_in.called] == [expected] * (expected is not None)


@pytest.mark.parametrize("rows", (1, 2, 3, 4, 5, 7, 8, 9, 16, 23))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_few_rows_in_every_tile(rows: int, dtype: torch.dtype) -> None:
    left, right = _operands(rows, 131, 77)
    left, right = left.to(dtype), right.t().contiguous().to(dtype).t()
    assert_accurate(multiply_few_rows(left, right), left @ right, left.double() @ right.double())


def test_bfloat16_of_more_rows_goes_to_torch() -> None:
    left, right = (one.bfloat16() for one in _operands(MOST_OF_FEW[torch.bfloat16] + 1, FEWEST, FEWEST))
    right = right.t().contiguous().t()
    assert torch.equal(product(left, right), left @ right)
