"""The specification of Mamba2's state spaces, against its recurrence and transformers' chunked scan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

from engine.hybrids.pieces import Pieces
from engine.hybrids.state_space_reference import ssd_backward, ssd_forward
from tests.hybrids.test_reference import CPU, LENGTHS, drawn

HEADS, GROUPS, FEATURES, STATE = 6, 2, 3, 5


def inputs(tokens: int) -> list[Tensor]:
    dt, a = drawn(tokens, HEADS, seed=2).exp(), -drawn(HEADS, seed=3).exp()
    b, c = drawn(tokens, GROUPS, STATE, seed=4), drawn(tokens, GROUPS, STATE, seed=5)
    return [drawn(tokens, HEADS, FEATURES, seed=1), dt, a, b, c, drawn(HEADS, seed=6)]


def recurrent(given: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token, as the equation stands."""
    x, dt, a, b, c, d = given
    outs = []
    for t in range(x.shape[0]):
        bt, ct = (one[t].repeat_interleave(HEADS // GROUPS, dim=0) for one in (b, c))
        state = state * (dt[t] * a).exp()[:, None, None] + torch.einsum("n,np,ns->nps", dt[t], x[t], bt)
        outs.append(torch.einsum("nps,ns->np", state, ct) + d[:, None] * x[t])
    return torch.stack(outs), state


def test_state_space_is_the_recurrence_of_each_piece() -> None:
    given = [x.requires_grad_() for x in inputs(sum(LENGTHS))]
    x, dt, a, b, c, d = given
    initial = drawn(2, HEADS, FEATURES, STATE, seed=7).requires_grad_()
    pieces = Pieces.of_lengths(LENGTHS, CPU, received=(1, 4), sent=(0, 1, 3))
    outs, finals = [], []
    for index, (px, pdt, pb, pc) in enumerate(zip(*(one.split(LENGTHS) for one in (x, dt, b, c)), strict=True)):
        start = torch.zeros(HEADS, FEATURES, STATE).double()
        if index in pieces.received:
            start = initial[pieces.received.index(index)]
        out, state = recurrent((px, pdt, a, pb, pc, d), start)
        outs.append(out)
        finals.append(state)
    expected, expected_final = torch.cat(outs), torch.stack([finals[index] for index in pieces.sent])
    with torch.no_grad():
        out, final, kept = ssd_forward(*given, pieces, initial, keep=True)
    assert final is not None
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(final, expected_final, rtol=1e-9, atol=1e-10)
    dy, d_final = drawn(*out.shape, seed=8), drawn(*final.shape, seed=9)
    wanted = torch.autograd.grad([expected, expected_final], [*given, initial], [dy, d_final])
    with torch.no_grad():
        found = ssd_backward(dy, d_final, *given, pieces, initial, kept=kept)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_state_space_is_transformers() -> None:
    x, dt, a, b, c, d = (one.float().requires_grad_() for one in inputs(200))
    expected, state = mamba2_chunk_scan(
        x[None], dt[None], a, b[None], c[None], chunk_size=32, D=d, return_final_states=True
    )
    pieces = Pieces.of_lengths([200], CPU, sent=(0,))
    with torch.no_grad():
        out, final, kept = ssd_forward(x, dt, a, b, c, d, pieces, None, keep=True)
    assert final is not None
    assert float((out - expected[0]).abs().max() / expected.abs().max()) < 1e-5
    assert float((final - state).abs().max() / state.abs().max()) < 1e-5
    dy = drawn(*out.shape, seed=8).float()
    wanted = torch.autograd.grad(expected[0], [x, dt, a, b, c, d], dy)
    with torch.no_grad():
        found = ssd_backward(dy, None, x, dt, a, b, c, d, pieces, None, kept=kept)
    assert found[6] is None
    for one, other in zip(found, wanted, strict=False):
        assert float((one - other).abs().max() / other.abs().max()) < 2e-5
