"""Sums of partial results against torch's, long and short, several in one launch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels.triton.partial_sums import Sum, sum_all, sum_partials
from tests.kernels.comparing import assert_as_exact_as_torch, assert_rounded_once, places, random_rows

SHAPES = [(3, 5, 7), (1, 1, 1), (33, 1, 300), (100, 2, 5), (0, 4, 6), (64, 30, 90), (40, 300, 230), (5, 0, 3)]
"""Partial results, rows, columns; the last but one has more results than the short way takes."""


@places
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_one_sum(place, shape: tuple[int, int, int], add: bool) -> None:
    partial = random_rows((place[0], torch.float32), *shape)
    before = random_rows(place, *shape[1:], gap=3, seed=1)
    out = before.clone()
    wide = torch.full((shape[1], shape[2] + 2), 7.0, dtype=place[1], device=place[0])
    wide[:, : shape[2]] = out
    sum_partials(partial, wide[:, : shape[2]], scale=0.5, add=add)
    exact = partial.double().sum(0) * 0.5 + (before.double() if add else 0.0)
    torchs = (partial.sum(0) * 0.5 + (before.float() if add else 0.0)).to(place[1])
    assert_as_exact_as_torch(wide[:, : shape[2]], torchs, exact, "sum")
    assert_rounded_once(wide[:, : shape[2]], exact, "sum")
    assert (wide[:, shape[2] :] == 7).all(), "wrote outside its columns"


@places
@pytest.mark.parametrize("length", [7, 90])
def test_several_sums_in_one_launch(place, length: int) -> None:
    """Cut from one tensor of partial results: other rows, other columns, other ranges of it."""
    partial = random_rows((place[0], torch.float32), length, 50, 20)
    parts = [partial[:, :3, :20], partial[: length // 2, 7:50, :1], partial[2:2, :9, :4], partial[3:, 10:30, :13]]
    outs = [torch.full(part.shape[1:], 9.0, device=place[0], dtype=place[1]) for part in parts]
    scales = (1.0, 2.0, 3.0, 0.25)
    sum_all([Sum(partial_SMN=p, out_MN=o, scale=s) for p, o, s in zip(parts, outs, scales, strict=True)])
    for part, out, scale in zip(parts, outs, scales, strict=True):
        assert_as_exact_as_torch(out, (part.sum(0) * scale).to(place[1]), part.double().sum(0) * scale, "sum")
