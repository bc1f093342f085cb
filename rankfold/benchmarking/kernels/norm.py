"""Cases of RMSNorm: forward, backward without the weight's gradient, backward of a norm whose output feeds adapters.

Legend: T tokens, F features, R rows of the stacked A.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine.kernels import reference
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import Case, Contestant, Results, by_autograd, calling
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting
from rankfold.benchmarking.oracles import EPS, rms_norm, with_gradients


def _inputs(setting: Setting, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x [T, F], weight [F], dy [T, F]."""
    draws, options = setting.draws(name), setting.options
    return (
        draws.normal(options.tokens, options.hidden),
        draws.normal(options.hidden, mean=1.0, scale=0.1),
        draws.normal(options.tokens, options.hidden),
    )


def _statistics(x: Tensor) -> Tensor:
    """Returns 1 / rms, fp32 [T, 1]."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)


def _demand(setting: Setting, kind: str, num_ranks: int = 0) -> Demand:
    options = setting.options
    return Demand(moved=setting.moved("rmsnorm", options.tokens, options.hidden, num_ranks=num_ranks)[kind])


def _size(setting: Setting) -> str:
    return f"{setting.options.tokens}x{setting.options.hidden}"


def forward(setting: Setting) -> Case:
    x, weight, _ = _inputs(setting, "norm forward")

    def engine(kernels: Kernels) -> Contestant:
        out = torch.empty_like(x)

        def run() -> Results:
            kernels.norm_forward(x, weight, EPS, out)
            return (out,)

        return Contestant(run=run)

    def liger() -> Contestant:
        from liger_kernel.ops import LigerRMSNormFunction

        return calling(LigerRMSNormFunction.apply, x, weight, EPS)

    def quack() -> Contestant:
        from quack import rmsnorm

        return calling(partial(rmsnorm, eps=EPS), x, weight)

    return Case(
        size=_size(setting),
        demand=_demand(setting, "forward"),
        contestants=setting.contestants(engine, **setting.plain(rms_norm, x, weight), liger=liger, quack=quack),
        answer=lambda: (rms_norm(x.double(), weight.double()),),
    )


def _gradient(x: Tensor, weight: Tensor, dy: Tensor) -> Results:
    """Returns dx by autograd, in float64."""
    return with_gradients(lambda x: rms_norm(x, weight.double()), (x,), (dy,))[1:]


def backward(setting: Setting) -> Case:
    x, weight, dy = _inputs(setting, "norm backward")
    rstd = _statistics(x)

    def liger() -> Contestant:
        from liger_kernel.ops import LigerRMSNormFunction

        consumed = dy.clone()  # it works in place over dy by default
        contestant = by_autograd(lambda leaf: LigerRMSNormFunction.apply(leaf, weight, EPS), x, consumed)
        return replace(contestant, reset=lambda: consumed.data.copy_(dy))

    def quack() -> Contestant:
        from quack import rmsnorm

        return by_autograd(lambda leaf: rmsnorm(leaf, weight, eps=EPS), x, dy)

    return Case(
        size=_size(setting),
        demand=_demand(setting, "backward"),
        contestants=setting.contestants(
            lambda kernels: calling(kernels.norm_backward, dy, x, weight, rstd, None, None),
            torch=lambda: by_autograd(lambda leaf: rms_norm(leaf, weight), x, dy),
            compile=lambda: setting.compiled(reference.rmsnorm_backward, dy, x, weight, rstd),
            liger=liger,
            quack=quack,
        ),
        answer=lambda: _gradient(x, weight, dy),
    )


def backward_with_update(setting: Setting, *, dropped: bool) -> Case:
    """Returns the case of a dy without the adapters' share, which is added on the way."""
    options = setting.options
    x, weight, dy = _inputs(setting, "norm update")
    num_ranks = 3 * options.rank  # q, k, v
    dh, a = setting.adapter("norm update, adapters", num_ranks, options.hidden)
    rstd = _statistics(x)

    # H = drop(y) A^T, which the linear kept: with it a kernel can make the update on its way
    scaled = setting.scaled_mask(options.hidden).to(setting.dtype) if dropped else 1.0
    h = (rms_norm(x, weight) * scaled) @ a.t()

    def engine(kernels: Kernels, h_TR: Tensor | None = h) -> Contestant:
        update, consumed = setting.update(kernels, dh, a, dropped=dropped, h_TR=h_TR), dy.clone()
        return calling(kernels.norm_backward, consumed, x, weight, rstd, update, None, reset=lambda: consumed.copy_(dy))

    contestants = setting.contestants(engine)
    if "triton" in setting.backends:
        contestants["triton, two kernels"] = replace(
            engine(setting.backends["triton"], None),
            note="triton, two kernels: the update is added before; in one kernel it is a prologue of the norm's "
            "backward, which takes H besides.",
        )
    return Case(
        size=f"{_size(setting)}, rank {num_ranks}",
        demand=_demand(setting, "backward", num_ranks),
        contestants=contestants,
        answer=lambda: _gradient(x, weight, dy.double() + setting.added(dh, a, dropped=dropped)),
    )


CASES = {
    "RMSNorm forward": forward,
    "RMSNorm backward": backward,
    "RMSNorm backward, rank-r update": partial(backward_with_update, dropped=False),
    "RMSNorm backward, rank-r update, dropout": partial(backward_with_update, dropped=True),
}
