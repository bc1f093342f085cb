"""The compiled kernels of layers with states against the specification in fp64, which transformers' rules are held to
(tests/hybrids); torch in fp32, or bfloat16, is the measure of the error allowed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from engine.hybrids import reference, state_space_reference
from engine.hybrids.pieces import Pieces
from engine.kernels.native import convolution, delta, gated_norm, ssd
from tests.kernels.native_support import (
    ON_EVERY_INSTRUCTION_SET,
    assert_accurate,
    assert_same_on_any_threads,
    widened,
)

pytestmark = ON_EVERY_INSTRUCTION_SET
CPU = torch.device("cpu")
LENGTHS = (1, 70, 3, 1, 61, 16, 500)
"""Shorter than a chunk, a token longer, and longer than the distance between kept states."""
RECEIVED, SENT = (1, 3, 6), (0, 1, 3, 4)


def _wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def _same(x: Tensor | None) -> Tensor | None:
    return x


def _compare(run: Callable[..., list[Tensor | None]], ours: ModuleType, dtypes: list[torch.dtype]) -> None:
    """Each result of `run(module, convert)` in turn; gradients that are kept in fp32 are compared as such."""
    found, plain, exact = run(ours, _same), run(reference, _same), run(reference, _wide)
    for one, other, value, dtype in zip(found, plain, exact, dtypes, strict=True):
        assert (one is None) == (value is None)
        if one is not None and other is not None and value is not None:
            assert one.dtype == dtype
            assert_accurate(one, other.to(dtype), value.double())


def _delta_inputs(
    lengths: tuple[int, ...], sizes: tuple[int, int, int, int], dtype: torch.dtype, *, by_channel: bool = False
) -> list[Tensor]:
    """q, k, v, decay, beta, d_out; columns of wider tensors."""
    (groups, heads, key, value), tokens = sizes, sum(lengths)
    torch.manual_seed(0)
    q, k = (widened(torch.randn(tokens, groups, key).to(dtype)) for _ in range(2))
    v, d_out = (widened(torch.randn(tokens, heads, value).to(dtype)) for _ in range(2))
    # a few tokens forget nearly everything, so that sums of decays are large
    decay = -(2 * torch.randn(tokens, heads, *([key] if by_channel else []))).exp()
    return [q, k, v, decay, torch.rand(tokens, heads), d_out]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("sizes", [(1, 3, 5, 4), pytest.param((2, 4, 32, 16), marks=pytest.mark.slow), (1, 10, 16, 33)])
def test_delta_rule(sizes: tuple[int, int, int, int], by_channel: bool, dtype: torch.dtype) -> None:
    q, k, v, decay, beta, d_out = _delta_inputs(LENGTHS, sizes, dtype, by_channel=by_channel)
    pieces = Pieces.of_lengths(LENGTHS, CPU, received=RECEIVED, sent=SENT)
    state = (sizes[1], sizes[2], sizes[3])
    initial, d_final = torch.randn(len(RECEIVED), *state), torch.randn(len(SENT), *state)

    def run(module: ModuleType, convert: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        inputs = [convert(x) for x in (q, k, v, decay, beta)]
        start = convert(initial)
        out, final, kept = module.delta_forward(*inputs, pieces, start, scale=0.3, keep=True)
        grads = module.delta_backward(
            convert(d_out), convert(d_final), *inputs, pieces, start, scale=0.3, kept=kept
        )  # fmt: skip
        return [out, final, *grads]

    wide = torch.float32
    _compare(run, delta, [dtype, wide, dtype, dtype, dtype, wide, wide, wide])


def test_delta_rule_without_states() -> None:
    sizes = (1, 2, 16, 16)
    q, k, v, decay, beta, d_out = _delta_inputs(LENGTHS, sizes, torch.float32)
    pieces = Pieces.of_lengths(LENGTHS, CPU)

    def run(module: ModuleType, convert: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        inputs = [convert(x) for x in (q, k, v, decay, beta)]
        out, final, kept = module.delta_forward(*inputs, pieces, None, scale=1.0, keep=True)
        grads = module.delta_backward(convert(d_out), None, *inputs, pieces, None, scale=1.0, kept=kept)
        return [out, final, *grads]

    _compare(run, delta, [torch.float32] * 8)


def test_delta_rule_is_that_of_transformers() -> None:
    q, k, v, decay, beta, d_out = _delta_inputs((300,), (2, 2, 32, 16), torch.float32)
    pieces = Pieces.of_lengths((300,), CPU)
    inputs = [x.clone().requires_grad_() for x in (q, k, v, decay, beta)]
    expected, _ = torch_chunk_gated_delta_rule(
        *(x[None] for x in inputs[:3]), g=inputs[3][None], beta=inputs[4][None], use_qk_l2norm_in_kernel=True
    )
    gradients = torch.autograd.grad(expected[0], inputs, d_out)
    out, _, kept = delta.delta_forward(q, k, v, decay, beta, pieces, None, scale=32**-0.5, keep=True)
    found = delta.delta_backward(
        d_out, None, q, k, v, decay, beta, pieces, None, scale=32**-0.5, kept=kept
    )  # fmt: skip
    for one, other in zip((out, *found[:5]), (expected[0], *gradients), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * other.abs().max().item())


def test_delta_rule_on_any_threads() -> None:
    q, k, v, decay, beta, d_out = _delta_inputs(LENGTHS, (1, 10, 16, 16), torch.float32)
    pieces = Pieces.of_lengths(LENGTHS, CPU)

    def run() -> tuple[Tensor, ...]:
        out, _, kept = delta.delta_forward(q, k, v, decay, beta, pieces, None, scale=1.0, keep=True)
        found = delta.delta_backward(d_out, None, q, k, v, decay, beta, pieces, None, scale=1.0, kept=kept)
        return out, *found[:5]

    assert_same_on_any_threads(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 4, 16, 24), (1, 10, 5, 7)])
def test_state_space(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    (groups, heads, features, size), tokens = sizes, sum(LENGTHS)
    torch.manual_seed(0)
    x, dy = (widened(torch.randn(tokens, heads, features).to(dtype)) for _ in range(2))
    b, c = (widened(torch.randn(tokens, groups, size).to(dtype)) for _ in range(2))
    dt, a, d = torch.rand(tokens, heads), -torch.rand(heads) - 0.1, torch.randn(heads)
    initial = torch.randn(len(RECEIVED), heads, features, size)
    d_final = torch.randn(len(SENT), heads, features, size)
    pieces = Pieces.of_lengths(LENGTHS, CPU, received=RECEIVED, sent=SENT)

    def run(module: ModuleType, convert: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        inputs, start = [convert(one) for one in (x, dt, a, b, c, d)], convert(initial)
        y, final, kept = module.ssd_forward(*inputs, pieces, start, keep=True)
        return [y, final, *module.ssd_backward(convert(dy), convert(d_final), *inputs, pieces, start, kept=kept)]

    found, plain, exact = run(ssd, _same), run(state_space_reference, _same), run(state_space_reference, _wide)
    for one, other, value in zip(found, plain, exact, strict=True):
        assert one is not None and other is not None and value is not None
        # those of a are sums over all tokens of differences, c dc - b db, of terms about ten times as large
        assert_accurate(one, other.to(one.dtype), value.double(), 16 * value if one.dim() == 1 else None)
    y = found[0]
    assert y is not None
    without = ssd.ssd_forward(x, dt, a, b, c, None, pieces, initial, keep=False)
    torch.testing.assert_close(without[0].float() + d[:, None] * x.float(), y.float(), rtol=2e-2, atol=2e-2)


def test_state_space_on_any_threads() -> None:
    torch.manual_seed(0)
    tokens, heads = sum(LENGTHS), 10
    x, dt, a = torch.randn(tokens, heads, 8), torch.rand(tokens, heads), -torch.rand(heads)
    b, c, d = torch.randn(tokens, 1, 16), torch.randn(tokens, 1, 16), torch.randn(heads)
    pieces = Pieces.of_lengths(LENGTHS, CPU)

    def run() -> tuple[Tensor, ...]:
        y, _, kept = ssd.ssd_forward(x, dt, a, b, c, d, pieces, None, keep=True)
        return y, *ssd.ssd_backward(y, None, x, dt, a, b, c, d, pieces, None, kept=kept)[:5]

    assert_same_on_any_threads(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("channels", "taps", "activation", "with_bias", "received"),
    [(37, 4, "silu", False, ()), (300, 4, "silu", True, RECEIVED), (300, 3, None, True, (0, 2))],
)
def test_convolution(
    channels: int, taps: int, activation: str | None, with_bias: bool, received: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    lengths = (1, 2, 3, 40, 7, 1, 5)
    shape = (sum(lengths), channels)
    x, dy = (widened(torch.randn(shape).to(dtype)) for _ in range(2))
    weight, bias = torch.randn(channels, taps), torch.randn(channels) if with_bias else None
    tail = torch.randn(len(received), taps - 1, channels).to(dtype) if received else None
    pieces = Pieces.of_lengths(lengths, CPU, received=received)

    def run(module: ModuleType, convert: Callable[[Tensor | None], Tensor | None]) -> list[Tensor | None]:
        sums = [torch.ones(channels, taps), torch.ones(channels) if with_bias else None]
        given = [convert(x), convert(weight), convert(bias), pieces, convert(tail)]
        y = module.conv_forward(*given, activation=activation)
        dx, d_tail = module.conv_backward(
            convert(dy), *given, activation=activation, weight_gradient=sums[0], bias_gradient=sums[1]
        )
        return [y, dx, d_tail, *sums]

    _compare(run, convolution, [dtype, dtype, dtype, torch.float32, torch.float32])
    assert_same_on_any_threads(lambda: (convolution.conv_forward(x, weight, bias, pieces, tail, activation="silu"),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 8), (300, 3, 37)])
def test_gated_norm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, z, dy = (widened(torch.randn(shape).to(dtype)) for _ in range(3))
    weight = torch.randn(shape[2])

    def run(module: ModuleType, convert: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        total = torch.ones(shape[2])
        y = module.gated_norm_forward(convert(x), convert(z), convert(weight), 1e-6)
        return [
            y,
            *module.gated_norm_backward(convert(dy), convert(x), convert(z), convert(weight), 1e-6, total),
            total,
        ]

    _compare(run, gated_norm, [dtype, dtype, dtype, torch.float32])

    def backward() -> tuple[Tensor, ...]:
        total = torch.zeros(shape[2])
        return *gated_norm.gated_norm_backward(dy, x, z, weight, 1e-6, total), total

    assert_same_on_any_threads(backward)
