"""A token of each row by the compiled kernels of whole documents; the specification is `engine.hybrids.steps`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.hybrids.steps import filled
from engine.kernels.native.convolution import conv_forward
from engine.kernels.native.delta import delta_forward
from engine.kernels.native.ssd import ssd_forward


@dataclass(frozen=True, slots=True)
class _Single:
    """Runs of one token each, all of whose states are given and asked for; see `engine.kernels.native.recurrence`."""

    count: int

    @property
    def lengths(self) -> tuple[int, ...]:
        return (1,) * self.count

    @property
    def received(self) -> tuple[int, ...]:
        return tuple(range(self.count))

    sent = received


def conv_step(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, tails_RWC: Tensor, *, activation: str | None
) -> Tensor:
    """Computes the causal convolution of each channel, and moves each row's tail on by its token."""
    rows = tails_RWC.shape[0]
    x = x_TC[:rows]
    y = conv_forward(x, weight_CW, bias_C, _Single(rows), tails_RWC, activation=activation)
    tails_RWC.copy_(torch.cat((tails_RWC, x[:, None]), dim=1)[:, 1:])
    return filled(y, x_TC.shape[0])


def delta_step(
    q_TGK: Tensor, k_TGK: Tensor, v_TNV: Tensor, decay: Tensor, beta_TN: Tensor, states_RNKV: Tensor, *, scale: float
) -> Tensor:
    """Computes the gated delta rule."""
    rows = states_RNKV.shape[0]
    q, k, v, decay, beta = (one[:rows] for one in (q_TGK, k_TGK, v_TNV, decay, beta_TN))
    out, _, _ = delta_forward(
        q, k, v, decay, beta, _Single(rows), states_RNKV, scale=scale, keep=False, final=states_RNKV
    )
    return filled(out, v_TNV.shape[0])


def ssd_step(
    x_TNP: Tensor,
    dt_TN: Tensor,
    a_N: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    d_N: Tensor | None,
    states_RNPS: Tensor,
) -> Tensor:
    """Computes a state space."""
    rows = states_RNPS.shape[0]
    x, dt, b, c = (one[:rows] for one in (x_TNP, dt_TN, b_TGS, c_TGS))
    y, _, _ = ssd_forward(x, dt, a_N, b, c, d_N, _Single(rows), states_RNPS, keep=False, final=states_RNPS)
    return filled(y, x_TNP.shape[0])
