"""The losses against their formulas in numpy, token by token, and their gradients against those that papers derive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rankfold.serving.losses import TokenInputs, loss_sum

LENGTHS = (3, 5)
Numbers = NDArray[np.float64]


def drawn() -> tuple[Numbers, Numbers, Numbers]:
    """Log-probabilities, those that were sampled with, and advantages of both signs; some ratios are out of limits."""
    draw = np.random.default_rng(3)
    logps = -draw.random(8) * 3
    return logps, logps + draw.choice([-0.5, -0.05, 0.02, 0.4], 8), draw.choice([-1.5, 0.5, 2.0], 8)


def found(loss: str, logps: Numbers, numbers: dict[str, float], **inputs: Numbers | None) -> tuple[float, Numbers]:
    """The loss, and its gradient for each log-probability."""
    given: dict[str, Any] = {
        name: torch.tensor(values, dtype=torch.float32) for name, values in inputs.items() if values is not None
    }
    leaf = torch.tensor(logps, dtype=torch.float32, requires_grad=True)
    value = loss_sum(leaf, TokenInputs(loss=loss, numbers=numbers, place=0, lengths=LENGTHS, **given))
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad.numpy().astype(np.float64)


def check(got: tuple[float, Numbers], value: Numbers, gradient: Numbers) -> None:
    np.testing.assert_allclose(got[0], value.sum(), rtol=1e-5)
    np.testing.assert_allclose(got[1], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weights", [None, np.linspace(0, 2, 8)])
def test_cross_entropy(weights: Numbers | None) -> None:
    logps, _, _ = drawn()
    own = np.ones(8) if weights is None else weights
    check(found("cross_entropy", logps, {}, weights_T=weights), -own * logps, -own)


def test_importance_sampling_and_dro() -> None:
    logps, old, advantages = drawn()
    ratio = np.exp(logps - old)
    inputs = {"logprobs_T": old, "advantages_T": advantages}
    check(found("importance_sampling", logps, {}, **inputs), -ratio * advantages, -ratio * advantages)
    for beta in (0.05, 0.3):
        value = -(logps * advantages - beta / 2 * (logps - old) ** 2)
        given = {} if beta == 0.05 else {"beta": beta}
        check(found("dro", logps, given, **inputs), value, -(advantages - beta * (logps - old)))


@pytest.mark.parametrize(("low", "high"), [(0.8, 1.2), (0.5, 1.01)])
@pytest.mark.parametrize("by_token", [False, True])
def test_clipped_ratios(low: float, high: float, by_token: bool) -> None:
    logps, old, advantages = drawn()
    ratio = np.exp(logps - old)
    numbers = {"clip_low_threshold": low, "clip_high_threshold": high}
    inputs: dict[str, Numbers] = {"logprobs_T": old, "advantages_T": advantages}
    if by_token:
        inputs |= {"low_T": np.full(8, low), "high_T": np.full(8, high)}
        numbers = {}
    elif (low, high) == (0.8, 1.2):
        numbers = {}
    clipped = ratio.clip(low, high)
    outside = np.where(advantages > 0, ratio > high, ratio < low)
    assert outside.any() and not outside.all()
    value = -np.minimum(ratio * advantages, clipped * advantages)
    check(found("ppo", logps, numbers, **inputs), value, np.where(outside, 0.0, -ratio * advantages))
    check(found("cispo", logps, numbers, **inputs), -clipped * advantages * logps, -clipped * advantages)


@pytest.mark.parametrize("marked", [False, True])
def test_gspo(marked: bool) -> None:
    """A datum's tokens share one ratio; its gradient is spread evenly over the tokens that are marked."""
    logps, old, advantages = drawn()
    mask = np.asarray([0, 1, 1, 1, 0, 1, 1, 0.0]) if marked else np.ones(8)
    value, gradient = np.zeros(8), np.zeros(8)
    for rows in (slice(0, 3), slice(3, 8)):
        own = mask[rows]
        ratio = np.exp((own * (logps - old)[rows]).sum() / own.sum())
        clipped = min(max(ratio, 0.8), 1.2)
        value[rows] = -np.minimum(ratio * advantages[rows], clipped * advantages[rows])
        taken = np.where(ratio * advantages[rows] <= clipped * advantages[rows], ratio * advantages[rows], 0.0)
        gradient[rows] = -own / own.sum() * taken.sum()
    inputs = {"logprobs_T": old, "advantages_T": advantages, "mask_T": mask if marked else None}
    check(found("gspo", logps, {}, **inputs), value, gradient)
