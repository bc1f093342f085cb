"""Triton's sum of rows against its plain-torch specification."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels import reference
from engine.kernels.triton.rows import combine_rows, weigh_rows
from tests.kernels.comparing import assert_rounded_once, places, random_rows


@places
@pytest.mark.parametrize(("tokens", "slots", "features"), [(5, 3, 1), (1, 1, 64), (9, 8, 123), (6, 2, 1100)])
def test_combine_rows(place, tokens: int, slots: int, features: int) -> None:
    """Takes rows of a wider matrix, some of them read twice; with weights and without."""
    y = random_rows(place, tokens * slots + 2, features, gap=5)
    rows = torch.randint(tokens * slots + 2, (tokens, slots), device=place[0])
    for weights in (None, torch.rand(tokens, slots, device=place[0]), random_rows(place, tokens, slots)):
        expected = reference.combine_rows(y, rows, weights)
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[place[1]]
        torch.testing.assert_close(combine_rows(y, rows, weights), expected, rtol=tolerance, atol=tolerance)


@places
def test_no_tokens(place) -> None:
    rows = torch.empty(0, 2, dtype=torch.int64, device=place[0])
    assert combine_rows(random_rows(place, 3, 24), rows).shape == (0, 24)


@places
@pytest.mark.parametrize(("rows", "features"), [(1, 64), (19, 123), (8, 300)])
def test_weigh_rows(place, rows: int, features: int) -> None:
    g, a = random_rows(place, rows, features, gap=5), random_rows(place, rows, features, gap=3, seed=1)
    weights = torch.rand(rows, device=place[0])
    before = g.double()
    dots = weigh_rows(g, a, weights)
    assert dots.dtype == torch.float32
    assert_rounded_once(dots, (before * a.double()).sum(dim=1), "<g, a>")
    assert_rounded_once(g, before * weights.double()[:, None], "w g")
    assert weigh_rows(g[:0], a[:0], weights[:0]).shape == (0,)
