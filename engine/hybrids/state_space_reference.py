"""The specification, in plain torch, of Mamba2's state spaces (arXiv 2405.21060). Arithmetic is fp32, or wider where
inputs are.

A head has a state h [P, S], which begins as 0 or as the state that its piece receives:

    h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t^T        y_t = h_t c_t + d x_t

It is computed in chunks (section 6 there), all of which are computed side by side but for the states that go from one
to the next. With s the cumulative sum of dt a inside a chunk and h the state that enters it:

    y_i = sum_{j <= i} exp(s_i - s_j) (c_i b_j) dt_j x_j + exp(s_i) h c_i
    h' = exp(s_last) h + sum_j exp(s_last - s_j) dt_j x_j b_j^T

Legend: T tokens, N heads, G groups (head n reads group n // (N / G)), P features of a head, S of its state per feature,
R received pieces, C chunks, L tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.hybrids.pieces import Chunks, Pieces

CHUNK = 64


def ssd_forward(
    x_TNP: Tensor,
    dt_TN: Tensor,
    a_N: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    d_N: Tensor | None,
    pieces: Pieces,
    initial_RNPS: Tensor | None,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Computes the state space within pieces.

    Args:
        x_TNP, b_TGS, c_TGS: may be columns of a wider tensor.
        dt_TN: fp32, 0 or more.
        a_N: fp32, below 0.
        d_N: on what passes by the state; None where nothing does.
        pieces: of the T tokens.
        initial_RNPS: fp32, the initial states of `pieces.received`; None where none is received.
        keep: whether a backward follows.

    Returns:
        [T, N, P] in the dtype of x; fp32 [len(pieces.sent), N, P, S], the last states of those pieces, or None where
        none is asked for; tensors for `ssd_backward`.
    """
    cut = _Cut.of(x_TNP, dt_TN, a_N, b_TGS, c_TGS, pieces)
    entering, last = _scan(cut, initial_RNPS, pieces)
    y = cut.mixed() @ cut.x + cut.decay_in[..., None] * (cut.c @ entering.transpose(-1, -2))
    y_TNP = cut.joined(y, x_TNP.shape[0])
    if d_N is not None:
        y_TNP = y_TNP + d_N.to(y.dtype)[:, None] * x_TNP.to(y.dtype)
    final = last[_places(pieces, pieces.sent, cut.chunks)] if pieces.sent else None
    return y_TNP.to(x_TNP.dtype), final, ()


def ssd_backward(
    dy: Tensor,
    d_final: Tensor | None,
    x_TNP: Tensor,
    dt_TN: Tensor,
    a_N: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    d_N: Tensor | None,
    pieces: Pieces,
    initial_RNPS: Tensor | None,
    *,
    kept: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of x, dt, a, b, c, d and the initial states; those of a and d are sums over tokens.

    Args:
        dy: [T, N, P].
        d_final: fp32, of the last states; None where they have none.
        kept: of the forward.
        (others): as of `ssd_forward`.
    """
    cut = _Cut.of(x_TNP, dt_TN, a_N, b_TGS, c_TGS, pieces)
    entering, _ = _scan(cut, initial_RNPS, pieces)
    total, groups = x_TNP.shape[0], b_TGS.shape[1]
    d = cut.cut(dy)  # [C, N, L, P]
    read_CNPS = (cut.decay_in[..., None] * d).transpose(-1, -2) @ cut.c
    leaving, d_initial = _scan_back(cut, read_CNPS, d_final, initial_RNPS, pieces)

    # inside a chunk: products_ij = dy_i x_j, and what each pair of tokens adds to the loss
    products = d @ cut.x.transpose(-1, -2)
    mixed = cut.mixed()
    pairs = products * mixed
    scores_gradient = products * cut.apart * cut.dt[..., None, :]
    # into and out of the state
    written = cut.b @ leaving.transpose(-1, -2)  # [C, N, L, P]
    weights = cut.decay_out * cut.dt
    reads = cut.decay_in * (d * (cut.c @ entering.transpose(-1, -2))).sum(-1)
    writes = weights * (cut.x * written).sum(-1)

    dx = mixed.transpose(-1, -2) @ d + weights[..., None] * written
    dc = scores_gradient @ cut.b + cut.decay_in[..., None] * (d @ entering)
    db = scores_gradient.transpose(-1, -2) @ cut.c + weights[..., None] * (cut.x @ leaving)
    summed = pairs.sum(-1) - pairs.sum(-2) + reads - writes
    summed[..., -1] += writes.sum(-1) + cut.decay_in[..., -1] * (leaving * entering).sum((-1, -2))
    d_log = summed.flip(-1).cumsum(-1).flip(-1)  # of dt a, whose cumulative sum was read
    unscaled = (products * cut.apart * cut.scores()).sum(-2) + cut.decay_out * (cut.x * written).sum(-1)
    ddt = unscaled + cut.a[:, None] * d_log
    da_N = (cut.dt * d_log).sum((0, 2))

    dx_TNP, dd_N = cut.joined(dx, total), None
    if d_N is not None:
        dx_TNP = dx_TNP + d_N.to(dx.dtype)[:, None] * dy.to(dx.dtype)
        dd_N = (dy.to(dx.dtype) * x_TNP.to(dx.dtype)).sum((0, 2)).to(d_N.dtype)

    def grouped(gradient: Tensor) -> Tensor:
        return cut.joined(gradient.unflatten(1, (groups, -1)).sum(2), total)

    return (
        dx_TNP.to(x_TNP.dtype),
        cut.joined(ddt[..., None], total)[..., 0].to(dt_TN.dtype),
        da_N.to(a_N.dtype),
        grouped(db).to(b_TGS.dtype),
        grouped(dc).to(c_TGS.dtype),
        dd_N,
        d_initial,
    )


class _Cut(NamedTuple):
    """The inputs cut into chunks, head by head, zeros beyond the end of a piece.

    Args:
        x: [C, N, L, P].
        dt: [C, N, L].
        a: [N].
        b, c: [C, N, L, S].
        apart: [C, N, L, L], exp(s_i - s_j) where j <= i, else 0.
        decay_in, decay_out: [C, N, L], exp(s_i) and exp(s_last - s_i).
    """

    chunks: Chunks
    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    apart: Tensor
    decay_in: Tensor
    decay_out: Tensor

    @classmethod
    def of(cls, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, pieces: Pieces) -> _Cut:
        chunks = pieces.chunks(min(CHUNK, max(pieces.lengths)))
        wide = torch.promote_types(x.dtype, torch.float32)
        copies = x.shape[1] // b.shape[1]
        steps = _cut(dt[..., None], chunks, wide)[..., 0]
        a = a.to(wide)
        sums = (steps * a[:, None]).cumsum(-1)
        later = torch.ones(sums.shape[-1], sums.shape[-1], dtype=torch.bool, device=x.device).triu(1)
        return cls(
            chunks=chunks,
            x=_cut(x, chunks, wide),
            dt=steps,
            a=a,
            b=_cut(b, chunks, wide).repeat_interleave(copies, dim=1),
            c=_cut(c, chunks, wide).repeat_interleave(copies, dim=1),
            apart=(sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp(),
            decay_in=sums.exp(),
            decay_out=(sums[..., -1:] - sums).exp(),
        )

    def cut(self, x: Tensor) -> Tensor:
        """Returns [T, N, ...] as [C, N, L, ...]."""
        return _cut(x, self.chunks, self.x.dtype)

    def scores(self) -> Tensor:
        """Returns [C, N, L, L], the products c_i b_j."""
        return self.c @ self.b.transpose(-1, -2)

    def mixed(self) -> Tensor:
        """Returns [C, N, L, L], how much of x_j is in y_i by way of the chunk alone."""
        return self.scores() * self.apart * self.dt[..., None, :]

    def joined(self, x: Tensor, total: int) -> Tensor:
        """Returns [C, n, L, F] as [T, n, F]."""
        out = x.new_empty((total + 1, x.shape[1], x.shape[3]))
        return out.index_put_((self.chunks.tokens,), x.transpose(1, 2))[:-1]


def _cut(x: Tensor, chunks: Chunks, wide: torch.dtype) -> Tensor:
    padded = torch.cat((x.to(wide), x.new_zeros((1, *x.shape[1:]), dtype=wide)))
    return padded[chunks.tokens].transpose(1, 2)


def _places(pieces: Pieces, indices: tuple[int, ...], chunks: Chunks) -> Tensor:
    """Returns where pieces stand in the order of their chunks, int64."""
    places = {piece: place for place, piece in enumerate(chunks.order)}
    return torch.tensor([places[index] for index in indices], dtype=torch.int64).to(pieces.offsets.device)


def _scan(cut: _Cut, initial: Tensor | None, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """Returns the states that enter each chunk, [C, N, P, S], and those that pieces end with, in the order of
    their chunks."""
    weights = cut.decay_out * cut.dt
    added = (weights[..., None] * cut.x).transpose(-1, -2) @ cut.b
    states = added.new_zeros((len(pieces.lengths), *added.shape[1:]))
    if initial is not None:
        states[_places(pieces, pieces.received, cut.chunks)] = initial.to(states.dtype)
    decay, entering, first = cut.decay_in[..., -1, None, None], torch.empty_like(added), 0
    for count in cut.chunks.counts:
        step, first = slice(first, first + count), first + count
        entering[step] = states[:count]
        states[:count] = decay[step] * states[:count] + added[step]
    return entering, states


def _scan_back(
    cut: _Cut, read_CNPS: Tensor, d_final: Tensor | None, initial: Tensor | None, pieces: Pieces
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of the states that leave each chunk, [C, N, P, S], and those of the initial ones.

    Args:
        read_CNPS: the gradients of the states that enter each chunk, as far as its own tokens read them.
        d_final: of the last states of `pieces.sent`; None where they have none.
    """
    states = read_CNPS.new_zeros((len(pieces.lengths), *read_CNPS.shape[1:]))
    if d_final is not None:
        states[_places(pieces, pieces.sent, cut.chunks)] = d_final.to(states.dtype)
    decay, leaving, after = cut.decay_in[..., -1, None, None], torch.empty_like(read_CNPS), read_CNPS.shape[0]
    for count in reversed(cut.chunks.counts):
        step, after = slice(after - count, after), after - count
        leaving[step] = states[:count]
        states[:count] = decay[step] * states[:count] + read_CNPS[step]
    if initial is None:
        return leaving, None
    return leaving, states[_places(pieces, pieces.received, cut.chunks)].to(initial.dtype)
