"""The specification, in plain torch, of a token of each row while text is generated: states are updated where they are.

Each function computes what `engine.hybrids.reference` and `engine.hybrids.state_space_reference` do with pieces of one
token, all of whose states are given and kept. Tokens beyond the rows that have states only fill up a pass: their
results are zeros, and nothing is kept of them.

Legend: T tokens, R rows that have states, R <= T, G key heads or groups, N heads, K, V features of a key and a value,
P features of a head, S of its state for each, C channels, W taps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from engine.hybrids.reference import normalised


def conv_step(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, tails_RWC: Tensor, *, activation: str | None
) -> Tensor:
    """Computes the causal convolution of each channel, and moves each row's tail on by its token.

    Args:
        tails_RWC: [R, W - 1, C], in the dtype of x, the last inputs of each row.
        activation: "silu" on the output, or None.

    Returns:
        [T, C] in the dtype of x.
    """
    rows = tails_RWC.shape[0]
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    window = torch.cat((tails_RWC, x_TC[:rows, None]), dim=1)
    y = (window.to(wide) * weight_CW.to(wide).T).sum(1)
    if bias_C is not None:
        y = y + bias_C.to(wide)
    tails_RWC.copy_(window[:, 1:])
    return filled((silu(y) if activation == "silu" else y).to(x_TC.dtype), x_TC.shape[0])


def delta_step(
    q_TGK: Tensor, k_TGK: Tensor, v_TNV: Tensor, decay: Tensor, beta_TN: Tensor, states_RNKV: Tensor, *, scale: float
) -> Tensor:
    """Computes the gated delta rule; see `engine.hybrids.reference.delta_forward`.

    Args:
        decay: [T, N] or [T, N, K].
        states_RNKV: fp32.

    Returns:
        [T, N, V] in the dtype of v.
    """
    rows, wide = states_RNKV.shape[0], states_RNKV.dtype
    q, k, v = (one[:rows].to(wide) for one in (q_TGK, k_TGK, v_TNV))
    copies = v.shape[1] // q.shape[1]
    q, k = (normalised(one).repeat_interleave(copies, dim=1) for one in (q, k))
    decay, beta = decay[:rows].to(wide), beta_TN[:rows].to(wide)
    state = states_RNKV * (decay if decay.dim() == 3 else decay[..., None]).exp()[..., None]
    added = (v - torch.einsum("rnkv,rnk->rnv", state, k)) * beta[..., None]
    states_RNKV.copy_(state + k[..., None] * added[:, :, None])
    out = torch.einsum("rnkv,rnk->rnv", states_RNKV, q * scale)
    return filled(out.to(v_TNV.dtype), v_TNV.shape[0])


def ssd_step(
    x_TNP: Tensor,
    dt_TN: Tensor,
    a_N: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    d_N: Tensor | None,
    states_RNPS: Tensor,
) -> Tensor:
    """Computes a state space; see `engine.hybrids.state_space_reference.ssd_forward`.

    Args:
        states_RNPS: fp32.

    Returns:
        [T, N, P] in the dtype of x.
    """
    rows, wide = states_RNPS.shape[0], states_RNPS.dtype
    x, b, c = (one[:rows].to(wide) for one in (x_TNP, b_TGS, c_TGS))
    b, c = (one.repeat_interleave(x.shape[1] // one.shape[1], dim=1) for one in (b, c))
    dt = dt_TN[:rows].to(wide)
    decayed = states_RNPS * (dt * a_N.to(wide)).exp()[..., None, None]
    states_RNPS.copy_(decayed + (dt[..., None] * x)[..., None] * b[:, :, None])
    y = torch.einsum("rnps,rns->rnp", states_RNPS, c)
    if d_N is not None:
        y = y + x * d_N.to(wide)[:, None]
    return filled(y.to(x_TNP.dtype), x_TNP.shape[0])


def filled(x: Tensor, tokens: int) -> Tensor:
    """Returns x [R, ...] with rows of zeros behind, [T, ...]."""
    return x if x.shape[0] == tokens else pad(x, (0, 0) * (x.dim() - 1) + (0, tokens - x.shape[0]))
