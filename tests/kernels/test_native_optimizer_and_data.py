"""Compiled AdamW against torch's, compiled packing against the plain one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim.adamw import adamw

from engine.data.packing import pack as plain_pack
from engine.kernels.native import packing
from engine.kernels.native.adamw import adamw_step, square_sum
from tests.kernels.native_support import assert_same_on_any_threads, needs_native

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


def _state(size: int) -> list[Tensor]:
    """Parameter, gradient, moments."""
    torch.manual_seed(0)
    return [torch.randn(size), torch.randn(size), torch.randn(size) * 0.1, torch.rand(size) * 0.1]


@needs_native
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("non_finite", [0.0, 1.0])
@pytest.mark.parametrize("size", [0, 1, 123, 40_000])
def test_adamw_is_torchs(size: int, non_finite: float) -> None:
    ours, theirs = _state(size), _state(size)
    lr, step_count, flag = torch.tensor(3e-2), torch.tensor(4.0), torch.tensor(non_finite)
    clip, low = torch.tensor(0.37), torch.zeros(size, dtype=torch.bfloat16)
    adamw_step(
        *ours, lr=lr, step_count=step_count, betas=BETAS, eps=EPS, weight_decay=DECAY, clip=clip, skip=flag,
        low_precision=low, zero_gradient=True,
    )  # fmt: skip
    theirs[1].mul_(clip)
    adamw(
        [theirs[0]], [theirs[1]], [theirs[2]], [theirs[3]], [], [step_count.clone()], fused=True, found_inf=flag,
        amsgrad=False, beta1=BETAS[0], beta2=BETAS[1], lr=lr, weight_decay=DECAY, eps=EPS, maximize=False,
    )  # fmt: skip
    for name, one, other in zip(("parameter", "exp_avg", "exp_avg_sq"), (ours[0], *ours[2:]), (theirs[0], *theirs[2:]),
                                strict=True):  # fmt: skip
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, msg=name)
    assert not ours[1].any() and step_count.item() == 4.0
    assert torch.equal(low, torch.zeros_like(low) if non_finite else ours[0].to(torch.bfloat16))


@needs_native
@pytest.mark.usefixtures("instruction_set")
def test_weights_that_are_not_a_number_stay_so_in_bf16() -> None:
    state = [torch.full((3,), float("nan")), *(torch.zeros(3) for _ in range(3))]
    low = torch.zeros(3, dtype=torch.bfloat16)
    zero = torch.tensor(0.0)
    adamw_step(
        *state, lr=zero, step_count=zero, betas=BETAS, eps=EPS, weight_decay=0.0, low_precision=low
    )  # fmt: skip
    assert low.isnan().all()


@needs_native
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("size", [0, 1, 123, 100_003])
def test_square_sum(size: int) -> None:
    values = torch.randn(size)
    expected = values.double().square().sum()
    torch.testing.assert_close(square_sum(values), expected, rtol=1e-6, atol=0.0)


@needs_native
def test_any_number_of_threads() -> None:
    def run() -> tuple[Tensor, ...]:
        state = _state(100_003)
        norm = square_sum(state[1])
        one = torch.tensor(1e-3)
        adamw_step(*state, lr=one, step_count=one, betas=BETAS, eps=EPS, weight_decay=DECAY)
        return (*state, norm)

    assert_same_on_any_threads(run)


@needs_native
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 130), max_size=80), st.integers(130, 300))
def test_packs_are_those_of_the_plain_algorithm(lengths: list[int], capacity: int) -> None:
    offsets, documents = packing.pack(np.array(lengths, dtype=np.int64), capacity)
    expected = plain_pack(np.array(lengths, dtype=np.int64), capacity)
    assert offsets.tolist() == expected.offsets.tolist() and documents.tolist() == expected.documents.tolist()


@needs_native
@pytest.mark.parametrize("capacity", [64, 4096, 20_000])
def test_many_packs_are_those_of_the_plain_algorithm(capacity: int) -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5, 1.2, 20_000).astype(np.int64) + 1, capacity)
    offsets, documents = packing.pack(lengths, capacity)
    expected = plain_pack(lengths, capacity)
    assert np.array_equal(offsets, expected.offsets) and np.array_equal(documents, expected.documents)


@needs_native
@pytest.mark.parametrize(
    ("capacity", "lengths", "rows"),
    [
        (17, [5, 8, 3, 1, 8, 8, 1, 7, 3, 7], 3),
        (13, [6, 6, 1, 2, 3, 5, 2, 1, 2, 6, 3, 2, 6, 4, 3, 6, 6, 1], 5),
    ],
)
def test_next_fit_is_taken_where_it_is_better(capacity: int, lengths: list[int], rows: int) -> None:
    """In the order given these fill their rows to the last token; best fit needs one row more."""
    assert sum(lengths) == rows * capacity
    expected = plain_pack(np.array(lengths), capacity)
    offsets, documents = packing.pack(np.array(lengths), capacity)
    assert len(offsets) - 1 == rows
    assert offsets.tolist() == expected.offsets.tolist() and documents.tolist() == expected.documents.tolist()
