"""Triton kernels of layers with states against the specification: fp64 for the truth, that dtype for the error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed")

from engine.hybrids import reference, state_space_reference, steps
from engine.hybrids.kernels import hybrid_kernels
from engine.hybrids.pieces import Pieces
from engine.kernels.triton import chunks
from engine.ops.kernels import backend
from tests.kernels.comparing import assert_rounded_once, interpreted_only, long_places, places, random_rows
from tests.support.sweeps import sampled

triton_ops = pytest.importorskip("engine.hybrids.triton_ops")

LENGTHS = (1, 40, 3, 33, 2)
T = sum(LENGTHS)


def drawn(place, *shape: int, seed: int) -> Tensor:
    return random_rows(place, *shape, gap=5, seed=seed)


def pieces_at(place, lengths: tuple[int, ...] = LENGTHS, **links: tuple[int, ...]) -> Pieces:
    return Pieces.of_lengths(lengths, torch.device(place[0]), **links)


@places
@pytest.mark.parametrize("length", [16, 64])
def test_chunks_hold_each_token_once(place, length: int) -> None:
    lengths = (1, 70, 0, 3, 64, 128, 0, 2)
    offsets = torch.tensor([0, *lengths], dtype=torch.int32, device=place[0]).cumsum(0).int()
    cut = chunks.cut(offsets, sum(lengths), length)
    found = [row for row in cut.table.tolist() if row[0] < row[3]]
    tokens = [token for start, _, _, end in found for token in range(start, min(start + length, end))]
    assert tokens == list(range(sum(lengths)))
    assert all((first, end) == tuple(offsets[piece : piece + 2].tolist()) for _, piece, first, end in found)
    assert cut.firsts.tolist() == [sum(-(-one // length) for one in lengths[:end]) for end in range(len(lengths) + 1)]


@places
@pytest.mark.parametrize(
    "received",
    [(), (0, 3), pytest.param(tuple(range(len(LENGTHS))), marks=pytest.mark.slow)],
    ids=["none", "two", "all"],
)
@pytest.mark.parametrize(
    ("width", "biased", "activation"), sampled([(4, True, "silu"), (3, False, None)], [(4, True, "silu")])
)
def test_convolution(place, received: tuple[int, ...], width: int, biased: bool, activation: str | None) -> None:
    channels = 22
    x, dy = drawn(place, T, channels, seed=1), drawn(place, T, channels, seed=2)
    weight = drawn(place, channels, width, seed=3)
    bias = drawn(place, 1, channels, seed=4)[0] if biased else None
    tail = drawn(place, len(received), (width - 1) * channels, seed=5).reshape(-1, width - 1, channels)
    given = (weight, bias, pieces_at(place, received=received), tail if received else None)
    exact_given = (
        weight.double(),
        None if bias is None else bias.double(),
        given[2],
        tail.double() if received else None,
    )
    y = triton_ops.conv_forward(x, *given, activation=activation)
    assert_rounded_once(y, reference.conv_forward(x.double(), *exact_given, activation=activation), "y")
    gradients, exact_gradients = (
        [torch.ones(channels, width, dtype=dtype, device=place[0]), torch.ones(channels, dtype=dtype, device=place[0])]
        for dtype in (torch.float32, torch.float64)
    )
    for one in (gradients, exact_gradients):
        if bias is None:
            one[1] = None
    dx, d_tail = triton_ops.conv_backward(
        dy, x, *given, activation=activation, weight_gradient=gradients[0], bias_gradient=gradients[1]
    )
    exact_dx, exact_d_tail = reference.conv_backward(
        dy.double(), x.double(), *exact_given, activation=activation, weight_gradient=exact_gradients[0],
        bias_gradient=exact_gradients[1],
    )  # fmt: skip
    assert_rounded_once(dx, exact_dx, "dx")
    assert (d_tail is None) == (exact_d_tail is None)
    for name, one, exact in zip(
        ("tail", "weight", "bias"), (d_tail, *gradients), (exact_d_tail, *exact_gradients), strict=True
    ):
        if one is not None:
            assert_rounded_once(one, exact, name)
    frozen, _ = triton_ops.conv_backward(dy, x, *given, activation=activation, weight_gradient=None, bias_gradient=None)
    assert torch.equal(frozen, dx)


class Allocated(TorchDispatchMode):
    """Adds up the bytes of new tensors, without tables of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("empty", "new_empty", "empty_like") and out.dtype != torch.int32:
            self.nbytes += out.nbytes
        return out


@pytest.mark.parametrize("place", [pytest.param(("cpu", torch.float32), marks=interpreted_only)], ids=["cpu-float32"])
@pytest.mark.parametrize("links", [{}, {"received": (1,), "sent": (0,)}], ids=["alone", "linked"])
@pytest.mark.parametrize("by_channel", sampled([False, True], [False]), ids=["heads", "channels"])
def test_stand_ins_allocate_what_kernels_do(place, links: dict[str, tuple[int, ...]], by_channel: bool) -> None:
    pieces = pieces_at(place, (70, 4), **links)
    inputs = delta_inputs(place, 74, 1, 2, 20, 20, by_channel=by_channel)
    x, weight, dw = drawn(place, 74, 8, seed=1), drawn(place, 8, 4, seed=2), torch.zeros(8, 4, device=place[0])
    initial = torch.zeros(1, 2, 20, 20, device=place[0]) if links else None
    found = []
    for device, ops in ((place[0], triton_ops), ("meta", hybrid_kernels(backend("triton"), shapes=True))):
        with Allocated() as allocated:
            given = [*(one.to(device) for one in inputs), pieces, None if initial is None else initial.to(device)]
            out, final, kept = ops.delta_forward(*given, scale=1.0, keep=True)
            ops.delta_backward(out, final, *given, scale=1.0, kept=kept)
            conv = (x.to(device), weight.to(device), None, pieces, None)
            y = ops.conv_forward(*conv, activation="silu")
            ops.conv_backward(y, *conv, activation="silu", weight_gradient=dw.to(device), bias_gradient=None)
        found.append(allocated.nbytes)
    table = 5 * 8 * 4  # of the sums of the convolution's gradients
    assert found[0] - table == found[1]


@places
@pytest.mark.parametrize("shape", [(9, 3, 20), (70, 2, 128), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("gate", ["gated", "sigmoid"])
def test_gated_norm(place, shape: tuple[int, ...], gate: str) -> None:
    forward, backward = (getattr(triton_ops, f"{gate}_norm_{name}") for name in ("forward", "backward"))
    exact_forward, exact_backward = (getattr(reference, f"{gate}_norm_{name}") for name in ("forward", "backward"))
    tokens, heads, features = shape
    x, dy = drawn(place, *shape, seed=1), drawn(place, *shape, seed=2)
    z = drawn(place, tokens, heads * features, seed=3).unflatten(1, (heads, features))
    weight = drawn(place, 1, features, seed=4)[0]
    y = forward(x, z, weight, 1e-5)
    wide = (x.double(), z.double(), weight.double(), 1e-5)
    assert_rounded_once(y, exact_forward(*wide), "y")
    dw = torch.ones(features, device=place[0])
    exact_dw = dw.double()
    dx, dz = backward(dy, x, z, weight, 1e-5, dw)
    exact_dx, exact_dz = exact_backward(dy.double(), *wide, exact_dw)
    for name, one, exact in (("dx", dx, exact_dx), ("dz", dz, exact_dz), ("dw", dw, exact_dw)):
        assert_rounded_once(one, exact, name)
    assert torch.equal(backward(dy, x, z, weight, 1e-5, None)[0], dx)


TOLERANCES = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Of the largest number: about eight roundings of operands of products, one after the other."""


def assert_within(place, ours: Tensor, exact: Tensor, name: str) -> None:
    assert ours.shape == exact.shape, name
    error = float((ours.double() - exact).abs().max() / exact.abs().max())
    assert error <= TOLERANCES[place[1]], f"{name}: off by {error:.1e} of the largest number"


def delta_inputs(
    place, tokens: int, key_heads: int, heads: int, keys: int, values: int, *, by_channel: bool = False
) -> list[Tensor]:
    """q, k and v, which are columns of one tensor, decay of each head or of each channel, and beta.

    Some decays are so strong that nothing of a state is left after a token, and that a chunk's underflow.
    """
    widths = [key_heads * keys, key_heads * keys, heads * values]
    packed = drawn(place, tokens, sum(widths), seed=1).split(widths, dim=1)
    parts = [x.unflatten(1, (n, -1)) for x, n in zip(packed, (key_heads, key_heads, heads), strict=True)]
    wide = (place[0], torch.float32)
    decay = -drawn(wide, tokens, heads, seed=4).exp() * torch.tensor([0.05, 1.0, 4.0])[:heads].to(place[0])
    if by_channel:
        decay = decay[:, :, None] * drawn(wide, tokens, heads * keys, seed=9).unflatten(1, (heads, keys)).exp() * 3
    return [*parts, decay, drawn(wide, tokens, heads, seed=5).sigmoid()]


def widened(inputs: list[Tensor]) -> list[Tensor]:
    return [x.double() for x in inputs]


DOCUMENTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]] = {
    "packed": ((1, 70, 3), (), (), 20, 12),
    "one": ((130,), (0,), (0,), 16, 20),
    "some": ((5, 66, 2), (1,), (0, 1), 16, 16),
}
"""Their lengths, those that receive a state and that send one, and the widths of keys and values."""


@long_places
@pytest.mark.parametrize(
    ("by_channel", "case"),
    sampled([(by, case) for by in (False, True) for case in DOCUMENTS], [(False, "packed"), (True, "some")]),
)
def test_delta_rule(place, case: str, by_channel: bool) -> None:
    lengths, received, sent, keys, values = DOCUMENTS[case]
    tokens, heads = sum(lengths), 2
    inputs = delta_inputs(place, tokens, 1, heads, keys, values, by_channel=by_channel)
    pieces = pieces_at(place, lengths, received=received, sent=sent)
    wide = (place[0], torch.float32)
    initial = drawn(wide, len(received), heads * keys * values, seed=6).reshape(-1, heads, keys, values)
    initial = initial if received else None
    d_out = drawn(place, tokens, heads * values, seed=7).unflatten(1, (heads, values))
    d_final = drawn(wide, len(sent), heads * keys * values, seed=8).reshape(-1, heads, keys, values) if sent else None
    results = {}
    for name, ops, given in (
        ("ours", triton_ops, [*inputs, pieces, initial]),
        ("exact", reference, [*widened(inputs), pieces, None if initial is None else initial.double()]),
    ):
        out, final, kept = ops.delta_forward(*given, scale=0.3, keep=True)
        wider = torch.float64 if name == "exact" else None
        gradients = ops.delta_backward(
            d_out.to(wider or d_out.dtype), None if d_final is None else d_final.to(wider or torch.float32), *given,
            scale=0.3, kept=kept,
        )  # fmt: skip
        results[name] = (out, final, *gradients)
    names = ("out", "final", "dq", "dk", "dv", "ddecay", "dbeta", "d_initial")
    for name, ours, exact in zip(names, *results.values(), strict=True):
        assert (ours is None) == (exact is None), name
        if ours is not None:
            assert_within(place, ours, exact, name)


@long_places
@pytest.mark.parametrize(
    ("lengths", "received", "sent", "passing"),
    [((1, 70, 3), (), (), True), ((5, 66, 2), (1,), (0, 1), False), ((64, 2), (), (), True)],
    ids=["packed", "some", "a program without a chunk"],
)
def test_state_space(
    place, lengths: tuple[int, ...], received: tuple[int, ...], sent: tuple[int, ...], passing: bool
) -> None:
    tokens, heads, features, size = sum(lengths), 4, 12, 20
    widths = [heads * features, 2 * size, 2 * size]
    parts = drawn(place, tokens, sum(widths), seed=1).split(widths, dim=1)
    x, b, c = (part.unflatten(1, (n, -1)) for part, n in zip(parts, (heads, 2, 2), strict=True))
    wide = (place[0], torch.float32)
    dt, a = drawn(wide, tokens, heads, seed=2).sigmoid(), -drawn(wide, 1, heads, seed=3)[0].exp()
    d = drawn(wide, 1, heads, seed=4)[0] if passing else None
    pieces = pieces_at(place, lengths, received=received, sent=sent)
    state = (heads, features, size)
    initial = drawn(wide, len(received), heads * features * size, seed=6).unflatten(1, state) if received else None
    dy = drawn(place, tokens, heads * features, seed=7).unflatten(1, (heads, features))
    d_final = drawn(wide, len(sent), heads * features * size, seed=8).unflatten(1, state) if sent else None
    results = []
    for ops, cast in ((triton_ops, lambda one: one), (state_space_reference, Tensor.double)):
        given = [None if one is None else cast(one) for one in (x, dt, a, b, c, d)]
        given += [pieces, None if initial is None else cast(initial)]
        y, final, kept = ops.ssd_forward(*given, keep=True)
        gradients = ops.ssd_backward(cast(dy), None if d_final is None else cast(d_final), *given, kept=kept)
        results.append((y, final, *gradients))
    names = ("y", "final", "dx", "ddt", "da", "db", "dc", "dd", "d_initial")
    for name, ours, exact in zip(names, *results, strict=True):
        assert (ours is None) == (exact is None), name
        if ours is not None:
            assert_within(place, ours, exact, name)


FILLED = 2
"""Tokens of a pass beyond its rows."""


def assert_steps(place, ours: Tensor, exact: Tensor, states: tuple[Tensor, Tensor], pool: Tensor) -> None:
    """Compares results, updated states, and what lies in the pool behind the rows, which must not change."""
    rows = len(states[0])
    assert_rounded_once(ours[:rows], exact[:rows], "out")
    assert not ours[rows:].any() and not exact[rows:].any()
    assert_rounded_once(*states, "states")
    assert torch.equal(pool[rows:], torch.ones_like(pool[rows:]))


def pool_of(first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a pool of one slot more than the rows, the rows' states in it, and these in fp64."""
    pool = torch.cat((first, torch.ones_like(first[:1])))
    return pool, pool[: len(first)], first.double()


@places
@pytest.mark.parametrize(("width", "biased", "activation"), [(4, True, "silu"), (1, False, None), (2, False, None)])
def test_convolution_step(place, width: int, biased: bool, activation: str | None) -> None:
    rows, channels = 3, 22
    x, weight = drawn(place, rows + FILLED, channels, seed=1), drawn(place, channels, width, seed=3)
    bias = drawn(place, 1, channels, seed=4)[0] if biased else None
    tails = drawn(place, rows, (width - 1) * channels, seed=5).reshape(rows, width - 1, channels)
    pool, ours, exact = pool_of(tails)
    y = triton_ops.conv_step(x, weight, bias, ours, activation=activation)
    wide = (x.double(), weight.double(), None if bias is None else bias.double(), exact)
    assert_steps(place, y, steps.conv_step(*wide, activation=activation), (ours, exact), pool)


@places
@pytest.mark.parametrize("by_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize(("keys", "values"), [(20, 12), (128, 40), (1, 1)])
def test_delta_step(place, keys: int, values: int, by_channel: bool) -> None:
    rows, heads = 2, 2
    inputs = delta_inputs(place, rows + FILLED, 1, heads, keys, values, by_channel=by_channel)
    first = drawn((place[0], torch.float32), rows, heads * keys * values, seed=6).reshape(rows, heads, keys, values)
    pool, ours, exact = pool_of(first)
    out = triton_ops.delta_step(*inputs, ours, scale=0.3)
    assert_steps(place, out, steps.delta_step(*widened(inputs), exact, scale=0.3), (ours, exact), pool)


@places
@pytest.mark.parametrize("passing", [False, True])
@pytest.mark.parametrize(("features", "size"), [(12, 20), (40, 128), (1, 1)])
def test_state_space_step(place, features: int, size: int, passing: bool) -> None:
    rows, heads = 2, 4
    tokens, widths = rows + FILLED, [heads * features, 2 * size, 2 * size]
    parts = drawn(place, tokens, sum(widths), seed=1).split(widths, dim=1)
    x, b, c = (part.unflatten(1, (n, -1)) for part, n in zip(parts, (heads, 2, 2), strict=True))
    wide = (place[0], torch.float32)
    dt, a = drawn(wide, tokens, heads, seed=2).sigmoid(), -drawn(wide, 1, heads, seed=3)[0].exp()
    d = drawn(wide, 1, heads, seed=4)[0] if passing else None
    first = drawn(wide, rows, heads * features * size, seed=6).reshape(rows, heads, features, size)
    pool, ours, exact = pool_of(first)
    given = (x, dt, a, b, c, d)
    y = triton_ops.ssd_step(*given, ours)
    expected = steps.ssd_step(*(None if one is None else one.double() for one in given), exact)
    assert_steps(place, y, expected, (ours, exact), pool)
