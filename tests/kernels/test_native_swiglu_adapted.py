"""Compiled SwiGLU backward beside dA of the adapters on its output, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.ops.native import low_rank, swiglu
from engine.ops.native.arguments import InputUpdate
from tests.kernels.native_support import (
    ON_EVERY_INSTRUCTION_SET,
    SHAPES,
    assert_accurate,
    assert_same_on_any_threads,
    drawn_bits,
    widened,
)

pytestmark = ON_EVERY_INSTRUCTION_SET
SCALE = 1.25
LARGE = ((300, 600), (2100, 40), (20, 4200))
"""Several groups, several passes, several blocks of columns."""


def _targets(ranks: tuple[int, ...], features: int) -> list[low_rank.GradientA]:
    """Sinks of stacked adapters; the second one is frozen."""
    firsts = [sum(ranks[:index]) for index in range(len(ranks))]
    return [
        low_rank.GradientA(
            gradient_rI=widened(torch.full((rank, features), 0.5)), first_row=first, scale=SCALE * (index + 1.0)
        )
        for index, (rank, first) in enumerate(zip(ranks, firsts, strict=True))
        if index != 1
    ]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ranks", [(1,), (16,), (8, 3, 16)])
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(dtype: torch.dtype, shape: tuple[int, int], ranks: tuple[int, ...], masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((shape[0], 2 * shape[1]), shape, (shape[0], sum(ranks)))
    gate_up, dy, dh = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    bits, kept = drawn_bits(*shape) if masked else (None, torch.ones(shape))
    targets = _targets(ranks, shape[1])
    into = widened(torch.zeros_like(gate_up))
    gradient = swiglu.swiglu_backward_adapted(widened(dy), widened(gate_up), widened(dh), bits, targets, out=into)
    assert torch.equal(gradient, swiglu.swiglu_backward(dy, gate_up))
    assert torch.equal(swiglu.swiglu_backward_adapted(dy, gate_up, dh, bits, [], out=gate_up.clone()), gradient)
    gate, up = gate_up.chunk(2, dim=1)
    y, exact_y = functional.silu(gate) * up, functional.silu(gate.double()) * up.double()
    for target in targets:
        rows = dh.narrow(1, target.first_row, target.gradient_rI.shape[0])
        exact = 0.5 + target.scale * (rows.double().t() @ (kept.double() * exact_y))
        torchs = 0.5 + target.scale * (rows.float().t() @ (kept * y.float()))
        terms = target.scale * (rows.float().abs().t() @ y.float().abs()) if shape[0] == 1 else None
        assert_accurate(target.gradient_rI, torchs, exact, terms)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_of_the_same_adapters(dtype: torch.dtype, shape: tuple[int, int], masked: bool) -> None:
    """dA does not depend on it; the input's gradient is that of the kernel which only adds it."""
    generator = torch.Generator().manual_seed(0)
    ranks = (16, 3, 8)
    sizes = ((shape[0], 2 * shape[1]), shape, (shape[0], sum(ranks)), (sum(ranks), shape[1]))
    gate_up, dy, dh, a = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    bits = drawn_bits(*shape)[0] if masked else None
    update = InputUpdate(dh_TR=dh, a_RI=widened(a), bits=bits, scale=SCALE)
    with_update, without = _targets(ranks, shape[1]), _targets(ranks, shape[1])
    gradient = swiglu.swiglu_backward_adapted(dy, gate_up, dh, bits, with_update, update=update)
    assert torch.equal(gradient, swiglu.swiglu_backward(dy, gate_up, update=update))
    swiglu.swiglu_backward_adapted(dy, gate_up, dh, bits, without)
    for one, other in zip(with_update, without, strict=True):
        assert torch.equal(one.gradient_rI, other.gradient_rI)


def test_any_number_of_threads() -> None:
    torch.manual_seed(0)
    gate_up, dy, dh = torch.randn(2300, 1400), torch.randn(2300, 700), torch.randn(2300, 24)
    bits, _ = drawn_bits(2300, 700)

    def run() -> tuple[Tensor, ...]:
        da = torch.zeros(24, 700)
        target = [low_rank.GradientA(gradient_rI=da, first_row=0)]
        return swiglu.swiglu_backward_adapted(dy, gate_up, dh, bits, target), da

    assert_same_on_any_threads(run)
