"""A token of each row by the compiled kernels of whole documents; the specification is `engine.hybrids.steps`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.hybrids.steps import filled
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


def delta_step(
    q_TGK: Tensor, k_TGK: Tensor, v_TNV: Tensor, decay: Tensor, beta_TN: Tensor, states_RNKV: Tensor, *, scale: float
) -> Tensor:
    """Computes the gated delta rule."""
    rows = states_RNKV.shape[0]
    q, k, v, decay, beta = (one[:rows] for one in (q_TGK, k_TGK, v_TNV, decay, beta_TN))
    out, final, _ = delta_forward(q, k, v, decay, beta, _Single(rows), states_RNKV, scale=scale, keep=False)
    return _kept(out, final, states_RNKV, v_TNV.shape[0])


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
    y, final, _ = ssd_forward(x, dt, a_N, b, c, d_N, _Single(rows), states_RNPS, keep=False)
    return _kept(y, final, states_RNPS, x_TNP.shape[0])


def _kept(out: Tensor, final: Tensor | None, states: Tensor, tokens: int) -> Tensor:
    assert final is not None
    states.copy_(final)
    return filled(out, tokens)
