"""The Triton backend, member by member against the reference.

The truth is the reference in fp64, the error allowed that of the reference in the tested dtype.
On a GPU: python -m pytest -m gpu tests/kernels/test_triton_backend.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels import reference
from engine.kernels.philox import dropout_scale
from engine.kernels.records import AdapterPlace, AdapterSection, DropoutKey, InputUpdate
from engine.ops.kernels import REFERENCE, backend
from tests.kernels.comparing import assert_as_exact_as_torch, long_places, random_rows
from tests.kernels.native_support import a_section, b_section

TRITON = backend("triton")

SHAPES = pytest.mark.parametrize("shape", [(5, 123, 3), (1, 20, 16), (0, 24, 4), (70, 131, 21)], ids=str)
"""tokens, features, rank; every tensor is a view of rows that lie further apart than they are long."""

PROBABILITY = 0.25
MASKS = pytest.mark.parametrize("mask", [None, 0, 3], ids=str)
"""No dropout; or the global index of the first feature."""
UPDATES = pytest.mark.parametrize(
    ("adapters", "mask"),
    [(False, None), (True, None), (True, 0), (True, 3)],
    ids=str,
)


def _masks(place, num_tokens: int, num_features: int, offset: int | None):
    """(the backend's mask, the reference's, keep scale)."""
    if offset is None:
        return None, None, 1.0
    tokens, step = torch.arange(num_tokens, device=place[0]) * 7 + 2**33, torch.tensor(3, device=place[0])
    key = DropoutKey(
        token_index=tokens, step=step, seed=5, site=9, probability=PROBABILITY, num_features=num_features,
        feature_offset=offset,
    )  # fmt: skip
    return TRITON.draw_mask(key), REFERENCE.draw_mask(key), dropout_scale(PROBABILITY)


def _updates(place, shape: tuple[int, int, int], offset: int | None):
    """The same update for the backend, for the reference and for the reference in fp64."""
    num_tokens, num_features, rank = shape
    dh, a = random_rows(place, num_tokens, rank, gap=2, seed=3), random_rows(place, rank, num_features, gap=1, seed=4)
    ours, plain, scale = _masks(place, num_tokens, num_features, offset)
    update = InputUpdate(dh_TR=dh, a_RI=a, mask=plain, scale=scale)
    return replace(update, mask=ours), update, replace(update, dh_TR=dh.double(), a_RI=a.double())


def _whole(rank: int) -> AdapterPlace:
    """The place of the only adapter."""
    return AdapterPlace(first_column=0, num_columns=0, first_row=0, num_ranks=rank)


def _widened(tensor: Tensor, extra: int = 4) -> Tensor:
    """A view with the tensor's shape in a wider buffer full of sevens."""
    return tensor.new_full((tensor.shape[0], tensor.shape[1] + extra), 7)[:, : tensor.shape[1]]


def _assert_nothing_beside(view: Tensor) -> None:
    base = view._base
    assert base is not None
    assert (base[:, view.shape[1] :] == 7).all(), "wrote outside its columns"


@long_places
@SHAPES
@MASKS
@pytest.mark.parametrize("scales", [(1.0,), (0.75,), (2.0, 0.3)], ids=str)
def test_project(place, shape: tuple[int, int, int], mask, scales: tuple[float, ...]) -> None:
    """Beside x in one buffer, of two adapters with scales of their own, and with padding after H."""
    num_tokens, num_features, rank = shape
    x, a = random_rows(place, num_tokens, num_features, gap=5), random_rows(place, rank, num_features, gap=1, seed=1)
    ours_mask, plain, scale = _masks(place, num_tokens, num_features, mask)
    first = rank if len(scales) == 1 else 1
    ranks = [(0, first, scales[0]), *([(first, rank - first, scales[1])] if len(scales) > 1 else [])]
    places = [
        AdapterPlace(first_column=0, num_columns=0, first_row=start, num_ranks=num, scale=each)
        for start, num, each in ranks
    ]
    ours = _widened(x.new_full((num_tokens, rank + 5), torch.nan))
    torchs, exact = ours.clone(), ours.double()
    TRITON.project(x, a, ours_mask, scale, places, ours)
    REFERENCE.project(x, a, plain, scale, places, torchs)
    REFERENCE.project(x.double(), a.double(), plain, scale, places, exact)
    assert_as_exact_as_torch(ours, torchs, exact, "H")
    assert (ours[:, rank:] == 0).all(), "left something in the padding"
    _assert_nothing_beside(ours)


@long_places
@SHAPES
@MASKS
def test_swiglu_with_the_projection(place, shape: tuple[int, int, int], mask) -> None:
    """Two adapters with scales of their own, whose H lies beside x."""
    num_tokens, num_features, rank = shape
    gate_up, a = random_rows(place, num_tokens, 2 * num_features, gap=5), random_rows(place, rank, num_features, seed=1)
    ours_mask, plain, scale = _masks(place, num_tokens, num_features, mask)
    places = [replace(_whole(1), scale=2.0), replace(_whole(rank - 1), first_row=1, scale=0.3)]
    whole = _widened(gate_up.new_full((num_tokens, num_features + rank + 5), torch.nan))
    ours = whole.tensor_split([num_features], dim=1)
    x = gate_up.new_empty(num_tokens, num_features)
    TRITON.swiglu_forward(gate_up, x)
    torchs, exact = torch.empty_like(ours[1]), torch.empty_like(ours[1], dtype=torch.float64)
    assert TRITON.swiglu_project is not None
    TRITON.swiglu_project(gate_up, ours[0], a, ours_mask, scale, places, ours[1])
    REFERENCE.project(x, a, plain, scale, places, torchs)
    REFERENCE.project(x.double(), a.double(), plain, scale, places, exact)
    assert torch.equal(ours[0], x)
    assert_as_exact_as_torch(ours[1], torchs, exact, "H")
    assert (ours[1][:, rank:] == 0).all(), "left something in the padding"
    _assert_nothing_beside(whole)


def _accumulated(place, *shapes: tuple[int, int]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """fp32 gradients with something in them already: ours, torch's, and in fp64."""
    before = [random_rows((place[0], torch.float32), *shape, seed=8) for shape in shapes]
    return [g.clone() for g in before], [g.clone() for g in before], [g.double() for g in before]


def _of_a(rows: list[int], gradients: list[Tensor]) -> list[AdapterSection]:
    """The first of the adapters is frozen."""
    frozen = AdapterSection(first_column=0, num_columns=0, first_row=0, num_ranks=1)
    return [frozen, *(a_section(gradient, row) for gradient, row in zip(gradients, rows, strict=True))]


def _of_b(columns: list[int], rows: list[int], gradients: list[Tensor]) -> list[AdapterSection]:
    frozen = AdapterSection(first_column=0, num_columns=1, first_row=0, num_ranks=1)
    return [frozen, *(b_section(*place) for place in zip(gradients, columns, rows, strict=True))]


@long_places
@SHAPES
@MASKS
@pytest.mark.parametrize("adapters", ["all", "the last", "first and last"])
def test_a_gradient(place, shape: tuple[int, int, int], mask, adapters: str) -> None:
    """One or several of the adapters in the stack train."""
    num_tokens, num_features, rank = shape
    x, dh = random_rows(place, num_tokens, num_features, gap=5), random_rows(place, num_tokens, rank, gap=2, seed=1)
    ours_mask, plain, scale = _masks(place, num_tokens, num_features, mask)
    stack = {"all": ([0], [rank]), "the last": ([2], [rank - 2]), "first and last": ([0, 2], [1, rank - 2])}
    rows, ranks = stack[adapters]
    ours, torchs, exact = _accumulated(place, *((r, num_features) for r in ranks))
    TRITON.a_gradient(dh, x, ours_mask, scale, _of_a(rows, ours))
    REFERENCE.a_gradient(dh, x, plain, scale, _of_a(rows, torchs))
    REFERENCE.a_gradient(dh.double(), x.double(), plain, scale, _of_a(rows, exact))
    for results in zip(ours, torchs, exact, strict=True):
        assert_as_exact_as_torch(*results, "dA")


@long_places
@SHAPES
def test_b_gradient(place, shape: tuple[int, int, int]) -> None:
    """Two adapters: the first on the first column of dY, the second on the last ones."""
    num_tokens, num_outputs, rank = shape
    dy, h = random_rows(place, num_tokens, num_outputs, gap=5), random_rows(place, num_tokens, rank, gap=2, seed=1)
    columns, rows = [0, 4], [rank - 1, 0]
    ours, torchs, exact = _accumulated(place, (1, 1), (num_outputs - 4, rank - 1))
    TRITON.b_gradient(dy, h, _of_b(columns, rows, ours))
    REFERENCE.b_gradient(dy, h, _of_b(columns, rows, torchs))
    REFERENCE.b_gradient(dy.double(), h.double(), _of_b(columns, rows, exact))
    for results in zip(ours, torchs, exact, strict=True):
        assert_as_exact_as_torch(*results, "dB")


@long_places
@SHAPES
def test_output_gradients(place, shape: tuple[int, int, int]) -> None:
    """Both gradients of two adapters, the second of which is frozen in its B."""
    num_tokens, num_outputs, rank = shape
    dy, h = random_rows(place, num_tokens, num_outputs, gap=5), random_rows(place, num_tokens, rank, gap=2, seed=1)
    b = random_rows(place, num_outputs - 4, rank - 1, gap=3, seed=2)
    gradients = _accumulated(place, (num_outputs - 4, rank - 1))
    results = []
    for kernels, dtype, (gradient,) in zip(
        (TRITON, REFERENCE, REFERENCE), (place[1], place[1], torch.float64), gradients, strict=True
    ):
        first = AdapterSection(
            first_column=4,
            num_columns=num_outputs - 4,
            first_row=1,
            num_ranks=rank - 1,
            b=b.to(dtype),
            scale=1.5,
            db=gradient,
        )
        second = replace(first, first_column=0, first_row=0, num_columns=1, num_ranks=1, b=b[:1, :1].to(dtype), db=None)
        dh = torch.zeros(num_tokens, rank, dtype=dtype, device=place[0])
        assert kernels.output_gradients is not None
        kernels.output_gradients(dy.to(dtype), h.to(dtype), [second, first], dh_out=dh)
        results.append((dh, gradient))
    for name, *each in zip(("dH", "dB"), *results, strict=True):
        assert_as_exact_as_torch(*each, name)


@long_places
@SHAPES
@MASKS
def test_apply_update(place, shape: tuple[int, int, int], mask) -> None:
    dx = random_rows(place, *shape[:2], gap=5)
    ours, plain, wide = _updates(place, shape, mask)
    exact, torchs = REFERENCE.apply_update(dx.double(), wide), REFERENCE.apply_update(dx.clone(), plain)
    turned = dx.t().clone(memory_format=torch.contiguous_format).t()
    assert_as_exact_as_torch(TRITON.apply_update(turned, ours), torchs, exact, "dX with gaps between its columns")
    dense = dx.clone(memory_format=torch.contiguous_format)
    result = TRITON.apply_update(dx, ours)
    assert result.is_contiguous(), "not as attention's backward reads it"
    assert_as_exact_as_torch(result, torchs, exact, "dX")
    assert TRITON.apply_update(dense, ours).data_ptr() == dense.data_ptr(), "not in place"
    assert torch.equal(dense, result)


@long_places
@SHAPES
def test_norm_forward(place, shape: tuple[int, int, int]) -> None:
    x = random_rows(place, *shape[:2], gap=5)
    weight = random_rows(place, 1, shape[1], seed=1)[0] + 1
    ours, torchs, exact = _widened(torch.empty_like(x)), torch.empty_like(x), torch.empty_like(x, dtype=torch.float64)
    rstd = TRITON.norm_forward(x, weight, 1e-5, ours)
    REFERENCE.norm_forward(x, weight, 1e-5, torchs)
    wide = REFERENCE.norm_forward(x.double(), weight.double(), 1e-5, exact)
    torch.testing.assert_close(rstd, wide.float(), rtol=1e-6, atol=0)
    assert_as_exact_as_torch(ours, torchs, exact, "y")
    _assert_nothing_beside(ours)


@long_places
@SHAPES
@UPDATES
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_norm_backward(place, shape: tuple[int, int, int], adapters: bool, mask, trained: bool) -> None:
    x, dy = random_rows(place, *shape[:2], gap=5), random_rows(place, *shape[:2], gap=3, seed=2)
    weight = random_rows(place, 1, shape[1], seed=1)[0] + 1
    update, plain, wide = _updates(place, shape, mask) if adapters else (None, None, None)
    sinks = [gradient[0][0] if trained else None for gradient in _accumulated(place, (1, shape[1]))]
    rstd = REFERENCE.norm_forward(x.double(), weight.double(), 1e-5, torch.empty_like(x, dtype=torch.float64))
    exact = REFERENCE.norm_backward(dy.double(), x.double(), weight.double(), rstd, wide, sinks[2])
    torchs = REFERENCE.norm_backward(dy.clone(), x, weight, rstd.float(), plain, sinks[1])
    ours = TRITON.norm_backward(dy, x, weight, rstd.float(), update, sinks[0])
    assert_as_exact_as_torch(ours, torchs, exact, "dx")
    if trained:
        assert_as_exact_as_torch(*sinks, "dw")


@long_places
@SHAPES
@MASKS
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_norm_backward_with_the_projection(place, shape: tuple[int, int, int], mask, trained: bool) -> None:
    """The update comes with the H made from the norm's output, whose adapters have a scale."""
    x, dy = random_rows(place, *shape[:2], gap=5), random_rows(place, *shape[:2], gap=3, seed=2)
    weight = random_rows(place, 1, shape[1], seed=1)[0] + 1
    update, plain, wide = _updates(place, shape, mask)
    y, rstd = reference.rmsnorm_forward(x, weight, 1e-5)
    h = _widened(x.new_empty(shape[0], shape[2]))
    REFERENCE.project(y, plain.a_RI, plain.mask, plain.scale, [_whole(shape[2])], h)
    update = replace(update, h_TR=h.mul_(0.25), h_scale=4.0)
    sinks = [gradient[0][0] if trained else None for gradient in _accumulated(place, (1, shape[1]))]
    exact_rstd = reference.rmsnorm_forward(x.double(), weight.double(), 1e-5)[1]
    exact = REFERENCE.norm_backward(dy.double(), x.double(), weight.double(), exact_rstd, wide, sinks[2])
    torchs = REFERENCE.norm_backward(dy.clone(), x, weight, rstd, plain, sinks[1])
    assert_as_exact_as_torch(TRITON.norm_backward(dy, x, weight, rstd, update, sinks[0]), torchs, exact, "dx")
    if trained:
        assert_as_exact_as_torch(*sinks, "dw")


@long_places
@SHAPES
def test_swiglu_forward(place, shape: tuple[int, int, int]) -> None:
    gate_up = random_rows(place, shape[0], 2 * shape[1], gap=3)
    ours = _widened(gate_up.new_empty(shape[:2]))
    torchs, exact = gate_up.new_empty(shape[:2]), gate_up.new_empty(shape[:2], dtype=torch.float64)
    TRITON.swiglu_forward(gate_up, ours)
    REFERENCE.swiglu_forward(gate_up, torchs)
    REFERENCE.swiglu_forward(gate_up.double(), exact)
    assert_as_exact_as_torch(ours, torchs, exact, "y")
    _assert_nothing_beside(ours)


@long_places
@SHAPES
@UPDATES
def test_swiglu_backward(place, shape: tuple[int, int, int], adapters: bool, mask) -> None:
    gate_up, dy = random_rows(place, shape[0], 2 * shape[1], gap=3), random_rows(place, *shape[:2], gap=5, seed=2)
    update, plain, wide = _updates(place, shape, mask) if adapters else (None, None, None)
    exact = REFERENCE.swiglu_backward(dy.double(), gate_up.double(), wide)
    torchs = REFERENCE.swiglu_backward(dy.clone(), gate_up, plain)
    again = torch.full_like(dy, float("nan"))
    assert_as_exact_as_torch(TRITON.swiglu_backward(dy, gate_up, update, again), torchs, exact, "[dgate | dup]")
    made = torch.empty_like(dy)
    TRITON.swiglu_forward(gate_up, made)
    assert torch.equal(again, made), "x has the same bits whichever pass wrote it"


@long_places
@pytest.mark.parametrize("shape", [(5, 3, 1, 10), (1, 4, 4, 2), (0, 2, 1, 8), (9, 6, 2, 32)], ids=str)
def test_split_and_rotate(place, shape: tuple[int, int, int, int]) -> None:
    """There and back; the gradients come as attention leaves them, heads before tokens."""
    num_tokens, num_heads, num_kv_heads, head_dim = shape
    heads = num_heads + 2 * num_kv_heads
    angles = random_rows(("cpu", torch.float64), num_tokens, head_dim // 2, gap=1).to(place[0])
    cos, sin = angles.cos(), angles.sin()
    tables, sizes = (cos.float(), sin.float()), (num_heads, num_kv_heads, head_dim)
    qkv = random_rows(place, num_tokens, heads * head_dim, gap=head_dim)
    ours = TRITON.split_rotate(qkv, *tables, *sizes)
    torchs = REFERENCE.split_rotate(qkv.contiguous(), *tables, *sizes)
    exact = REFERENCE.split_rotate(qkv.contiguous().double(), cos, sin, *sizes)
    for name, *results in zip("qkv", ours, torchs, exact, strict=True):
        assert results[0].is_contiguous()
        assert_as_exact_as_torch(*results, name)
    gradients = [random_rows(place, num, num_tokens, head_dim, seed=num).transpose(0, 1) for num in sizes[:2]]
    gradients.append(random_rows(place, num_kv_heads, head_dim, num_tokens).permute(2, 0, 1))
    back = TRITON.split_rotate_backward(*gradients, *tables)
    torchs_back = REFERENCE.split_rotate_backward(*gradients, *tables)
    exact_back = REFERENCE.split_rotate_backward(*(g.double() for g in gradients), cos, sin)
    assert_as_exact_as_torch(back, torchs_back, exact_back, "dqkv")


@long_places
@pytest.mark.parametrize(("num_tokens", "num_columns"), [(5, 123), (1, 1), (0, 7), (4, 9000)])
def test_loss(place, num_tokens: int, num_columns: int) -> None:
    """A shard's logits; of every second row the maximum lies in another shard."""
    logits = random_rows(place, num_tokens, num_columns, gap=2) * 4
    targets = torch.arange(num_tokens, device=place[0]) * 31 % num_columns
    targets[1::3] = -1
    scale = torch.linspace(0.1, 1.0, num_tokens, device=place[0])
    scale[2::3] = 0.0
    ours, torchs, exact = logits.clone(), logits.clone(), logits.double()
    found, expected, truth = (
        kernels.loss.statistics(values, targets)
        for kernels, values in ((TRITON, ours), (REFERENCE, torchs), (REFERENCE, exact))
    )
    for name, *results in zip(("maximum", "sum of exponentials", "target"), found, expected, truth, strict=True):
        assert_as_exact_as_torch(*results, name)
    elsewhere = torch.arange(num_tokens, device=place[0]) % 2 == 1
    maximum = torch.where(elsewhere, truth[0] + 3, truth[0])
    total = truth[1] * torch.exp(truth[0] - maximum) + elsewhere
    gradients = [
        kernels.loss.gradient(values, targets, one[0], *(x.to(one[0].dtype) for x in (maximum, total, scale)))
        for kernels, values, one in ((TRITON, ours, found), (REFERENCE, torchs, expected), (REFERENCE, exact, truth))
    ]
    assert_as_exact_as_torch(*gradients, "dlogits")


@long_places
@pytest.mark.parametrize("offset", [None, 3])
def test_an_adapter_of_its_own_for_each_document(place, offset: int | None) -> None:
    """One base, three documents with adapters of different ranks: every product by ranges of tokens equals torch's."""
    lengths, ranks, scale = (7, 1, 12), (3, 16, 5), 1.5
    num_tokens, num_features, num_outputs, widest = sum(lengths), 37, 29, max(ranks)
    x, dy = random_rows(place, num_tokens, num_features, gap=3), random_rows(place, num_tokens, num_outputs, seed=1)
    w = random_rows(place, num_outputs, num_features, seed=2)
    ours_mask, plain, keep_scale = _masks(place, num_tokens, num_features, offset)
    h, y, dx = x.new_empty(num_tokens, widest), _widened(torch.empty_like(dy)), dy @ w
    start = 0
    for number, (length, rank) in enumerate(zip(lengths, ranks, strict=True)):
        here = slice(start, start + length)
        a, b = random_rows(place, rank, num_features, seed=3 + number), random_rows(place, num_outputs, rank, seed=9)
        mask = None if ours_mask is None else ours_mask[here]
        TRITON.project(x[here], a, mask, keep_scale, [_whole(rank)], h[here, :rank])
        torch.addmm(x[here] @ w.t(), h[here, :rank], b.t(), alpha=scale, out=y[here])
        dh = scale * (dy[here] @ b)
        da, db = torch.zeros(rank, num_features, device=place[0]), torch.zeros(num_outputs, rank, device=place[0])
        TRITON.a_gradient(dh, x[here], mask, keep_scale, [a_section(da)])
        TRITON.b_gradient(dy[here], scale * h[here, :rank], [b_section(db)])
        TRITON.apply_update(dx[here], InputUpdate(dh_TR=dh, a_RI=a, mask=mask, scale=keep_scale))
        factor = torch.ones_like(x[here]) if plain is None else plain[here] * keep_scale
        torchs, exact = (
            _one_document(*(t.to(dtype) for t in (x[here], w, a, b, factor, dy[here])), scale)
            for dtype in (place[1], torch.float64)
        )
        ours = {"y": y[here], "dx": dx[here], "dA": da, "dB": db}
        for (name, one), torch_s, truth in zip(ours.items(), torchs, exact, strict=True):
            assert_as_exact_as_torch(one.to(torch_s.dtype), torch_s, truth, f"{name} of document {number}")
        start += length
    _assert_nothing_beside(y)


def _one_document(x: Tensor, w: Tensor, a: Tensor, b: Tensor, factor: Tensor, dy: Tensor, scale: float):
    """y, dx, dA and dB by torch's autograd."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (x, a, b)]
    y = leaves[0] @ w.t() + scale * ((leaves[0] * factor) @ leaves[1].t()) @ leaves[2].t()
    return y.detach(), *torch.autograd.grad(y, leaves, dy)
