"""Triton's choice of a token against the draws of engine.inference.sampling."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.distributed.mesh import single_process_mesh
from engine.inference.options import Sampling
from engine.inference.sampling import _SITE, Chooser
from engine.kernels.triton.sampling import gumbel_argmax
from tests.kernels.comparing import interpreted_only

on_each_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted_only), pytest.param("cuda", marks=pytest.mark.gpu)]
)
SEED = 2**32 - 3


@on_each_device
@pytest.mark.parametrize(("first_id", "columns"), [(0, 1), (0, 1024), (6, 2050), (5, 10000)])
def test_the_draws_are_those_of_torch(device: str, first_id: int, columns: int) -> None:
    """Covers rows and positions beyond 32 bits, and a part of the vocabulary that begins inside a block of four."""
    scores = torch.randn(4, columns + 3, device=device)[:, :columns] * 3
    scores[1, : columns // 2] = -torch.inf
    rows = torch.tensor([0, 1, 2**32 + 5, 2**40], device=device)
    positions = torch.tensor([0, 7, 100, 2**31], device=device)
    chooser = Chooser(
        Sampling(temperature=1.0, seed=SEED), tp=single_process_mesh().tp, first_id=first_id, num_ids=columns,
        vocab_size=first_id + columns, slots=4, device=torch.device(device),
    )  # fmt: skip
    expected = scores.double() + chooser._noise(rows, positions)
    sums, places = gumbel_argmax(scores, rows, positions, first_id=first_id, key=(SEED, _SITE))
    assert sums.dtype is torch.float64 and torch.equal(places, expected.argmax(1))
    torch.testing.assert_close(sums, expected.amax(1), rtol=1e-12, atol=1e-12)


@on_each_device
def test_of_equal_sums_the_first_is_taken_and_none_may_be_possible(device: str) -> None:
    scores = torch.full((2, 9000), -torch.inf, device=device)
    rows = torch.arange(2, device=device)
    sums, places = gumbel_argmax(scores, rows, rows, first_id=0, key=(1, 2))
    assert sums.tolist() == [-torch.inf] * 2 and places.tolist() == [0, 0]
    assert gumbel_argmax(scores[:0], rows[:0], rows[:0], first_id=0, key=(1, 2))[1].shape == (0,)
