"""The specification of layers with states, against transformers' recurrent rule and a convolution of torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated, torch_recurrent_gated_delta_rule

from engine.hybrids import reference
from engine.hybrids.pieces import Pieces
from engine.zigzag import ContextLayout

LENGTHS = (1, 70, 3, 129, 64, 2)
CPU = torch.device("cpu")


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(tokens: int, *, by_channel: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = drawn(tokens, 1, 5, seed=1), drawn(tokens, 1, 5, seed=2), drawn(tokens, 3, 4, seed=3)
    decay = -drawn(tokens, 3, *([5] if by_channel else []), seed=4).exp()
    return q, k, v, decay, drawn(tokens, 3, seed=5).sigmoid()


def recurrent(given: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token, as the equation stands."""
    q, k, v, decay, beta = given
    outs = []
    for t in range(q.shape[0]):
        qt, kt = (x[t].expand(v.shape[1], -1) * torch.rsqrt(x[t].square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        factor = decay[t].exp()
        state = state * (factor[..., None] if factor.dim() == 2 else factor[:, None, None])
        delta = (v[t] - torch.einsum("nk,nkv->nv", kt, state)) * beta[t][:, None]
        state = state + kt[..., None] * delta[:, None]
        outs.append(torch.einsum("nk,nkv->nv", qt * 0.5, state))
    return torch.stack(outs), state


@pytest.mark.parametrize("by_channel", [False, True])
def test_delta_rule_is_the_recurrence_of_each_piece(by_channel: bool) -> None:
    given = inputs(sum(LENGTHS), by_channel=by_channel)
    for x in given:
        x.requires_grad_()
    initial = drawn(2, 3, 5, 4, seed=6).requires_grad_()
    pieces = Pieces.of_lengths(LENGTHS, CPU, received=(1, 4), sent=(0, 1, 3))
    outs, finals = [], []
    for index, parts in enumerate(zip(*(x.split(LENGTHS) for x in given), strict=True)):
        start = initial[pieces.received.index(index)] if index in pieces.received else torch.zeros(3, 5, 4).double()
        out, state = recurrent(parts, start)
        outs.append(out)
        finals.append(state)
    expected, expected_final = torch.cat(outs), torch.stack([finals[index] for index in pieces.sent])
    out, final, kept = reference.delta_forward(*given, pieces, initial, scale=0.5, keep=True)
    assert final is not None
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(final, expected_final, rtol=1e-9, atol=1e-10)
    d_out, d_final = drawn(*out.shape, seed=7), drawn(*final.shape, seed=8)
    wanted = torch.autograd.grad([expected, expected_final], [*given, initial], [d_out, d_final])
    found = reference.delta_backward(d_out, d_final, *given, pieces, initial, scale=0.5, kept=kept)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_delta_rule_is_transformers() -> None:
    q, k, v, decay, beta = (x.float() for x in inputs(200, by_channel=False))
    expected, state = torch_recurrent_gated_delta_rule(
        *(x[None] for x in (q, k, v)), g=decay[None], beta=beta[None], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    pieces = Pieces.of_lengths([200], CPU, sent=(0,))
    out, final, _ = reference.delta_forward(q, k, v, decay, beta, pieces, None, scale=5**-0.5, keep=False)
    assert final is not None
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(final, state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution_is_torchs_of_each_piece(activation: str | None) -> None:
    x, weight, bias = drawn(sum(LENGTHS), 6, seed=1), drawn(6, 4, seed=2), drawn(6, seed=3)
    tail = drawn(2, 3, 6, seed=4)
    given = [one.requires_grad_() for one in (x, weight, bias, tail)]
    pieces = Pieces.of_lengths(LENGTHS, CPU, received=(0, 3))
    parts = []
    for index, part in enumerate(x.split(LENGTHS)):
        before = tail[pieces.received.index(index)] if index in pieces.received else torch.zeros(3, 6).double()
        parts.append(conv1d(torch.cat((before, part)).T[None], weight[:, None], bias, groups=6)[0].T)
    expected = torch.cat(parts)
    expected = expected if activation is None else silu(expected)
    out = reference.conv_forward(x, weight, bias, pieces, tail, activation=activation)
    torch.testing.assert_close(out, expected)
    dy, d_weight, d_bias = drawn(*out.shape, seed=5), torch.zeros(6, 4).double(), torch.zeros(6).double()
    wanted = torch.autograd.grad(expected, given, dy)
    dx, d_tail = reference.conv_backward(
        dy, x, weight, bias, pieces, tail, activation=activation, weight_gradient=d_weight, bias_gradient=d_bias
    )
    for one, other in zip((dx, d_weight, d_bias, d_tail), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_gated_norm_is_transformers() -> None:
    x, z = drawn(7, 3, 8, seed=1).float(), drawn(7, 3, 8, seed=2).float()
    norm = Qwen3NextRMSNormGated(8, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    leaves = [x.requires_grad_(), z.requires_grad_(), norm.weight]
    expected = norm(x, z)
    torch.testing.assert_close(reference.gated_norm_forward(x, z, norm.weight, 1e-5), expected)
    dy, d_weight = torch.randn(7, 3, 8), torch.zeros(8)
    found = reference.gated_norm_backward(dy, x, z, norm.weight, 1e-5, d_weight)
    for one, other in zip((*found, d_weight), torch.autograd.grad(expected, leaves, dy), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parents", [(), (-1, 0, -1, 2, 2)], ids=["apart", "branches"])
def test_pieces_of_context_ranks_hold_each_token_once(parents: tuple[int, ...]) -> None:
    layout = ContextLayout.even(size=3, num_rows=2, row_length=25, document_lengths=(7, 18, 1, 2, 22))
    ranks = [Pieces.of_context(layout, rank, CPU, parents) for rank in range(3)]
    assert [one.num_tokens for one in ranks] == [layout.tokens_on(rank) for rank in range(3)]
    links = ranks[0].links
    assert all(one.links == links for one in ranks)
    for number, link in enumerate(links):
        mine = ranks[link.rank]
        assert mine.lengths[link.index] == link.length and link.after < number
        assert link.sent == -1 or mine.sent[link.sent] == link.index
        assert link.received == -1 or mine.received[link.received] == link.index
        assert (link.sent >= 0) == any(other.after == number for other in links)
        assert (link.received >= 0) == (link.after >= 0)
    for rank, mine in enumerate(ranks):
        own = sorted(
            (link for link in links if link.rank == rank and link.received >= 0), key=lambda link: link.received
        )
        assert [link.after for link in own] == sorted(link.after for link in own)
        starts = torch.arange(len(own)) if mine.starts() is None else mine.starts()
        assert starts is not None and starts.tolist() == [link.origin for link in own]
        assert len({link.after for link in own}) == len(mine.branches) <= mine.most_states
    # from each link back to its first one, the tokens up to its end
    totals: list[int] = []
    for link in links:
        totals.append(link.length + (totals[link.after] if link.after >= 0 else 0))
    ends = [total for total, link in zip(totals, links, strict=True) if link.sent < 0]
    assert ends == ([7, 18, 22] if not parents else [25, 3, 23])
