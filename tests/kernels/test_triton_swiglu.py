"""SwiGLU kernels against torch's silu and its autograd: fp64 for the truth, the tested dtype for the error allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels.records import InputUpdate
from engine.kernels.triton import launch, swiglu
from rankfold.benchmarking import oracles
from tests.kernels.comparing import assert_as_exact_as_torch, assert_rounded_once, places, random_rows
from tests.kernels.native_support import a_section
from tests.kernels.triton_masks import drawn_mask

SHAPES = [(5, 123), (1, 1), (40, 50), (3, 1100)]


def _gradients(loss: Callable[[Tensor], Tensor], gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """By autograd at the input's dtype and in fp64."""
    leaves = [gate_up.detach().to(dtype).requires_grad_() for dtype in (gate_up.dtype, torch.float64)]
    torchs, exact = (torch.autograd.grad(loss(leaf), leaf)[0] for leaf in leaves)
    return torchs, exact


def _loss(gate_up: Tensor, dy: Tensor, factor: Tensor, dh: Tensor, a: Tensor) -> Tensor:
    """A loss whose gradient is dy with regard to the activation and dh with regard to its projection."""
    dtype, y = gate_up.dtype, oracles.swiglu(gate_up)
    h = (y * factor.to(dtype)) @ a.to(dtype).t()
    return (y * dy.to(dtype)).sum() + (h * dh.to(dtype)).sum()


@places
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(place, shape: tuple[int, int]) -> None:
    num_tokens, num_features = shape
    gate_up = random_rows(place, num_tokens, 2 * num_features, gap=5) * 3
    wide = torch.full((num_tokens, num_features + 4), 7.0, dtype=place[1], device=place[0])
    ours = swiglu.swiglu_forward(gate_up, out=wide[:, :num_features])
    assert_as_exact_as_torch(ours, oracles.swiglu(gate_up), oracles.swiglu(gate_up.double()), "y")
    assert_rounded_once(ours, oracles.swiglu(gate_up.double()), "y")
    assert (wide[:, num_features:] == 7).all(), "wrote outside its columns"
    assert torch.equal(swiglu.swiglu_forward(gate_up[None])[0], ours)


@places
@pytest.mark.parametrize("rank", [3, 16, 21])
@pytest.mark.parametrize("shape", [(5, 123), (1, 20), (150, 290)], ids=str)
@pytest.mark.parametrize("offset", [None, 5], ids=["no dropout", "dropout in a shard"])
def test_forward_with_the_adapters_projection(place, shape: tuple[int, int], rank: int, offset: int | None) -> None:
    """Where fp32 is multiplied, 21 ranks are too many for one block, so that y is read again."""
    num_tokens, num_features = shape
    gate_up, a = random_rows(place, num_tokens, 2 * num_features, gap=5), random_rows(place, rank, num_features, gap=1)
    mask, keep_scale, factor = drawn_mask(place, num_tokens, num_features, offset, probability=0.25)
    expected = swiglu.swiglu_forward(gate_up)
    torchs = (expected * factor.to(expected.dtype)) @ a.t() * 1.5
    exact = (expected.double() * factor.double()) @ a.double().t() * 1.5
    for padding in (0, 6):
        whole = torch.full((num_tokens, num_features + rank + padding + 2), 7.0, dtype=place[1], device=place[0])
        y, beside = whole[:, :-2].tensor_split([num_features], dim=1)
        h = swiglu.swiglu_project(gate_up, a, mask, keep_scale=1.5 * keep_scale, out=y, h_out=beside)
        assert torch.equal(y, expected), "y has the same bits whichever pass wrote it"
        assert h.data_ptr() == beside.data_ptr() and h.shape == (num_tokens, rank)
        assert_as_exact_as_torch(h, torchs, exact, "H")
        assert_rounded_once(h, exact, "H")
        assert (beside[:, rank:] == 0).all(), "left something in the padding"
        assert (whole[:, -2:] == 7).all(), "wrote outside its columns"


@places
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(place, shape: tuple[int, int]) -> None:
    num_tokens, num_features = shape
    gate_up = random_rows(place, num_tokens, 2 * num_features, gap=5) * 3
    dy = random_rows(place, num_tokens, num_features, gap=3, seed=1)
    torchs, exact = _gradients(lambda x: (oracles.swiglu(x) * dy.to(x.dtype)).sum(), gate_up)
    assert_as_exact_as_torch(swiglu.swiglu_backward(dy, gate_up), torchs, exact, "dx")
    activation = torch.empty(num_tokens, num_features + 2, dtype=place[1], device=place[0])[:, :num_features]
    expected, kept = oracles.swiglu(gate_up.double()), oracles.swiglu(gate_up)
    ours = swiglu.swiglu_backward(dy, gate_up, out=gate_up, activation_out=activation)
    assert ours is gate_up
    assert_as_exact_as_torch(ours, torchs, exact, "dx in place")
    assert_rounded_once(ours, exact, "dx in place")
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

    torchs, exact = _gradients(lambda x: _loss(x, dy, factor, dh, a), gate_up)
    update = InputUpdate(dh_TR=dh, a_RI=a, mask=mask, scale=keep_scale)
    assert_as_exact_as_torch(swiglu.swiglu_backward(dy, gate_up, update=update), torchs, exact, "dx")
    ours = swiglu.swiglu_backward(dy, gate_up, update=update, out=gate_up)
    assert_as_exact_as_torch(ours, torchs, exact, "dx in place")
    assert_rounded_once(ours, exact, "dx in place")


@places
@pytest.mark.parametrize("ranks", [(3,), (4, 5, 3), (21,)], ids=str)
@pytest.mark.parametrize("shape", [(5, 123), (1, 20), (1100, 40)], ids=str)
@pytest.mark.parametrize("offset", [None, 5], ids=["no dropout", "dropout in a shard"])
def test_backward_with_the_adapters_own_gradient(
    place, shape: tuple[int, int], ranks: tuple[int, ...], offset: int | None
) -> None:
    """With the update and without. The second adapter of three is frozen. Where fp32 is multiplied, 21 ranks are too
    many for one block, so that y is written."""
    _assert_backward_adapted(place, shape, ranks, offset)


@places
@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)], ids=str)
def test_backward_with_the_tiles_of_other_gpus(
    place, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits the tests above run with those of Hopper: 64 tokens and features where these have 32."""
    monkeypatch.setattr(launch, "capability", lambda device: capability)
    _assert_backward_adapted(place, (70, 123), (16,), 5)


def _assert_backward_adapted(
    place: tuple[str, torch.dtype], shape: tuple[int, int], ranks: tuple[int, ...], offset: int | None
) -> None:
    (num_tokens, num_features), rank = shape, sum(ranks)
    gate_up = random_rows(place, num_tokens, 2 * num_features, gap=5)
    dy, dh = random_rows(place, num_tokens, num_features, gap=3, seed=1), random_rows(place, num_tokens, rank, seed=3)
    a = random_rows(place, rank, num_features, seed=2)
    mask, keep_scale, factor = drawn_mask(place, num_tokens, num_features, offset, probability=0.5)
    update = InputUpdate(dh_TR=dh, a_RI=a, mask=mask, scale=keep_scale)
    firsts = [sum(ranks[:index]) for index in range(len(ranks))]
    starts = [torch.full((num, num_features), 0.5, device=place[0]) for num in ranks]
    sections = [a_section(start.clone(), first) for start, first in zip(starts, firsts, strict=True)]
    sections = [replace(one, da=None) if index == 1 else one for index, one in enumerate(sections)]
    for given in (update, None):
        found = [one if one.da is None else replace(one, da=one.da.clone()) for one in sections]
        ours = swiglu.swiglu_backward_adapted(dy, gate_up, dh, mask, found, keep_scale=keep_scale, update=given)
        factors = (factor, dh, a) if given is not None else (torch.zeros_like(factor), dh, a)
        torchs, exact = _gradients(lambda x, of=factors: _loss(x, dy, *of), gate_up)
        assert_as_exact_as_torch(ours, torchs, exact, "dx")
        for one in found:
            if one.da is None:
                continue
            exact = 0.5 + one.ranks(dh).double().t() @ (factor.double() * oracles.swiglu(gate_up.double()))
            torchs = 0.5 + one.ranks(dh).float().t() @ (factor * oracles.swiglu(gate_up)).float()
            assert_as_exact_as_torch(one.da, torchs, exact, "dA")


@places
def test_no_tokens(place) -> None:
    gate_up, dy = (torch.empty(0, size, dtype=place[1], device=place[0]) for size in (16, 8))
    assert swiglu.swiglu_forward(gate_up).shape == (0, 8)
    h = swiglu.swiglu_project(gate_up, dy.new_ones(3, 8), None, keep_scale=1.0, out=dy, h_out=dy)
    assert h.shape == (0, 3)
    assert swiglu.swiglu_backward(dy, gate_up).shape == (0, 16)
