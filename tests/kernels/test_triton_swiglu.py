"""SwiGLU kernels against torch's silu and its autograd: fp64 for the truth, the tested dtype for the error allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels.records import InputUpdate
from engine.kernels.triton import swiglu
from tests.kernels.comparing import assert_as_exact_as_torch, places, random_rows
from tests.kernels.triton_masks import drawn_mask

SHAPES = [(5, 123), (1, 1), (40, 50), (3, 1100)]


def _activation(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _gradients(loss: Callable[[Tensor], Tensor], gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """By autograd at the input's dtype and in fp64."""
    leaves = [gate_up.detach().to(dtype).requires_grad_() for dtype in (gate_up.dtype, torch.float64)]
    torchs, exact = (torch.autograd.grad(loss(leaf), leaf)[0] for leaf in leaves)
    return torchs, exact


@places
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(place, shape: tuple[int, int]) -> None:
    num_tokens, num_features = shape
    gate_up = random_rows(place, num_tokens, 2 * num_features, gap=5) * 3
    wide = torch.full((num_tokens, num_features + 4), 7.0, dtype=place[1], device=place[0])
    ours = swiglu.swiglu_forward(gate_up, out=wide[:, :num_features])
    assert_as_exact_as_torch(ours, _activation(gate_up), _activation(gate_up.double()), "y")
    assert (wide[:, num_features:] == 7).all(), "wrote outside its columns"
    assert torch.equal(swiglu.swiglu_forward(gate_up[None])[0], ours)


@places
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(place, shape: tuple[int, int]) -> None:
    num_tokens, num_features = shape
    gate_up = random_rows(place, num_tokens, 2 * num_features, gap=5) * 3
    dy = random_rows(place, num_tokens, num_features, gap=3, seed=1)
    torchs, exact = _gradients(lambda x: (_activation(x) * dy.to(x.dtype)).sum(), gate_up)
    assert_as_exact_as_torch(swiglu.swiglu_backward(dy, gate_up), torchs, exact, "dx")
    activation = torch.empty(num_tokens, num_features + 2, dtype=place[1], device=place[0])[:, :num_features]
    expected, kept = _activation(gate_up.double()), _activation(gate_up)
    ours = swiglu.swiglu_backward(dy, gate_up, out=gate_up, activation_out=activation)
    assert ours is gate_up
    assert_as_exact_as_torch(ours, torchs, exact, "dx in place")
    assert_as_exact_as_torch(activation, kept, expected, "activation")


@places
@pytest.mark.parametrize("shape", [(5, 123, 3), (1, 20, 16), (40, 150, 70)], ids=str)
@pytest.mark.parametrize("offset", [None, 0, 5], ids=["no dropout", "dropout", "dropout in a shard"])
def test_backward_with_an_adapters_update(place, shape: tuple[int, int, int], offset: int | None) -> None:
    """The activation feeds an adapter: autograd through both against the fused prologue."""
    num_tokens, num_features, rank = shape
    gate_up = random_rows(place, num_tokens, 2 * num_features, gap=5)
    dy = random_rows(place, num_tokens, num_features, gap=3, seed=1)
    a, dh = random_rows(place, rank, num_features, seed=2), random_rows(place, num_tokens, rank, gap=2, seed=3)
    mask, keep_scale, factor = drawn_mask(place, num_tokens, num_features, offset, probability=0.5)

    def loss(x: Tensor) -> Tensor:
        y = _activation(x)
        h = (y * factor.to(x.dtype)) @ a.to(x.dtype).t()
        return (y * dy.to(x.dtype)).sum() + (h * dh.to(x.dtype)).sum()

    torchs, exact = _gradients(loss, gate_up)
    update = InputUpdate(dh_TR=dh, a_RI=a, mask=mask, scale=keep_scale)
    assert_as_exact_as_torch(swiglu.swiglu_backward(dy, gate_up, update=update), torchs, exact, "dx")
    ours = swiglu.swiglu_backward(dy, gate_up, update=update, out=gate_up)
    assert_as_exact_as_torch(ours, torchs, exact, "dx in place")


@places
def test_no_tokens(place) -> None:
    gate_up, dy = (torch.empty(0, size, dtype=place[1], device=place[0]) for size in (16, 8))
    assert swiglu.swiglu_forward(gate_up).shape == (0, 8)
    assert swiglu.swiglu_backward(dy, gate_up).shape == (0, 16)
