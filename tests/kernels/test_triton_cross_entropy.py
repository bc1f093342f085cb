"""Cross-entropy kernels against torch's cross_entropy and its autograd, with one vocabulary shard and with several."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels.triton import cross_entropy as ce
from tests.kernels.comparing import assert_as_exact_as_torch, assert_rounded_once, places, random_rows

SHAPES = [(5, 123), (1, 1), (3, 9000), (40, 32)]


def _problem(place, num_tokens: int, num_ids: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels (some tokens have none) and scales (0 there)."""
    # the maximum lies in the last columns, so that a running maximum has to rise on the way, and so little above the
    # others that their share is seen
    logits = random_rows(place, num_tokens, num_ids, gap=3) * 1.5
    logits[:, num_ids - 1 - num_ids // 50 :] += 4
    labels = torch.arange(num_tokens, device=place[0]) * 31 % num_ids
    scale = torch.linspace(0.1, 1.0, num_tokens, device=place[0])
    if num_tokens > 2:
        labels[1], scale[1] = -100, 0.0
    return logits, labels, scale


def _torchs(logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Token losses and the gradient of sum(scale * loss), by torch at the logits' dtype."""
    leaf = logits.detach().clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(leaf, labels, reduction="none", ignore_index=-100)
    (gradient,) = torch.autograd.grad((loss * scale.to(loss.dtype)).sum(), leaf)
    return loss.detach(), gradient


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.float32)


@places
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_shard(place, shape: tuple[int, int]) -> None:
    logits, labels, scale = _problem(place, *shape)
    exact_loss, exact_gradient = _torchs(logits.double(), labels, scale)
    torch_loss, _ = _torchs(_wide(logits), labels, scale)
    _, torch_gradient = _torchs(logits, labels, scale)
    before = logits.clone()
    maximum, total, target = ce.local_statistics(logits, labels)
    assert torch.equal(logits, before), "the logits are needed again"
    counted = labels >= 0
    loss = torch.where(counted, total.log() + maximum - target, 0.0)
    assert_as_exact_as_torch(loss, torch_loss, exact_loss, "loss")
    assert ce.local_gradient(logits, labels, maximum, maximum, total, scale) is logits
    assert_as_exact_as_torch(logits, torch_gradient, exact_gradient, "gradient")
    assert_rounded_once(logits, exact_gradient, "gradient")


@places
def test_three_shards(place) -> None:
    logits, labels, scale = _problem(place, 9, 40)
    logits[:, 13:29] -= 100  # a shard far below the others
    exact_loss, exact_gradient = _torchs(logits.double(), labels, scale)
    torch_loss, _ = _torchs(_wide(logits), labels, scale)
    _, torch_gradient = _torchs(logits, labels, scale)
    bounds = [(0, 13), (13, 29), (29, 40)]
    shards = [logits[:, first:last].clone() for first, last in bounds]
    targets = [labels - first for first, _ in bounds]
    parts = [ce.local_statistics(shard, target) for shard, target in zip(shards, targets, strict=True)]
    maximum = torch.stack([part[0] for part in parts]).amax(0)
    total = sum(part[1] * (part[0] - maximum).exp() for part in parts)
    loss = torch.where(labels >= 0, total.log() + maximum - sum(part[2] for part in parts), 0.0)
    assert_as_exact_as_torch(loss, torch_loss, exact_loss, "loss")
    for shard, target, part in zip(shards, targets, parts, strict=True):
        ce.local_gradient(shard, target, part[0], maximum, total, scale)
    assert_as_exact_as_torch(torch.cat(shards, 1), torch_gradient, exact_gradient, "gradient")
    assert_rounded_once(torch.cat(shards, 1), exact_gradient, "gradient")


@places
def test_a_row_without_weight_is_not_read(place) -> None:
    """Padding may hold anything: the gradient of a row with scale 0 is 0, even where its logits are not numbers."""
    logits, labels, scale = _problem(place, 4, 20)
    logits[1] = float("nan")
    maximum, total, _ = ce.local_statistics(logits, labels)
    ce.local_gradient(logits, labels, maximum, maximum, total, scale)
    assert (logits[1] == 0).all() and logits.isfinite().all()


@places
def test_no_tokens(place) -> None:
    logits, labels = torch.empty(0, 5, device=place[0]), torch.empty(0, dtype=torch.int64, device=place[0])
    maximum, total, _ = ce.local_statistics(logits, labels)
    assert maximum.shape == (0,)
    assert ce.local_gradient(logits, labels, maximum, maximum, total, total).shape == (0, 5)
