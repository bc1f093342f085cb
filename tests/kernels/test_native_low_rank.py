"""The compiled skinny products against fp64, with torch's products in fp32 as the measure of the error allowed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.native import low_rank
from engine.kernels.records import AdapterSection, InputUpdate
from rankfold.benchmarking.oracles import ODD_SHAPES
from tests.kernels.native_support import (
    ON_EVERY_INSTRUCTION_SET,
    a_section,
    assert_accurate,
    assert_same_on_any_threads,
    b_section,
    drawn_bits,
    widened,
)

pytestmark = ON_EVERY_INSTRUCTION_SET
RANKS = (1, 16, 27, 64)
SCALE = 1.25


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_project(shape: tuple[int, int], rank: int, masked: bool) -> None:
    torch.manual_seed(0)
    x, a = torch.randn(shape), torch.randn(rank, shape[1])
    bits, mask = drawn_bits(*shape)
    kept = x * mask if masked else x
    # as the engine lays it out: H behind x in one buffer
    buffer = torch.full((shape[0], shape[1] + rank), float("nan"))
    inside, h = buffer.split([shape[1], rank], dim=1)
    inside.copy_(x)
    out = low_rank.project(inside, bits if masked else None, widened(a), scale=SCALE, out=h)
    # five sums alone say little about torch's error: there a few roundings of their terms are allowed
    terms = SCALE * (kept.abs() @ a.abs().t()) if rank == 1 else None
    assert_accurate(out, SCALE * (kept @ a.t()), SCALE * (kept.double() @ a.double().t()), terms)
    assert torch.equal(inside, x)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_add_input_gradient(shape: tuple[int, int], rank: int, masked: bool) -> None:
    torch.manual_seed(0)
    dx, dh, a = torch.randn(shape), torch.randn(shape[0], rank), torch.randn(rank, shape[1])
    bits, mask = drawn_bits(*shape)
    kept = mask if masked else torch.ones(shape)
    update = InputUpdate(dh_TR=widened(dh), a_RI=widened(a), mask=bits if masked else None, scale=SCALE)
    out = low_rank.add_input_gradient(widened(dx), update)
    exact = dx.double() + SCALE * kept.double() * (dh.double() @ a.double())
    terms = dx.abs() + SCALE * kept * (dh.abs() @ a.abs()) if shape == (1, 1) else None
    assert_accurate(out, dx + SCALE * kept * (dh @ a), exact, terms)
    assert torch.equal(low_rank.add_input_gradient(dx, update, out=torch.empty(shape)), out)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ranks", [(1,), (16,), (8, 3, 16), (64, 64, 64)])
@pytest.mark.parametrize("shape", [*ODD_SHAPES, (130, 600), (4100, 40)])
def test_accumulate_a(shape: tuple[int, int], ranks: tuple[int, ...], masked: bool) -> None:
    torch.manual_seed(0)
    x, dh = torch.randn(shape), torch.randn(shape[0], sum(ranks))
    bits, mask = drawn_bits(*shape)
    kept = x * mask if masked else x
    targets, first = [], 0
    for rank in ranks:
        targets.append(a_section(widened(torch.full((rank, shape[1]), 0.5)), first))
        first += rank
    low_rank.accumulate_a(widened(dh), widened(x), bits if masked else None, targets, scale=1.5)
    for target in targets:
        assert target.da is not None
        rows = target.ranks(dh)
        exact = 0.5 + 1.5 * (rows.double().t() @ kept.double())
        assert_accurate(target.da, 0.5 + 1.5 * (rows.t() @ kept), exact)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [*ODD_SHAPES, (1100, 70)])
def test_accumulate_a_of_a_norm(shape: tuple[int, int], masked: bool) -> None:
    """x is not made: its factors for rows and columns go to dH and to the sum."""
    torch.manual_seed(0)
    u, dh = torch.randn(shape), torch.randn(shape[0], 16)
    rstd, weight = torch.rand(shape[0], 1) + 0.5, torch.rand(shape[1]) + 0.5
    bits, mask = drawn_bits(*shape)
    kept = mask if masked else torch.ones(shape)
    into = widened(torch.full((16, shape[1]), 0.5))
    given = bits if masked else None
    low_rank.accumulate_a(
        widened(dh), widened(u), given, [a_section(into)], scale=2.0, row_scale_T=rstd, column_scale_I=weight
    )
    x = u.double() * rstd * weight * kept
    assert_accurate(into, 0.5 + 2.0 * (dh.t() @ x.float()), 0.5 + 2.0 * (dh.double().t() @ x))


@pytest.mark.parametrize("sections", [((7, 1),), ((40, 16), (8, 16), (8, 16)), ((600, 8), (5, 24))])
@pytest.mark.parametrize("tokens", [0, 1, 5, 130, 4100])
def test_accumulate_b(tokens: int, sections: tuple[tuple[int, int], ...]) -> None:
    torch.manual_seed(0)
    dy = torch.randn(tokens, 3 + sum(outputs for outputs, _ in sections))
    h = torch.randn(tokens, sum(rank for _, rank in sections))
    targets, column, row = [], 3, 0
    for outputs, rank in sections:
        targets.append(b_section(widened(torch.full((outputs, rank), 0.5)), column, row))
        column, row = column + outputs, row + rank
    low_rank.accumulate_b(widened(dy), widened(h), targets)
    for target in targets:
        assert target.db is not None
        grads, rows = target.columns(dy), target.ranks(h)
        exact = 0.5 + grads.double().t() @ rows.double()
        assert_accurate(target.db, 0.5 + grads.t() @ rows, exact)


def test_a_frozen_adapter_is_left_out() -> None:
    torch.manual_seed(0)
    x, dh = torch.randn(9, 33), torch.randn(9, 8)
    into, into_b = torch.zeros(4, 33), torch.zeros(33, 4)
    frozen = AdapterSection(first_column=0, num_columns=33, first_row=0, num_ranks=4)
    low_rank.accumulate_a(dh, x, None, [frozen, a_section(into, 4)])
    torch.testing.assert_close(into, dh[:, 4:].t() @ x)
    low_rank.accumulate_b(x, dh, [frozen, b_section(into_b, first_row=4)])
    torch.testing.assert_close(into_b, x.t() @ dh[:, 4:])


def test_any_number_of_threads() -> None:
    torch.manual_seed(0)
    tokens, inputs, rank = 4099, 700, 24
    x, dh, a = torch.randn(tokens, inputs), torch.randn(tokens, rank), torch.randn(rank, inputs)
    bits, _ = drawn_bits(tokens, inputs)

    def run() -> tuple[Tensor, ...]:
        da, db = torch.zeros(rank, inputs), torch.zeros(inputs, rank)
        low_rank.accumulate_a(dh, x, bits, [a_section(da)])
        low_rank.accumulate_b(x, dh, [b_section(db)])
        update = InputUpdate(dh_TR=dh, a_RI=a, mask=bits, scale=SCALE)
        dx = low_rank.add_input_gradient(x, update, out=torch.empty_like(x))
        return da, db, dx, low_rank.project(x, bits, a)

    assert_same_on_any_threads(run)
