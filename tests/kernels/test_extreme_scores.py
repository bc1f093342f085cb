"""Attention and cross-entropy at scores and logits of up to 1e30, where torch is finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL
from engine.distributed.mesh import Axis
from engine.kernels.linear_cross_entropy import linear_cross_entropy
from engine.kernels.native.attention import causal_attention
from engine.ops.attention.blocks import NATIVE_BLOCKS, REFERENCE_BLOCKS, AttentionBlocks, merge_
from engine.ops.backends import NATIVE
from engine.ops.cross_entropy import cross_entropy
from engine.ops.kernels import REFERENCE, Kernels, backend
from engine.spans import Block, Span
from tests.kernels.comparing import places
from tests.kernels.native_support import ON_EVERY_INSTRUCTION_SET, attention_by_torch, needs_native

LARGEST = (1e3, 1e9, 4.4e9, 1e18, 1e30)
SCALE, HEADS, KV_HEADS, DIM = 0.3, 4, 2, 8
ALONE = Axis("tp")


def _inputs(tokens: int, largest: float) -> tuple[Tensor, ...]:
    """q, k, v, dout in fp64, of numbers that bfloat16 has; scores of about `largest`, which come from the queries."""
    generator = torch.Generator().manual_seed(5)
    q, k, v, dout = (
        torch.randn(tokens, heads, DIM, generator=generator).bfloat16().double()
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    return (q * (largest / 3)).bfloat16().double(), k, v, dout


def _assert_near(found: tuple[Tensor, ...], exact: list[Tensor], largest: float, rounding: float) -> None:
    """Within the rounding of the terms that are summed: queries, in dk, are of the size of the scores.

    Scores of some hundreds are rounded by as much more than those of ordinary models.
    """
    for name, ours, true in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
        assert ours.isfinite().all(), name
        size = largest if name == "dk" else 1.0
        assert (ours.double() - true).abs().max() <= 100 * size * rounding, name


@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
class TestNativeAttention:
    pytestmark = ON_EVERY_INSTRUCTION_SET

    def test_forward_and_backward(self, largest: float, dtype: torch.dtype) -> None:
        lengths = (70, 3)
        inputs = _inputs(sum(lengths), largest)
        exact = attention_by_torch(inputs, lengths, SCALE, torch.float64)
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs[:3])
        out = causal_attention(q, k, v, lengths, scale=SCALE)
        gradients = torch.autograd.grad(out, (q, k, v), inputs[3].to(dtype))
        _assert_near((out.detach(), *gradients), exact, largest, 2**-8 if dtype is torch.bfloat16 else 2**-17)


@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.parametrize("blocks", [REFERENCE_BLOCKS, pytest.param(NATIVE_BLOCKS, marks=needs_native)])
def test_blocks_of_a_ring(blocks: AttentionBlocks, largest: float) -> None:
    """Each query against its own half of the row, and later ones against the half before."""
    tokens, half = 40, 20
    inputs = _inputs(tokens, largest)
    exact = attention_by_torch(inputs, (tokens,), SCALE, torch.float64)
    q, k, v, dout = (x.detach().float() for x in inputs)
    own = (Block(Span(0, half), Span(0, half), True), Block(Span(half, tokens), Span(half, tokens), True))
    before = (Block(Span(half, tokens), Span(0, half), False),)
    out, lse = blocks.forward(q, k, v, own, scale=SCALE)
    other, other_lse = blocks.forward(q, k, v, before, scale=SCALE)
    merge_(out[half:], lse[half:], other[half:], other_lse[half:])
    dq, dk, dv = blocks.backward(dout, q, k, v, out, lse, own, scale=SCALE)
    more = blocks.backward(dout, q, k, v, out, lse, before, scale=SCALE)
    dq[half:] += more[0][half:]
    dk[:half] += more[1][:half]
    dv[:half] += more[2][:half]
    _assert_near((out, dq, dk, dv), exact, largest, 2**-17)


def _logits(largest: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels, of which the first few are the largest logit's, and a factor for each token's loss."""
    logits = torch.randn(12, 77, generator=torch.Generator().manual_seed(6)).mul(largest / 3).to(dtype)
    labels = torch.arange(12) * 31 % 77
    labels[:4], labels[5] = logits[:4].argmax(1), IGNORE_LABEL
    return logits, labels, torch.linspace(0.2, 1.0, 12)


def _by_torch(logits: Tensor, labels: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Token losses, and the gradient of their sum times `factor`."""
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_LABEL)
    return losses.detach(), torch.autograd.grad((losses * factor).sum(), logits)[0]


def _check_cross_entropy(kernels: Kernels, dtype: torch.dtype, largest: float, device: str = "cpu") -> None:
    logits, labels, factor = (x.to(device) for x in _logits(largest, dtype))
    losses, gradient = _by_torch(logits.double().requires_grad_(), labels, factor.double())
    leaf = logits.clone().requires_grad_()
    found = cross_entropy(leaf * 1, labels, first_id=0, num_ids=77, axis=ALONE, kernels=kernels)
    (ours,) = torch.autograd.grad((found * factor).sum(), leaf)
    torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(ours.double(), gradient, rtol=0, atol=2**-8 if dtype is torch.bfloat16 else 1e-4)


def _check_head(kernels: Kernels, largest: float, device: str = "cpu") -> None:
    """The loss under a frozen head, with the gradient of its input, made in blocks of tokens."""
    logits, labels, factor = (x.to(device) for x in _logits(largest, torch.float32))
    x = torch.eye(12, device=device)
    leaf = x.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(leaf @ logits.double(), labels, reduction="none", ignore_index=-100)
    (expected,) = torch.autograd.grad((losses * factor).sum(), leaf)
    found, dx = linear_cross_entropy(
        x, logits.t().contiguous(), labels, factor, kernels.loss, first_id=0, num_ids=77, chunk_tokens=5
    )
    torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-6, atol=1e-4)
    assert dx is not None and (dx.double() - expected).abs().max() < 1e-5 * largest


@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
class TestNativeCrossEntropy:
    pytestmark = ON_EVERY_INSTRUCTION_SET

    def test_losses_and_gradient(self, dtype: torch.dtype, largest: float) -> None:
        _check_cross_entropy(NATIVE, dtype, largest)
        _check_head(NATIVE, largest)


@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_cross_entropy(dtype: torch.dtype, largest: float) -> None:
    _check_cross_entropy(REFERENCE, dtype, largest)
    _check_head(REFERENCE, largest)


@pytest.mark.parametrize("largest", LARGEST)
@places
def test_triton_cross_entropy(place: tuple[str, torch.dtype], largest: float) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    TRITON = backend("triton")

    device, dtype = place
    if dtype is torch.float16:
        pytest.skip("float16 has no numbers of that size")
    _check_cross_entropy(TRITON, dtype, largest, device)
    if dtype is torch.float32:
        _check_head(TRITON, largest, device)
