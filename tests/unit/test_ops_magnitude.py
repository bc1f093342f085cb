"""DoRA's magnitudes and adapters' biases against torch's autograd on the formulas of the paper and of PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops.adapters import Adapter
from engine.ops.gradients import GradientSink
from engine.ops.magnitude import AdapterBias, Magnitude, biased_output, scaled_output

T, I, O, R, SCALE = 7, 11, 9, 3, 1.7  # noqa: E741
FIRST, ROWS = 2, 5
"""The adapter is on some of the output columns."""


class _LowRank:
    def __init__(self, a_RI: Tensor) -> None:
        self.a_RI = a_RI


class _Operands:
    """What the lengths are made of."""

    axis = None

    def __init__(self, weight_OI: Tensor, a_RI: Tensor) -> None:
        self.weight_OI, self.low_rank = weight_OI, _LowRank(a_RI)


class _Context:
    adapters = True


def _drawn() -> tuple[Tensor, Tensor, Tensor, Adapter]:
    torch.manual_seed(0)
    weight, a, b = torch.randn(O, I), torch.randn(R + 1, I), torch.randn(ROWS, R)
    return weight, a, b, _adapter(b)


def _adapter(b_OR: Tensor) -> Adapter:
    place = {"first_column": FIRST, "num_columns": ROWS, "first_row": 1, "num_ranks": R}
    return Adapter(**place, b_OR=b_OR, scale=SCALE, sink_a=None, sink_b=None)


def _run(output: Any, z: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dz and the leaf's gradient by autograd of `output(z, leaf)` for a drawn dy."""
    z, leaf = z.clone().requires_grad_(), leaf.clone().requires_grad_()
    y = output(z, leaf)
    y.backward(torch.randn(T, O, generator=torch.Generator().manual_seed(5)))
    assert z.grad is not None
    return y.detach(), z.grad, leaf.grad if leaf.grad is not None else torch.zeros(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_magnitudes(dtype: torch.dtype) -> None:
    weight, a, b, _ = _drawn()
    z, m = torch.randn(T, O), torch.rand(ROWS) + 0.5
    rows = slice(FIRST, FIRST + ROWS)

    def formula(z: Tensor, m: Tensor) -> Tensor:
        lengths = (weight[rows] + SCALE * b @ a[1:]).norm(dim=1)
        return torch.cat((z[:, :FIRST], z[:, rows] * (m / lengths), z[:, FIRST + ROWS :]), dim=1)

    expected = _run(formula, z, m)
    sink = GradientSink((ROWS,), torch.device("cpu"))
    cast = _adapter(b.to(dtype))
    operands: Any = _Operands(weight.to(dtype), a.to(dtype))
    context: Any = _Context()
    one = Magnitude(m_O=m.to(dtype), adapter=cast, sink=sink)

    def ours(z: Tensor, m: Tensor) -> Tensor:
        return scaled_output(z.to(dtype), operands, (one,), context, (m,), split_inputs=False).float()

    y, dz, _ = _run(ours, z, m)
    limit = 1e-5 if dtype == torch.float32 else 2e-2  # a few roundings of 2**-11 of numbers up to about 5
    for found, wanted in zip((y, dz, sink.buffer), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=limit, atol=limit)


def test_biases() -> None:
    _, _, _, adapter = _drawn()
    z, bias = torch.randn(T, O), torch.randn(ROWS)

    def formula(z: Tensor, bias: Tensor) -> Tensor:
        return z + SCALE * torch.nn.functional.pad(bias, (FIRST, O - FIRST - ROWS))

    expected = _run(formula, z, bias)
    sink = GradientSink((ROWS,), torch.device("cpu"))
    context: Any = _Context()
    one = AdapterBias(b_O=bias, adapter=adapter, sink=sink)
    y, dz, _ = _run(lambda z, bias: biased_output(z, (one,), context, (bias,)), z, bias)
    for found, wanted in zip((y, dz, sink.buffer), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_without_adapters_the_output_stays() -> None:
    weight, a, _, adapter = _drawn()
    z, operands = torch.randn(T, O), _Operands(weight, a)
    context: Any = _Context()
    context.adapters = False
    one = Magnitude(m_O=torch.ones(ROWS), adapter=adapter, sink=None)
    assert scaled_output(z, operands, (one,), context, (), split_inputs=False) is z  # type: ignore[arg-type]
    assert biased_output(z, (AdapterBias(b_O=torch.ones(ROWS), adapter=adapter, sink=None),), context, ()) is z
