"""Products of rows sorted by expert, in Triton, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels.records import GroupedUpdate
from engine.kernels.triton.grouped import grouped_rows
from engine.kernels.triton.grouped_factors import grouped_outer, grouped_project
from tests.kernels.comparing import assert_rounded_once, long_places, places, random_rows
from tests.kernels.triton_masks import drawn_mask
from tests.support.sweeps import sampled

COUNTS = (0, 1, 70, 0, 66, 3)
"""Rows of each expert: none, one, and more than a tile."""


def _ends(place) -> Tensor:
    return torch.tensor(COUNTS, device=place[0]).cumsum(0).to(torch.int32)


def _experts(place) -> Tensor:
    """The expert of each row."""
    return torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS)).to(place[0])


def _by_expert(rows_NK: Tensor, matrices_EKM: Tensor, experts_N: Tensor) -> Tensor:
    """Each row times its expert's matrix, fp64."""
    return torch.einsum("nk,nkm->nm", rows_NK.double(), matrices_EKM.double()[experts_N])


def _matrices(place, *shape: int, along_inputs: bool, extra: int = 0, seed: int = 0) -> Tensor:
    """[E, K, M], of which K is contiguous where it is along the inputs, else M; `extra` columns lie between rows."""
    experts, inputs, outputs = shape
    if along_inputs:
        return random_rows(place, experts, outputs, inputs, gap=extra, seed=seed).mT
    return random_rows(place, experts, inputs, outputs, gap=extra, seed=seed)


def _index(place, num_tokens: int) -> Tensor:
    return torch.randint(num_tokens, (sum(COUNTS),), generator=torch.Generator().manual_seed(7)).to(place[0])


SHAPES = [(72, 40, 24), (64, 264, 16), (200, 16, 72)]
"""Inputs, outputs, ranks: rests in every dimension; no rest of the inputs, and columns of two tiles; two blocks of
ranks."""


@long_places
@pytest.mark.parametrize("along_inputs", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize(("inputs", "outputs", "ranks"), sampled(SHAPES, SHAPES[:2]))
def test_product(place, inputs: int, outputs: int, ranks: int, along_inputs: bool) -> None:
    """A linear's output and its input's gradient, alone and with what adapters add; each sum is rounded once."""
    ends, experts, index = _ends(place), _experts(place), _index(place, 50)
    rows, tokens = random_rows(place, sum(COUNTS), inputs, gap=8), random_rows(place, 50, inputs)
    weights = _matrices(place, len(COUNTS), inputs, outputs, along_inputs=along_inputs, extra=ranks)
    factors = _matrices(place, len(COUNTS), ranks, outputs, along_inputs=along_inputs, extra=inputs, seed=1)
    shared = _matrices(place, 1, ranks, outputs, along_inputs=along_inputs).expand(len(COUNTS), -1, -1)
    h, bias = random_rows(place, sum(COUNTS), ranks, gap=16), random_rows(place, len(COUNTS), outputs)
    mask, keep_scale, factor = drawn_mask(place, sum(COUNTS), outputs, 0, probability=0.25)
    assert_rounded_once(grouped_rows(rows, weights, ends), base := _by_expert(rows, weights, experts), "x W")
    gathered = _by_expert(tokens[index], weights, experts)
    assert_rounded_once(grouped_rows(tokens, weights, ends, index_N=index), gathered, "gathered")
    added = _by_expert(h, factors, experts)
    update = GroupedUpdate(h_NR=h, factors_ERM=factors)
    wide = torch.full((sum(COUNTS), outputs + 16), 7.0, dtype=place[1], device=place[0])
    y = grouped_rows(tokens, weights, ends, update=update, index_N=index, bias_EM=bias, out=wide[:, 8:-8])
    assert_rounded_once(y, gathered + added + bias.double()[experts], "with adapters and bias")
    assert (wide[:, :8] == 7).all() and (wide[:, -8:] == 7).all(), "wrote outside its columns"
    update = GroupedUpdate(h_NR=h, factors_ERM=factors, mask=mask, scale=keep_scale)
    assert_rounded_once(
        grouped_rows(rows, weights, ends, update=update), base + added * factor.double(), "with dropout"
    )
    update = GroupedUpdate(h_NR=h, factors_ERM=shared)
    assert_rounded_once(
        grouped_rows(rows, weights, ends, update=update), base + _by_expert(h, shared, experts), "with shared factors"
    )


@long_places
@pytest.mark.parametrize("along_inputs", [True, False], ids=["A", "B"])
@pytest.mark.parametrize(("features", "ranks"), [(72, 24), (264, 16), (40, 72)])
def test_project(place, features: int, ranks: int, along_inputs: bool) -> None:
    ends, experts, index = _ends(place), _experts(place), _index(place, 50)
    rows, tokens = random_rows(place, sum(COUNTS), features, gap=8), random_rows(place, 50, features)
    factors = _matrices(place, len(COUNTS), features, ranks, along_inputs=along_inputs, extra=8)
    mask, keep_scale, factor = drawn_mask(place, sum(COUNTS), features, 0, probability=0.25)
    scales = torch.rand(len(COUNTS), ranks, device=place[0])
    exact = _by_expert(rows, factors, experts)
    assert_rounded_once(grouped_project(rows, factors, ends), exact, "x F")
    assert_rounded_once(grouped_project(rows, factors, ends, scale=3.0), 3.0 * exact, "scaled")
    for each in (scales, scales[:1]):
        ours = grouped_project(rows, factors, ends, scales_ER=each)
        assert_rounded_once(ours, exact * each.double().expand(len(COUNTS), -1)[experts], "scaled by expert")
    dropped = tokens[index].double() * factor.double()
    wide = torch.full((sum(COUNTS), ranks + 16), 7.0, dtype=place[1], device=place[0])
    out = wide[:, 8:-8]
    grouped_project(tokens, factors, ends, index_N=index, mask=mask, scale=keep_scale, out=out)
    assert_rounded_once(out, _by_expert(dropped, factors, experts), "dropped")
    assert (wide[:, :8] == 7).all() and (wide[:, -8:] == 7).all(), "wrote outside its columns"


@long_places
@pytest.mark.parametrize("ranks_first", [True, False], ids=["A", "B"])
@pytest.mark.parametrize(("features", "ranks"), [(72, 24), (264, 16), (40, 72)])
def test_outer(place, features: int, ranks: int, ranks_first: bool) -> None:
    """Experts without rows get zeros."""
    ends, experts, index = _ends(place), _experts(place), _index(place, 50)
    h, tokens = random_rows(place, sum(COUNTS), ranks, gap=8), random_rows(place, 50, features, gap=8)
    mask, keep_scale, factor = drawn_mask(place, sum(COUNTS), features, 0, probability=0.25)

    def exact(x: Tensor) -> Tensor:
        own = torch.nn.functional.one_hot(experts, len(COUNTS)).double()
        return torch.einsum("ne,nr,nk->erk" if ranks_first else "ne,nr,nk->ekr", own, h.double(), x.double())

    rows = tokens[index]
    sums = grouped_outer(h, rows, ends, ranks_first=ranks_first)
    assert sums.dtype == torch.float32
    assert_rounded_once(sums, exact(rows), "sums")
    assert all((sums[expert] == 0).all() for expert, count in enumerate(COUNTS) if not count)
    sums = grouped_outer(h, tokens, ends, index_N=index, mask=mask, scale=keep_scale, ranks_first=ranks_first)
    assert_rounded_once(sums, exact(rows.double() * factor.double()), "of dropped rows")


@places
def test_no_rows(place) -> None:
    ends, none = torch.zeros(3, dtype=torch.int32, device=place[0]), random_rows(place, 0, 16)
    weights = random_rows(place, 3, 16, 24)
    assert grouped_rows(none, weights, ends).shape == (0, 24)
    assert grouped_project(none, weights, ends).shape == (0, 24)
    assert (grouped_outer(random_rows(place, 0, 8), none, ends, ranks_first=True) == 0).all()
