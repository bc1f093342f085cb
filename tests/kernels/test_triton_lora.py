"""The low-rank products against plain torch, in fp64 for the truth and in the tested dtype for the error allowed.

Those on the side of the output have a file of their own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels.records import AdapterSection, InputUpdate
from engine.kernels.triton import lora, rmsnorm
from engine.kernels.triton.output_gradients import output_gradients
from rankfold.benchmarking.oracles import rms_norm
from tests.kernels.comparing import assert_as_exact_as_torch, assert_rounded_once, places, random_rows
from tests.kernels.native_support import a_section
from tests.kernels.triton_masks import drawn_mask

SCALE = 2.0
SHAPES = [(5, 123, 45, 3), (1, 17, 20, 16), (150, 290, 270, 24)]
"""tokens, inputs, outputs, rank; the last one is split over several programs in every direction."""


MASKS = pytest.mark.parametrize("dropout", [None, 0, 3], ids=str)
"""No dropout; a shard that starts at a block of features, and one that does not."""


@places
@MASKS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_project(place, shape: tuple[int, ...], dropout) -> None:
    num_tokens, num_inputs, _, rank = shape
    x, a = random_rows(place, num_tokens, num_inputs, gap=5), random_rows(place, rank, num_inputs, gap=1)
    mask, keep_scale, factor = drawn_mask(place, num_tokens, num_inputs, dropout, probability=0.25)
    torchs, exact = (x * factor.to(x.dtype)) @ a.t(), (x.double() * factor.double()) @ a.double().t()
    for padding in (0, 1, 6):
        wide = torch.empty(num_tokens, 4 + rank + padding + 2, dtype=place[1], device=place[0]).fill_(7)
        ours = lora.project(x, a, mask, keep_scale=keep_scale, out=wide[:, 4:-2])
        assert_as_exact_as_torch(ours, torchs, exact, "H")
        assert_rounded_once(ours, exact, "H")
        assert (wide[:, 4 + rank : -2] == 0).all(), "left something in the padding"
        assert (wide[:, :4] == 7).all() and (wide[:, -2:] == 7).all(), "wrote outside its columns"
    beside = torch.full((num_tokens, num_inputs + rank + 1), 7.0, dtype=place[1], device=place[0])
    copy, low = beside.tensor_split([num_inputs], dim=1)
    assert torch.equal(lora.project(x, a, mask, keep_scale=keep_scale, out=low, copy=copy), ours)
    assert torch.equal(copy, x) and (low[:, rank:] == 0).all()


@places
@MASKS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gradient(place, shape: tuple[int, ...], dropout) -> None:
    num_tokens, num_inputs, _, rank = shape
    x, dh = random_rows(place, num_tokens, num_inputs, gap=5), random_rows(place, num_tokens, rank, gap=1)
    mask, keep_scale, factor = drawn_mask(place, num_tokens, num_inputs, dropout, probability=0.25)
    da = torch.full((rank, num_inputs), 9.0, device=place[0])
    lora.a_gradient(dh, x, mask, da, keep_scale=keep_scale)
    exact = dh.double().t() @ (x.double() * factor.double())
    assert_as_exact_as_torch(da, dh.t() @ (x * factor.to(x.dtype)), exact, "dA")
    assert_rounded_once(da, exact, "dA")
    once = da.clone()
    lora.a_gradient(dh, x, mask, da, keep_scale=keep_scale, add=True)
    assert torch.equal(da, once + once), "adding gives other bits than writing"


@places
@MASKS
@pytest.mark.parametrize("shape", [*SHAPES, (70, 140, 1, 70)], ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["weight", "weight and offset"])
def test_a_gradient_from_a_norms_input(place, shape: tuple[int, ...], dropout, wide: bool) -> None:
    """As from the norm's output, to the bit; the second of three adapters is frozen. Weight and offset are fp32."""
    num_tokens, num_inputs, _, rank = shape
    u, dh = random_rows(place, num_tokens, num_inputs, gap=5) * 3, random_rows(place, num_tokens, rank, gap=1)
    weight = random_rows((place[0], torch.float32 if wide else place[1]), 1, num_inputs, seed=1)[0] + 1
    mask, keep_scale, factor = drawn_mask(place, num_tokens, num_inputs, dropout, probability=0.25)
    y, rstd = rmsnorm.rmsnorm_forward(u, weight, 1e-5)
    begun = random_rows((place[0], torch.float32), rank, num_inputs, seed=2)
    found = [begun.clone(), begun.clone()]
    for da, given, norm in zip(found, (u, y), ((rstd, weight), None), strict=True):
        sections = [a_section(da[:1]), replace(a_section(da[1:2], 1), da=None), a_section(da[2:], 2)]
        lora.a_gradients(dh, given, mask, sections, keep_scale=keep_scale, norm=norm)
    ours, theirs = found
    assert torch.equal(ours, theirs), "other bits than from the norm's output"
    assert torch.equal(ours[1], begun[1]), "added to a frozen adapter"
    exact_y = rms_norm(u.double(), weight.double())
    torch_y = rms_norm(u, weight.to(u.dtype))
    exact = begun.double() + dh.double().t() @ (exact_y * factor.double())
    torchs = begun + (dh.t() @ (torch_y * factor.to(u.dtype))).float()
    trained = [0, *range(2, rank)]
    assert_as_exact_as_torch(ours[trained], torchs[trained], exact[trained], "dA")
    assert_rounded_once(
        ours[trained], (begun.double() + dh.double().t() @ (y.double() * factor.double()))[trained], "dA"
    )


@places
@MASKS
@pytest.mark.parametrize("shape", [*SHAPES, (5, 40, 1, 70)], ids=str)
def test_add_input_gradient(place, shape: tuple[int, ...], dropout) -> None:
    num_tokens, num_inputs, _, rank = shape
    dx, dh = random_rows(place, num_tokens, num_inputs, gap=5), random_rows(place, num_tokens, rank, gap=1)
    a = random_rows(place, rank, num_inputs)
    mask, keep_scale, factor = drawn_mask(place, num_tokens, num_inputs, dropout, probability=0.25)
    exact = dx.double() + (dh.double() @ a.double()) * factor.double()
    torchs = dx + (dh @ a) * factor.to(dx.dtype)
    update = InputUpdate(dh_TR=dh, a_RI=a, mask=mask, scale=keep_scale)
    elsewhere = torch.empty_like(dx)
    assert lora.add_input_gradient(dx, update, out=elsewhere) is elsewhere
    ours = lora.add_input_gradient(dx, update)
    assert ours is dx and torch.equal(ours, elsewhere)
    assert_as_exact_as_torch(ours, torchs, exact, "dX")
    assert_rounded_once(ours, exact, "dX")


@places
def test_equals_autograd_of_a_whole_adapter(place) -> None:
    """The four products together are the gradients of y = s (drop(x) A^T) B^T as autograd has them."""
    device = place[0]
    x, a = random_rows(place, 6, 40).requires_grad_(), random_rows(place, 4, 40, seed=1).requires_grad_()
    b, dy = random_rows(place, 9, 4, seed=2).requires_grad_(), random_rows(place, 6, 9, seed=3)
    mask, keep_scale, factor = drawn_mask(place, 6, 40, 5, probability=0.25)
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, a, b)]
    wide_x, wide_a, wide_b = leaves
    exact = torch.autograd.grad(SCALE * ((wide_x * factor) @ wide_a.t()) @ wide_b.t(), leaves, dy.double())
    torchs = torch.autograd.grad(SCALE * ((x * factor.to(x.dtype)) @ a.t()) @ b.t(), (x, a, b), dy)
    x, a, b = x.detach(), a.detach(), b.detach()
    h, dh = lora.project(x, a, mask, keep_scale=keep_scale) * SCALE, torch.empty(6, 4, dtype=place[1], device=device)
    da, db = torch.empty(4, 40, device=device), torch.empty(9, 4, device=device)
    output = AdapterSection(first_column=0, num_columns=9, first_row=0, num_ranks=4, b=b, scale=SCALE, db=db)
    output_gradients(dy, h, [output], dh_out=dh)
    lora.a_gradient(dh, x, mask, da, keep_scale=keep_scale)
    dx = lora.add_input_gradient(torch.zeros_like(x), InputUpdate(dh_TR=dh, a_RI=a, mask=mask, scale=keep_scale))
    for name, ours, torch_s, truth in zip(("dX", "dA", "dB"), (dx, da, db), torchs, exact, strict=True):
        assert_as_exact_as_torch(ours.to(torch_s.dtype), torch_s, truth, name)


@places
def test_no_tokens(place) -> None:
    device, dtype = place
    x = torch.empty(0, 8, dtype=dtype, device=device)
    h, a = torch.empty(0, 4, dtype=dtype, device=device), torch.ones(4, 8, dtype=dtype, device=device)
    da = torch.ones(4, 8, device=device)
    assert lora.project(x, a).shape == (0, 4)
    assert lora.add_input_gradient(x, InputUpdate(dh_TR=h, a_RI=a)).shape == (0, 8)
    lora.a_gradient(h, x, None, da, add=True)
    assert (da == 1).all(), "no tokens add nothing"
    lora.a_gradient(h, x, None, da)
    assert (da == 0).all(), "no tokens have a gradient of zero"
