"""The kernels of a folded linear at strides that divide by 16 elements, as training has them: the vectorised variants.

Other files' ragged shapes run what is left when nothing divides. Three adapters of rank 16 share an input, whose rows
lie in a buffer with H beside them. On a GPU at training's width, in 16 bits: python -m pytest -m gpu
tests/kernels/test_triton_aligned.py. Through the interpreter on a CPU at a small one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels import reference
from engine.kernels.records import AdapterSection, InputUpdate
from engine.kernels.triton import lora, rmsnorm, swiglu
from engine.kernels.triton.output_gradients import output_gradients
from rankfold.benchmarking import oracles
from tests.kernels.comparing import assert_as_exact_as_torch, interpreted_only, random_rows
from tests.kernels.triton_masks import drawn_mask

EPS, RANK, ADAPTERS = 1e-5, 16, 3
RANKS = RANK * ADAPTERS
PADDING = 16
"""Columns behind H that are nobody's."""
NORM = torch.nn.functional.rms_norm

COMPILED = {"cpu-bfloat16": (32, 128), **{f"cpu-bfloat16-{width}": (5, width) for width in (2880, 4096, 8192)}}
"""For what is compiled and executed on a CPU (tests.ptx), where the width decides what is compiled."""
places = pytest.mark.parametrize(
    "place",
    [
        pytest.param(("cpu", torch.float32, 32, 128), marks=interpreted_only, id="cpu-float32"),
        *[
            pytest.param(("cpu", torch.bfloat16, *sizes), marks=[interpreted_only, pytest.mark.slow], id=name)
            for name, sizes in COMPILED.items()
        ],
        pytest.param(("cuda", torch.bfloat16, 512, 4096), marks=pytest.mark.gpu, id="cuda-bfloat16"),
        pytest.param(("cuda", torch.float16, 512, 4096), marks=pytest.mark.gpu, id="cuda-float16"),
    ],
)
"""Device, dtype, tokens and input features."""
masks = pytest.mark.parametrize("dropout", [None, 0], ids=["no dropout", "dropout"])


@dataclass(frozen=True, slots=True)
class _Buffer:
    """[x | H | padding], or [dX | dH | padding]."""

    whole: Tensor
    wide: Tensor
    low: Tensor

    def assert_padding_is_untouched(self) -> None:
        assert (self.whole[:, -PADDING:] == 7).all(), "wrote columns that are nobody's"


def _buffer(place, *, seed: int) -> _Buffer:
    device, dtype, num_tokens, width = place
    whole = random_rows((device, dtype), num_tokens, width + RANKS + PADDING, seed=seed)
    whole[:, -PADDING:] = 7
    buffer = _Buffer(whole, whole[:, :width], whole[:, width : width + RANKS])
    for view in (buffer.wide, buffer.low):
        assert view.stride(0) % 16 == 0 and view.data_ptr() % 16 == 0, "not what this file is for"
    return buffer


def _rows(place, *shape: int, seed: int) -> Tensor:
    return random_rows(place[:2], *shape, seed=seed)


def _gradients(loss: Callable[..., Tensor], *operands: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """By autograd at the operands' dtype and in fp64."""
    results = []
    for dtype in (operands[0].dtype, torch.float64):
        leaves = [operand.detach().to(dtype).requires_grad_() for operand in operands]
        results.append(list(torch.autograd.grad(loss(*leaves), leaves)))
    return results[0], results[1]


@places
@masks
def test_a_norm_and_its_projection_into_one_buffer(place, dropout: int | None) -> None:
    num_tokens, width = place[2:]
    u, weight, a = (
        _rows(place, num_tokens, width, seed=1),
        _rows(place, width, seed=2) + 1,
        _rows(place, RANKS, width, seed=3),
    )
    mask, keep_scale, factor = drawn_mask(place[:2], num_tokens, width, dropout, probability=0.25)
    buffer = _buffer(place, seed=4)
    rmsnorm.rmsnorm_forward(u, weight, EPS, out=buffer.wide)
    exact = NORM(u.double(), (width,), weight.double(), EPS)
    assert_as_exact_as_torch(buffer.wide, NORM(u, (width,), weight, EPS), exact, "y")
    y = buffer.wide.clone()
    lora.project(buffer.wide, a, mask, keep_scale=keep_scale, out=buffer.low)
    torchs = (y * factor.to(y.dtype)) @ a.t()
    assert_as_exact_as_torch(buffer.low, torchs, (y.double() * factor.double()) @ a.double().t(), "H")
    assert torch.equal(buffer.wide, y)
    buffer.assert_padding_is_untouched()


@places
def test_output_gradients_of_three_adapters(place) -> None:
    """dB alone, as folded linears have it, and together with dH; B lies beside W."""
    device, dtype, num_tokens, width = place
    outputs = (width, width // 4, width // 4)
    storage = _rows(place, sum(outputs), width + RANKS + PADDING, seed=1)
    dy, h = _rows(place, num_tokens, sum(outputs), seed=2), _rows(place, num_tokens, RANKS, seed=3)
    sections, column = [], 0
    for number, columns in enumerate(outputs):
        first = width + number * RANK
        sections.append(
            AdapterSection(
                first_column=column, num_columns=columns, first_row=number * RANK, num_ranks=RANK, scale=2.0,
                b=storage[column : column + columns, first : first + RANK],
                db=torch.full((columns, RANK), 9.0, device=device),
            )
        )  # fmt: skip
        column += columns
    output_gradients(dy, h, sections)
    alone = [one.db.clone() for one in sections]
    dh = torch.empty(num_tokens, RANKS, dtype=dtype, device=device)
    output_gradients(dy, h, sections, dh_out=dh)
    for one, before in zip(sections, alone, strict=True):
        part, low = one.columns(dy), one.ranks(h)
        assert torch.equal(one.db, before), "dB depends on whether dH is made"
        assert_as_exact_as_torch(one.db, part.t() @ low, part.double().t() @ low.double(), "dB")
        assert_as_exact_as_torch(one.ranks(dh), part @ one.b * 2, part.double() @ one.b.double() * 2, "dH")


@places
@masks
def test_input_gradients_from_one_buffer(place, dropout: int | None) -> None:
    """dA of the stacked A, and what the adapters add to dX, in place."""
    device, dtype, num_tokens, width = place
    x, a = _rows(place, num_tokens, width, seed=1), _rows(place, RANKS, width, seed=2)
    mask, keep_scale, factor = drawn_mask(place[:2], num_tokens, width, dropout, probability=0.25)
    buffer = _buffer(place, seed=3)
    dx, dh = buffer.wide.clone(), buffer.low.clone()
    da = torch.empty(RANKS, width, device=device)
    lora.a_gradient(buffer.low, x, mask, da, keep_scale=keep_scale)
    exact = dh.double().t() @ (x.double() * factor.double())
    assert_as_exact_as_torch(da, dh.t() @ (x * factor.to(dtype)), exact, "dA")
    lora.add_input_gradient(buffer.wide, InputUpdate(dh_TR=buffer.low, a_RI=a, mask=mask, scale=keep_scale))
    exact = dx.double() + (dh.double() @ a.double()) * factor.double()
    assert_as_exact_as_torch(buffer.wide, dx + (dh @ a) * factor.to(dtype), exact, "dX")
    assert torch.equal(buffer.low, dh)
    buffer.assert_padding_is_untouched()


@places
@masks
@pytest.mark.parametrize("trained", [False, True])
def test_a_norms_gradient_with_its_adapters_update(place, dropout: int | None, trained: bool) -> None:
    device, _, num_tokens, width = place
    x, weight = _rows(place, num_tokens, width, seed=1), _rows(place, width, seed=2) + 1
    a = _rows(place, RANKS, width, seed=3) / 4
    mask, keep_scale, factor = drawn_mask(place[:2], num_tokens, width, dropout, probability=0.25)
    buffer = _buffer(place, seed=4)
    dy, dh = buffer.wide, buffer.low

    def project(y: Tensor) -> Tensor:
        return (y * factor.to(y.dtype)) @ a.to(y.dtype).t()

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        y = NORM(x, (width,), weight, EPS)
        return (y * dy.to(x.dtype)).sum() + (project(y) * dh.to(x.dtype)).sum()

    (torch_dx, torch_dw), (exact_dx, exact_dw) = _gradients(loss, x, weight)
    y, rstd = reference.rmsnorm_forward(x, weight, EPS)
    update = InputUpdate(dh_TR=dh, a_RI=a, mask=mask, scale=keep_scale, h_TR=project(y))
    dw = torch.zeros(width, device=device) if trained else None
    dx = rmsnorm.rmsnorm_backward(dy, x, weight, rstd, update=update, weight_gradient_F=dw)
    assert_as_exact_as_torch(dx, torch_dx, exact_dx, "dx")
    if dw is not None:
        assert_as_exact_as_torch(dw.to(torch_dw.dtype), torch_dw, exact_dw, "dw")


@places
@masks
def test_swiglu_into_a_buffer_and_its_gradient_with_the_update(place, dropout: int | None) -> None:
    _, dtype, num_tokens, width = place
    gate_up, a = _rows(place, num_tokens, 2 * width, seed=1), _rows(place, RANKS, width, seed=2)
    mask, keep_scale, factor = drawn_mask(place[:2], num_tokens, width, dropout, probability=0.25)
    buffer = _buffer(place, seed=3)
    dy, dh = buffer.wide.clone(), buffer.low

    def loss(x: Tensor) -> Tensor:
        y = oracles.swiglu(x)
        h = (y * factor.to(x.dtype)) @ a.to(x.dtype).t()
        return (y * dy.to(x.dtype)).sum() + (h * dh.to(x.dtype)).sum()

    (torchs,), (exact,) = _gradients(loss, gate_up)
    kept = torch.empty(num_tokens, width, dtype=dtype, device=gate_up.device)
    update = InputUpdate(dh_TR=dh, a_RI=a, mask=mask, scale=keep_scale)
    ours = swiglu.swiglu_backward(buffer.wide, gate_up, update=update, activation_out=kept)
    assert_as_exact_as_torch(ours, torchs, exact, "dx")
    swiglu.swiglu_forward(gate_up, out=buffer.wide)
    for name, one in (("y", buffer.wide), ("y again", kept)):
        assert_as_exact_as_torch(one, oracles.swiglu(gate_up), oracles.swiglu(gate_up.double()), name)
    buffer.assert_padding_is_untouched()
