"""The gated delta rule within documents, also where these lie on several context ranks.

Legend: see `engine.hybrids.reference`.
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
"""q, k, v, decay and beta."""


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        pieces: Pieces,
        axis: Axis,
        scale: float,
        kernels: HybridKernels,
    ) -> Tensor:
        initial = moves = None
        if axis.size > 1:
            initial, moves = _received((q, k, v, decay, beta), pieces, axis, scale, kernels)
        out, _, kept = kernels.delta_forward(
            q, k, v, decay, beta, pieces, initial, scale=scale, keep=any(ctx.needs_input_grad)
        )
        ctx.save_for_backward(q, k, v, decay, beta, initial, moves, *kept)
        ctx.pieces, ctx.axis, ctx.scale, ctx.kernels = pieces, axis, scale, kernels
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        q, k, v, decay, beta, initial, moves, *kept = ctx.saved_tensors
        d_out, d_final, inputs = d_out.contiguous(), None, (q, k, v, decay, beta)
        if moves is not None:
            d_final = _last(d_out, inputs, ctx.pieces, initial, moves, ctx.axis, ctx.scale, ctx.kernels)
        found = ctx.kernels.delta_backward(
            d_out, d_final, *inputs, ctx.pieces, initial, scale=ctx.scale, kept=tuple(kept)
        )
        return *found[:5], None, None, None, None


def _received(
    inputs: _Inputs, pieces: Pieces, axis: Axis, scale: float, kernels: HybridKernels
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the states that received pieces begin with, None where none is received, and M of all ranks' sent
    pieces, None where no document lies on several ranks. Collective."""
    if not pieces.chains:
        return None, None
    _, k, v, _, _ = inputs
    heads, keys, values = v.shape[1], k.shape[2], v.shape[2]
    wide = torch.promote_types(v.dtype, torch.float32)
    moves = v.new_zeros((len(pieces.sent), heads, keys, keys), dtype=wide)
    adds = v.new_zeros((len(pieces.sent), heads, keys, values), dtype=wide)
    if pieces.sent:
        # C is the last state after zeros, and M what comes of an identity without values: both are states of one pass
        own, tokens = pieces.chosen(pieces.sent, received=True, sent=True)
        q, k, v, decay, beta = (x[tokens] for x in inputs)
        v = torch.cat((v, v.new_zeros((*v.shape[:2], keys))), dim=2)
        start = torch.cat((adds, torch.eye(keys, dtype=wide, device=v.device).expand_as(moves)), dim=3)
        _, final, _ = kernels.delta_forward(q, k, v, decay, beta, own, start, scale=scale, keep=False)
        assert final is not None
        adds, moves = final.split([values, keys], dim=3)
    every = gathered(torch.cat((adds, moves), dim=3), pieces.most_sent, axis)
    every_adds, every_moves = every.split([values, keys], dim=-1)
    initial = first_states(every_moves, every_adds, pieces, torch.matmul)
    return initial if pieces.received else None, every_moves


def _last(
    d_out: Tensor,
    inputs: _Inputs,
    pieces: Pieces,
    initial: Tensor | None,
    moves: Tensor,
    axis: Axis,
    scale: float,
    kernels: HybridKernels,
) -> Tensor | None:
    """Returns the gradients of the last states of sent pieces; None where none is sent. Collective."""
    adds = moves.new_zeros((len(pieces.received), *moves.shape[2:4], inputs[2].shape[2]))
    if initial is not None:
        own, tokens = pieces.chosen(pieces.received, received=True, sent=False)
        parts = tuple(x[tokens] for x in inputs)
        # what the pieces' own outputs give; kernels keep nothing of this part of the tokens
        _, _, kept = kernels.delta_forward(*parts, own, initial, scale=scale, keep=True)
        found = kernels.delta_backward(d_out[tokens], None, *parts, own, initial, scale=scale, kept=kept)[5]
        assert found is not None
        adds = found
    every = gathered(adds, pieces.most_received, axis)
    gradients = last_gradients(moves, every, pieces, lambda move, gradient: move.transpose(-1, -2) @ gradient)
    return gradients if pieces.sent else None


def delta_rule(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    decay: Tensor,
    beta_TN: Tensor,
    pieces: Pieces,
    axis: Axis,
    *,
    scale: float,
    kernels: HybridKernels,
) -> Tensor:
    """Computes the gated delta rule; see `engine.hybrids.reference.delta_forward`.

    Args:
        pieces: of this rank's tokens.
        axis: the context ranks.

    Returns:
        [T, N, V].
    """
    out: Tensor = _DeltaRule.apply(q_TGK, k_TGK, v_TNV, decay, beta_TN, pieces, axis, scale, kernels)
    return out
