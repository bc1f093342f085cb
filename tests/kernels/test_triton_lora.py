"""The low-rank products against plain torch, in fp64 for the truth and in the tested dtype for the error allowed.

Those on the side of the output have a file of their own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from tests.kernels.comparing import assert_as_exact_as_torch, places, random_rows
from triton_kernels import lora, philox
from triton_kernels.dropout import DropoutMask
from triton_kernels.lora_matmul import lora_matmul
from triton_kernels.output_gradients import output_gradients
from triton_kernels.reference_fused import OutputSection

SCALE = 2.0
SHAPES = [(5, 123, 45, 3), (1, 17, 20, 16), (150, 290, 270, 24)]
"""tokens, inputs, outputs, rank; the last one is split over several programs in every direction."""


def _mask(place, num_tokens: int, offset: int, as_bits: bool, num_features: int) -> tuple[DropoutMask, Tensor]:
    """The mask as the kernels take it, and as a factor: keep / (1 - p)."""
    tokens = torch.arange(num_tokens, device=place[0]) * 7 + 2**33
    coordinates = {"feature_offset": offset, "probability": 0.25, "seed": 5, "site": 9}
    step = torch.tensor(3, device=place[0])
    mask = DropoutMask(token_index_T=tokens, step=step, **coordinates)
    kept = philox.dropout_mask(tokens, num_features=num_features, step=step, **coordinates)
    return mask.with_bits(num_features) if as_bits else mask, kept * philox.dropout_scale(0.25)


MASKS = pytest.mark.parametrize("dropout", [None, (0, False), (3, False), (3, True)], ids=str)
"""No dropout; drawn, in a shard that starts at a block of features and in one that does not; read as bits."""


@places
@MASKS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_project(place, shape: tuple[int, ...], dropout) -> None:
    num_tokens, num_inputs, _, rank = shape
    x, a = random_rows(place, num_tokens, num_inputs, gap=5), random_rows(place, rank, num_inputs, gap=1)
    mask, factor = _mask(place, num_tokens, *dropout, num_inputs) if dropout else (None, torch.ones_like(x))
    wide = torch.empty(num_tokens, rank + 4, dtype=place[1], device=place[0]).fill_(7)
    ours = lora.project(x, a, mask, out=wide[:, 4:])
    torchs = (x * factor.to(x.dtype)) @ a.t()
    assert_as_exact_as_torch(ours, torchs, (x.double() * factor.double()) @ a.double().t(), "H")
    assert (wide[:, :4] == 7).all(), "wrote outside its columns"


@places
@MASKS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gradient(place, shape: tuple[int, ...], dropout) -> None:
    num_tokens, num_inputs, _, rank = shape
    x, dh = random_rows(place, num_tokens, num_inputs, gap=5), random_rows(place, num_tokens, rank, gap=1)
    mask, factor = _mask(place, num_tokens, *dropout, num_inputs) if dropout else (None, torch.ones_like(x))
    da = torch.full((rank, num_inputs), 9.0, device=place[0])
    lora.a_gradient(dh, x, mask, da)
    exact = dh.double().t() @ (x.double() * factor.double())
    assert_as_exact_as_torch(da, dh.t() @ (x * factor.to(x.dtype)), exact, "dA")
    once = da.clone()
    lora.a_gradient(dh, x, mask, da, add=True)
    assert torch.equal(da, once + once), "adding gives other bits than writing"


@places
@MASKS
@pytest.mark.parametrize("shape", [*SHAPES, (5, 40, 1, 70)], ids=str)
def test_add_input_gradient(place, shape: tuple[int, ...], dropout) -> None:
    num_tokens, num_inputs, _, rank = shape
    dx, dh = random_rows(place, num_tokens, num_inputs, gap=5), random_rows(place, num_tokens, rank, gap=1)
    a = random_rows(place, rank, num_inputs)
    mask, factor = _mask(place, num_tokens, *dropout, num_inputs) if dropout else (None, torch.ones_like(dx))
    exact = dx.double() + (dh.double() @ a.double()) * factor.double()
    torchs = dx + (dh @ a) * factor.to(dx.dtype)
    ours = lora.add_input_gradient(dx, lora.LowRankUpdate(dh_TR=dh, a_RI=a, mask=mask))
    assert ours is dx
    assert_as_exact_as_torch(ours, torchs, exact, "dX")


@places
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lora_matmul(place, shape: tuple[int, ...]) -> None:
    num_tokens, num_inputs, num_outputs, rank = shape
    x, w = random_rows(place, num_tokens, num_inputs, gap=5), random_rows(place, num_outputs, num_inputs, gap=1)
    h, b = random_rows(place, num_tokens, rank, gap=1), random_rows(place, num_outputs, rank)
    exact = x.double() @ w.double().t() + SCALE * h.double() @ b.double().t()
    torchs = x @ w.t() + SCALE * (h @ b.t())
    assert_as_exact_as_torch(lora_matmul(x, w, h, b, SCALE), torchs, exact, "Y")
    turned = lora_matmul(x, w.t().contiguous().t(), h, b.t().contiguous().t(), SCALE)
    assert_as_exact_as_torch(turned, torchs, exact, "Y with transposed weights")


@places
def test_equals_autograd_of_a_whole_adapter(place) -> None:
    """The four products together are the gradients of y = s (drop(x) A^T) B^T as autograd has them."""
    device = place[0]
    x, a = random_rows(place, 6, 40).requires_grad_(), random_rows(place, 4, 40, seed=1).requires_grad_()
    b, dy = random_rows(place, 9, 4, seed=2).requires_grad_(), random_rows(place, 6, 9, seed=3)
    mask, factor = _mask(place, 6, 5, False, 40)
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, a, b)]
    wide_x, wide_a, wide_b = leaves
    exact = torch.autograd.grad(SCALE * ((wide_x * factor) @ wide_a.t()) @ wide_b.t(), leaves, dy.double())
    torchs = torch.autograd.grad(SCALE * ((x * factor.to(x.dtype)) @ a.t()) @ b.t(), (x, a, b), dy)
    x, a, b = x.detach(), a.detach(), b.detach()
    h, dh = lora.project(x, a, mask) * SCALE, torch.empty(6, 4, dtype=place[1], device=device)
    da, db = torch.empty(4, 40, device=device), torch.empty(9, 4, device=device)
    output = OutputSection(first_column=0, num_columns=9, first_row=0, num_ranks=4, b_OR=b, scale=SCALE, db_out=db)
    output_gradients(dy, h, [output], dh_out=dh)
    lora.a_gradient(dh, x, mask, da)
    dx = lora.add_input_gradient(torch.zeros_like(x), lora.LowRankUpdate(dh_TR=dh, a_RI=a, mask=mask))
    for name, ours, torch_s, truth in zip(("dX", "dA", "dB"), (dx, da, db), torchs, exact, strict=True):
        assert_as_exact_as_torch(ours.to(torch_s.dtype), torch_s, truth, name)


@places
def test_no_tokens(place) -> None:
    device, dtype = place
    x = torch.empty(0, 8, dtype=dtype, device=device)
    h, a = torch.empty(0, 4, dtype=dtype, device=device), torch.ones(4, 8, dtype=dtype, device=device)
    b, w = torch.ones(6, 4, dtype=dtype, device=device), torch.ones(6, 8, dtype=dtype, device=device)
    da = torch.ones(4, 8, device=device)
    assert lora.project(x, a).shape == (0, 4)
    assert lora_matmul(x, w, h, b, SCALE).shape == (0, 6)
    assert lora.add_input_gradient(x, lora.LowRankUpdate(dh_TR=h, a_RI=a)).shape == (0, 8)
    lora.a_gradient(h, x, None, da, add=True)
    assert (da == 1).all(), "no tokens add nothing"
    lora.a_gradient(h, x, None, da)
    assert (da == 0).all(), "no tokens have a gradient of zero"
