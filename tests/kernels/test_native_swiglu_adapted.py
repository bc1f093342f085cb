"""Compiled SwiGLU backward beside dA of the adapters on its output, against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels.native import swiglu
from engine.kernels.records import AdapterSection, InputUpdate
from rankfold.benchmarking import oracles
from rankfold.benchmarking.oracles import ODD_SHAPES
from tests.kernels.native_support import (
    ON_EVERY_INSTRUCTION_SET,
    a_section,
    assert_accurate,
    assert_same_on_any_threads,
    drawn_bits,
    widened,
)

pytestmark = ON_EVERY_INSTRUCTION_SET
SCALE = 1.25
LARGE = ((300, 600), (2100, 40), (20, 4200))
"""Several groups, several passes, several blocks of columns."""


def _targets(ranks: tuple[int, ...], features: int) -> list[AdapterSection]:
    """Stacked adapters; the second one is frozen."""
    firsts = [sum(ranks[:index]) for index in range(len(ranks))]
    sections = [
        a_section(widened(torch.full((rank, features), 0.5)), first) for rank, first in zip(ranks, firsts, strict=True)
    ]
    return [replace(section, da=None) if index == 1 else section for index, section in enumerate(sections)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ranks", [(1,), (16,), (8, 3, 16)])
@pytest.mark.parametrize("shape", [*ODD_SHAPES, *LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(dtype: torch.dtype, shape: tuple[int, int], ranks: tuple[int, ...], masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((shape[0], 2 * shape[1]), shape, (shape[0], sum(ranks)))
    gate_up, dy, dh = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    bits, kept = drawn_bits(*shape) if masked else (None, torch.ones(shape))
    targets = _targets(ranks, shape[1])
    into = widened(torch.zeros_like(gate_up))
    gradient = swiglu.swiglu_backward_adapted(
        widened(dy), widened(gate_up), widened(dh), bits, targets, scale=SCALE, out=into
    )
    assert torch.equal(gradient, swiglu.swiglu_backward(dy, gate_up))
    assert torch.equal(swiglu.swiglu_backward_adapted(dy, gate_up, dh, bits, [], out=gate_up.clone()), gradient)
    y, exact_y = oracles.swiglu(gate_up), oracles.swiglu(gate_up.double())
    for target in targets:
        if target.da is None:
            continue
        rows = target.ranks(dh)
        exact = 0.5 + SCALE * (rows.double().t() @ (kept.double() * exact_y))
        torchs = 0.5 + SCALE * (rows.float().t() @ (kept * y.float()))
        terms = SCALE * (rows.float().abs().t() @ y.float().abs()) if shape[0] == 1 else None
        assert_accurate(target.da, torchs, exact, terms)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [*ODD_SHAPES, *LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_of_the_same_adapters(dtype: torch.dtype, shape: tuple[int, int], masked: bool) -> None:
    """dA does not depend on it; the input's gradient is that of the kernel which only adds it."""
    generator = torch.Generator().manual_seed(0)
    ranks = (16, 3, 8)
    sizes = ((shape[0], 2 * shape[1]), shape, (shape[0], sum(ranks)), (sum(ranks), shape[1]))
    gate_up, dy, dh, a = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    bits = drawn_bits(*shape)[0] if masked else None
    update = InputUpdate(dh_TR=dh, a_RI=widened(a), mask=bits, scale=SCALE)
    with_update, without = _targets(ranks, shape[1]), _targets(ranks, shape[1])
    gradient = swiglu.swiglu_backward_adapted(dy, gate_up, dh, bits, with_update, update=update)
    assert torch.equal(gradient, swiglu.swiglu_backward(dy, gate_up, update=update))
    swiglu.swiglu_backward_adapted(dy, gate_up, dh, bits, without)
    for one, other in zip(with_update, without, strict=True):
        assert one.da is None or torch.equal(one.da, other.da)


def test_any_number_of_threads() -> None:
    torch.manual_seed(0)
    gate_up, dy, dh = torch.randn(2300, 1400), torch.randn(2300, 700), torch.randn(2300, 24)
    bits, _ = drawn_bits(2300, 700)

    def run() -> tuple[Tensor, ...]:
        da = torch.zeros(24, 700)
        return swiglu.swiglu_backward_adapted(dy, gate_up, dh, bits, [a_section(da)]), da

    assert_same_on_any_threads(run)
