"""A linear with its adapters as one product, against fp64; torch's separate products measure the error allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engine.kernels.native import adapted
from engine.kernels.native.product import has_tiles, multiply_by_tiles
from engine.kernels.records import AdapterSection
from tests.kernels.native_support import (
    assert_accurate,
    assert_same_on_any_threads,
    needs_native,
    packed_mask,
    threads,
    unpack_bits,
    widened,
)

pytestmark = [needs_native, pytest.mark.skipif(not has_tiles(), reason="no AMX tiles")]

KEEP_SCALE = 1.25


class Case(NamedTuple):
    """Tokens, input features, output features and rank of each adapter, and output columns that have none, in front."""

    tokens: int
    inputs: int
    adapters: tuple[tuple[int, int], ...]
    bare: int = 0


CASES = (
    Case(1, 5, ((3, 1),)),
    Case(64, 64, ((64, 16),)),
    Case(333, 650, ((200, 8), (133, 3), (7, 24)), bare=29),
    Case(70, 1100, ((40, 16), (600, 16), (40, 16))),
    Case(2200, 96, ((33, 64),)),
    Case(130, 520, ((1100, 5),), bare=520),
    Case(0, 40, ((40, 16),)),
)
"""One row; round; ranks that share a tile, and columns before; several parts of the depth each way; several passes over
the rows and more ranks than a tile has; an adapter that begins in the second part of the depth; empty."""


class Operands(NamedTuple):
    x: Tensor
    weight: Tensor
    a: Tensor
    dy: Tensor
    sections: list[AdapterSection]
    bits: Tensor | None
    kept: Tensor

    def b(self, dtype: torch.dtype) -> Tensor:
        """[O, R], the sections' B and zeros."""
        whole = torch.zeros(self.weight.shape[0], self.a.shape[0], dtype=dtype)
        for one in self.sections:
            assert one.b is not None
            self.section(whole, one).copy_(one.b)
        return whole

    @staticmethod
    def section(values_OR: Tensor, one: AdapterSection) -> Tensor:
        return values_OR.narrow(0, one.first_column, one.num_columns).narrow(1, one.first_row, one.num_ranks)

    def scales(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([torch.full((one.num_ranks,), one.scale, dtype=dtype) for one in self.sections])


def _operands(case: Case, masked: bool) -> Operands:
    generator = torch.Generator().manual_seed(case.tokens + case.inputs)

    def normal(*shape: int) -> Tensor:
        return widened(torch.randn(shape, generator=generator))

    ranks, outputs = sum(rank for _, rank in case.adapters), case.bare + sum(rows for rows, _ in case.adapters)
    sections, column, row = [], case.bare, 0
    for index, (rows, rank) in enumerate(case.adapters):
        place = {"first_column": column, "num_columns": rows, "first_row": row, "num_ranks": rank}
        gradient = None if index == 1 else widened(torch.full((rows, rank), 0.5))
        sections.append(AdapterSection(**place, b=normal(rows, rank), scale=index + 0.5, db=gradient))
        column, row = column + rows, row + rank
    bits, kept = None, torch.ones(case.tokens, case.inputs)
    if masked:
        bits = packed_mask(case.tokens, case.inputs, 3)
        kept = KEEP_SCALE * unpack_bits(bits, case.inputs)
    x, weight, a = normal(case.tokens, case.inputs), normal(outputs, case.inputs), normal(ranks, case.inputs)
    return Operands(x, weight, a, normal(case.tokens, outputs), sections, bits, kept)


def _forward(given: Operands, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """y and H by torch."""
    x, weight, a, b = given.x.to(dtype), given.weight.to(dtype), given.a.to(dtype), given.b(dtype)
    h = (x * given.kept.to(dtype)) @ a.t() * given.scales(dtype)
    return x @ weight.t() + h @ b.t(), h


def _backward(given: Operands, h: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dX, dH and dB by torch."""
    dy, weight, a, b = given.dy.to(dtype), given.weight.to(dtype), given.a.to(dtype), given.b(dtype)
    dh = dy @ b * given.scales(dtype)
    return dy @ weight + (dh @ a) * given.kept.to(dtype), dh, dy.t() @ h.to(dtype)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case: Case, masked: bool) -> None:
    given = _operands(case, masked)
    scale = KEEP_SCALE if masked else 1.0
    y, h = adapted.forward(given.x, given.weight, given.a, given.sections, mask=given.bits, keep_scale=scale)
    (torch_y, torch_h), (exact_y, exact_h) = _forward(given, torch.float32), _forward(given, torch.float64)
    terms = exact_h.abs() if case.tokens == 1 else None
    assert_accurate(h, torch_h, exact_h, terms)
    assert_accurate(y, torch_y, exact_y)
    again, same = adapted.forward(
        given.x, given.weight, given.a, given.sections, mask=given.bits, keep_scale=scale, h_TR=widened(h)
    )
    assert torch.equal(again, y) and torch.equal(same, h), "an H that is given is not made again"


@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case: Case, masked: bool, updates: bool) -> None:
    given = _operands(case, masked)
    h = widened(_forward(given, torch.float32)[1])
    dx, dh = adapted.backward(
        given.dy, given.weight, given.a, given.sections, h_TR=h, mask=given.bits,
        keep_scale=KEEP_SCALE if masked else 1.0, updates=updates,
    )  # fmt: skip
    if not updates:
        given = given._replace(kept=torch.zeros_like(given.kept))
    torchs, exact = _backward(given, h, torch.float32), _backward(given, h, torch.float64)
    terms = exact[1].abs() if case.tokens == 1 else None
    assert_accurate(dx, torchs[0], exact[0])
    assert_accurate(dh, torchs[1], exact[1], terms)
    for one in given.sections:
        if one.db is not None:
            theirs, answer = given.section(torchs[2], one), given.section(exact[2], one)
            assert_accurate(one.db, theirs + 0.5, answer + 0.5)
            assert one.db.untyped_storage().size() == 4 * one.num_columns * (one.num_ranks + 5)
            assert one.db.as_strided((one.num_columns, 5), (one.num_ranks + 5, 1), one.num_ranks).isnan().all()


def test_without_adapters_it_is_the_plain_product() -> None:
    given = _operands(CASES[2], masked=True)
    nothing = [replace(one, b=torch.zeros(one.num_columns, one.num_ranks), db=None) for one in given.sections]
    y, h = adapted.forward(given.x, given.weight, given.a, nothing, mask=given.bits, keep_scale=KEEP_SCALE)
    assert torch.equal(y, multiply_by_tiles(given.x, given.weight.t()))
    dx, dh = adapted.backward(
        given.dy, given.weight, given.a, nothing, h_TR=h, mask=given.bits, keep_scale=KEEP_SCALE, updates=True
    )
    assert torch.equal(dx, multiply_by_tiles(given.dy, given.weight)) and not dh.any()


def test_threads_do_not_change_the_result() -> None:
    given = _operands(Case(700, 1100, ((600, 16), (300, 8))), masked=True)

    def run() -> tuple[Tensor, ...]:
        sections = [replace(one, db=torch.zeros(one.num_columns, one.num_ranks)) for one in given.sections]
        y, h = adapted.forward(given.x, given.weight, given.a, sections, mask=given.bits, keep_scale=KEEP_SCALE)
        dx, dh = adapted.backward(
            given.dy, given.weight, given.a, sections, h_TR=h, mask=given.bits, keep_scale=KEEP_SCALE, updates=True
        )
        return y, h, dx, dh, *(one.db for one in sections if one.db is not None)

    assert_same_on_any_threads(run)


def test_gradients_of_one_part_are_added_before_the_next_part_makes_its_own() -> None:
    """A thread that packs the next part must not overtake one that still adds: many ranks, parts and turns."""
    given = _operands(Case(2100, 128, ((1600, 192),)), masked=False)
    h = torch.randn(2100, 192)
    exact = given.dy.double().t() @ h.double()

    def run() -> Tensor:
        sections = [replace(one, db=torch.zeros(one.num_columns, one.num_ranks)) for one in given.sections]
        adapted.backward(given.dy, given.weight, given.a, sections, h_TR=h, mask=None, keep_scale=1.0, updates=False)
        assert sections[0].db is not None
        return sections[0].db

    with threads(1):
        alone = run()
    assert ((alone - exact).norm() / exact.norm()).item() < 1e-6
    with threads(2):
        for _ in range(20):
            assert torch.equal(run(), alone)


def test_other_rows_do_not_change_a_row() -> None:
    given = _operands(CASES[3], masked=False)
    y, h = adapted.forward(given.x, given.weight, given.a, given.sections, mask=None, keep_scale=1.0)
    some = adapted.forward(given.x[17:50], given.weight, given.a, given.sections, mask=None, keep_scale=1.0)
    assert torch.equal(some[0], y[17:50]) and torch.equal(some[1], h[17:50])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_input_is_not_hidden(value: float) -> None:
    given = _operands(CASES[2], masked=True)
    given.x[5, 7] = value
    y, h = adapted.forward(given.x, given.weight, given.a, given.sections, mask=given.bits, keep_scale=KEEP_SCALE)
    assert not y[5].isfinite().any() and y[:5].isfinite().all() and y[6:].isfinite().all()
    assert bool(h[5].isfinite().all()) == bool(given.kept[5, 7] == 0)


def test_no_columns() -> None:
    """What adapters make besides the product is there without one."""
    given = _operands(Case(150, 0, ((700, 16),)), masked=False)
    sections = [replace(one, db=torch.zeros(one.num_columns, one.num_ranks)) for one in given.sections]
    h = torch.randn(150, 16)
    dx, dh = adapted.backward(
        given.dy, given.weight, given.a, sections, h_TR=h, mask=None, keep_scale=1.0, updates=True
    )
    assert dx.shape == (150, 0)
    torch.testing.assert_close(
        dh, given.dy @ given.b(torch.float32) * given.scales(torch.float32), rtol=1e-5, atol=1e-4
    )
    torch.testing.assert_close(sections[0].db, given.dy.t() @ h, rtol=1e-5, atol=1e-4)
