"""The Triton kernels at the signatures of `engine.hybrids.reference`: pieces become tables on the device.

Each op makes its tables by one small kernel, so that a replayed graph makes those of its own offsets.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from engine.hybrids.pieces import Pieces
from engine.kernels.triton import (
    chunks,
    delta,
    delta_channel_gradients,
    delta_channels,
    delta_gradients,
    gated_norm,
    short_conv,
    state_space,
    state_steps,
)

gated_norm_forward = gated_norm.gated_norm_forward
gated_norm_backward = gated_norm.gated_norm_backward
sigmoid_norm_forward = partial(gated_norm.gated_norm_forward, silu=False)
sigmoid_norm_backward = partial(gated_norm.gated_norm_backward, silu=False)
conv_step = state_steps.conv_step
delta_step = state_steps.delta_step
ssd_step = state_steps.state_space_step


def _received_rows(pieces: Pieces, given: Tensor | None) -> Tensor | None:
    """Returns which of the given states or tails each piece has; None where none is given, or piece i has the i-th."""
    return None if given is None else pieces.places(pieces.received)


def conv_forward(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    pieces: Pieces,
    tail: Tensor | None,
    *,
    activation: str | None,
) -> Tensor:
    """Computes a causal convolution of each channel."""
    table = chunks.cut(pieces.offsets, x_TC.shape[0], short_conv.CHUNK)
    rows = _received_rows(pieces, tail)
    return short_conv.conv_forward(x_TC, weight_CW, bias_C, table, tail, rows, activation=activation)


def conv_backward(
    dy: Tensor,
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    pieces: Pieces,
    tail: Tensor | None,
    *,
    activation: str | None,
    weight_gradient: Tensor | None,
    bias_gradient: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gradients of x and the tail, and adds those of weight and bias."""
    return short_conv.conv_backward(
        dy,
        x_TC,
        weight_CW,
        bias_C,
        chunks.cut(pieces.offsets, x_TC.shape[0], short_conv.CHUNK),
        tail,
        _received_rows(pieces, tail),
        pieces.offsets,
        activation=activation,
        weight_gradient=weight_gradient,
        bias_gradient=bias_gradient,
    )


def _ends(pieces: Pieces, initial: Tensor | None, num_final: int) -> delta.Ends:
    return delta.Ends(
        initial=initial,
        initial_rows=_received_rows(pieces, initial),
        num_final=num_final,
        final_rows=pieces.places(pieces.sent) if num_final > 0 else None,
    )


def delta_forward(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    decay: Tensor,
    beta_TN: Tensor,
    pieces: Pieces,
    initial_RNKV: Tensor | None,
    *,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Computes the gated delta rule, with one decay for a head or for each channel of its keys."""
    ends = _ends(pieces, initial_RNKV, len(pieces.sent))
    forward = delta_channels.channel_delta_forward if decay.dim() == 3 else delta.delta_forward
    out, final, kept = forward(q_TGK, k_TGK, v_TNV, decay, beta_TN, pieces.offsets, ends, scale=scale)
    return out, final, kept if keep else ()


def delta_backward(
    d_out: Tensor,
    d_final: Tensor | None,
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    decay: Tensor,
    beta_TN: Tensor,
    pieces: Pieces,
    initial_RNKV: Tensor | None,
    *,
    scale: float,
    kept: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Computes the gradients of q, k, v, decay, beta and the initial states."""
    num_final = 0 if d_final is None else d_final.shape[0]
    solved = kept[0], kept[1]
    if decay.dim() == 3:
        return delta_channel_gradients.channel_delta_backward(
            d_out, d_final, q_TGK, k_TGK, v_TNV, decay, beta_TN, pieces.offsets,
            _ends(pieces, initial_RNKV, num_final), scale=scale, solved=solved,
        )  # fmt: skip
    return delta_gradients.delta_backward(
        d_out, d_final, q_TGK, k_TGK, v_TNV, beta_TN, pieces.offsets, _ends(pieces, initial_RNKV, num_final),
        scale=scale, solved=solved,
    )  # fmt: skip


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
    """Computes a state space; nothing is kept for backward."""
    ends = _ends(pieces, initial_RNPS, len(pieces.sent))
    y, final = state_space.ssd_forward(x_TNP, dt_TN, a_N, b_TGS, c_TGS, d_N, pieces.offsets, ends)
    return y, final, ()


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
    """Computes the gradients of x, dt, a, b, c, d and the initial states."""
    ends = _ends(pieces, initial_RNPS, 0 if d_final is None else d_final.shape[0])
    return state_space.ssd_backward(dy, d_final, x_TNP, dt_TN, a_N, b_TGS, c_TGS, d_N, pieces.offsets, ends)
