"""Mamba2's state space within documents, also where these lie on several context ranks.

Legend: see `engine.hybrids.state_space_reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.distributed.mesh import Axis
from engine.hybrids.kernels import HybridKernels
from engine.hybrids.ops.passing import first_states, gathered, last_gradients
from engine.hybrids.pieces import Pieces

_Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""x, dt, a, b and c."""


class _StateSpace(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        pieces: Pieces,
        axis: Axis,
        kernels: HybridKernels,
    ) -> Tensor:
        initial = moves = None
        if axis.size > 1 and pieces.chains:
            initial, moves = _received((x, dt, a, b, c), pieces, axis, kernels)
        y, _, kept = kernels.ssd_forward(x, dt, a, b, c, d, pieces, initial, keep=any(ctx.needs_input_grad))
        ctx.save_for_backward(x, dt, a, b, c, d, initial, moves, *kept)
        ctx.pieces, ctx.axis, ctx.kernels = pieces, axis, kernels
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, dt, a, b, c, d, initial, moves, *kept = ctx.saved_tensors
        dy, d_final, inputs = dy.contiguous(), None, (x, dt, a, b, c)
        if moves is not None:
            d_final = _last(dy, inputs, ctx.pieces, initial, moves, ctx.axis, ctx.kernels)
        found = ctx.kernels.ssd_backward(dy, d_final, *inputs, d, ctx.pieces, initial, kept=tuple(kept))
        return *found[:6], None, None, None


def _part(inputs: _Inputs, tokens: Tensor) -> _Inputs:
    x, dt, a, b, c = inputs
    return x[tokens], dt[tokens], a, b[tokens], c[tokens]


def _received(inputs: _Inputs, pieces: Pieces, axis: Axis, kernels: HybridKernels) -> tuple[Tensor | None, Tensor]:
    """Returns the states that received pieces begin with, None where none is received, and how much of a state is left
    after each of all ranks' sent pieces, [ranks, most sent, N, 1, 1]. Collective."""
    x, dt, a, b, _ = inputs
    wide = torch.promote_types(x.dtype, torch.float32)
    adds = x.new_zeros((len(pieces.sent), x.shape[1], x.shape[2] * b.shape[2] + 1), dtype=wide)
    if pieces.sent:
        own, tokens = pieces.chosen(pieces.sent, received=False, sent=True)
        _, final, _ = kernels.ssd_forward(*_part(inputs, tokens), None, own, None, keep=False)
        assert final is not None
        sums = torch.stack([one.sum(0) for one in (dt[tokens] * a).split(own.lengths)])
        adds = torch.cat((final.flatten(2), sums.exp()[..., None].to(wide)), dim=2)
    every = gathered(adds, pieces.most_sent, axis)
    moves = every[..., -1:, None].contiguous()
    states = every[..., :-1].unflatten(-1, (x.shape[2], b.shape[2]))
    initial = first_states(moves, states, pieces, torch.mul)
    return initial if pieces.received else None, moves


def _last(
    dy: Tensor,
    inputs: _Inputs,
    pieces: Pieces,
    initial: Tensor | None,
    moves: Tensor,
    axis: Axis,
    kernels: HybridKernels,
) -> Tensor | None:
    """Returns the gradients of the last states of sent pieces; None where none is sent. Collective."""
    x, _, _, b, _ = inputs
    adds = moves.new_zeros((len(pieces.received), x.shape[1], x.shape[2], b.shape[2]))
    if initial is not None:
        own, tokens = pieces.chosen(pieces.received, received=True, sent=False)
        parts = _part(inputs, tokens)
        # what the pieces' own outputs give; kernels keep nothing of this part of the tokens
        _, _, kept = kernels.ssd_forward(*parts, None, own, initial, keep=True)
        found = kernels.ssd_backward(dy[tokens], None, *parts, None, own, initial, kept=kept)[6]
        assert found is not None
        adds = found
    every = gathered(adds, pieces.most_received, axis)
    gradients = last_gradients(moves, every, pieces, torch.mul)
    return gradients if pieces.sent else None


def state_space(
    x_TNP: Tensor,
    dt_TN: Tensor,
    a_N: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    d_N: Tensor,
    pieces: Pieces,
    axis: Axis,
    *,
    kernels: HybridKernels,
) -> Tensor:
    """Computes the state space; see `engine.hybrids.state_space_reference.ssd_forward`.

    Args:
        pieces: of this rank's tokens.
        axis: the context ranks.

    Returns:
        [T, N, P].
    """
    y: Tensor = _StateSpace.apply(x_TNP, dt_TN, a_N, b_TGS, c_TGS, d_N, pieces, axis, kernels)
    return y
