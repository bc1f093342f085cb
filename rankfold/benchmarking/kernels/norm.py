"""Cases of RMSNorm: forward, backward without the weight's gradient, backward of a norm whose output feeds adapters.

Legend: T tokens, F features, R rows of the stacked A.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from engine.kernels import reference
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import TORCH, Case, Contestant, Results
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting

EPS = 1e-5


def _inputs(setting: Setting, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x [T, F], weight [F], dy [T, F]."""
    draws, options = setting.draws(name), setting.options
    return (
        draws.normal(options.tokens, options.hidden),
        draws.normal(options.hidden, mean=1.0, scale=0.1),
        draws.normal(options.tokens, options.hidden),
    )


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight.shape, weight, EPS)


def _statistics(x: Tensor) -> Tensor:
    """Returns 1 / rms, fp32 [T, 1]."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)


def _demand(setting: Setting, kind: str, num_ranks: int = 0) -> Demand:
    from engine.kernels.triton.rmsnorm import bytes_moved

    options = setting.options
    return Demand(moved=bytes_moved(options.tokens, options.hidden, setting.itemsize, num_ranks)[kind])


def _size(setting: Setting) -> str:
    return f"{setting.options.tokens}x{setting.options.hidden}"


def forward(setting: Setting) -> Case:
    x, weight, _ = _inputs(setting, "norm forward")

    def engine(kernels: Kernels, out: Tensor) -> Results:
        kernels.norm_forward(x, weight, EPS, out)
        return (out,)

    contestants = {
        name: Contestant(run=partial(engine, kernels, torch.empty_like(x)))
        for name, kernels in setting.backends.items()
    }
    if TORCH in setting.peers:
        contestants[TORCH] = Contestant(run=lambda: (_plain(x, weight),))
    if "compile" in setting.peers:
        compiled = setting.compiled(_plain)
        contestants["torch.compile"] = Contestant(run=lambda: (compiled(x, weight),))
    if "liger" in setting.peers:
        from liger_kernel.ops import LigerRMSNormFunction

        contestants["liger"] = Contestant(run=lambda: (LigerRMSNormFunction.apply(x, weight, EPS),))
    if "quack" in setting.peers:
        from quack import rmsnorm

        contestants["quack"] = Contestant(run=lambda: (rmsnorm(x, weight, eps=EPS),))
    return Case(
        size=_size(setting),
        demand=_demand(setting, "forward"),
        contestants=contestants,
        answer=lambda: (_plain(x.double(), weight.double()),),
    )


def _gradient(x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    """Returns dx by autograd, in float64."""
    wide = x.double().requires_grad_()
    return torch.autograd.grad(_plain(wide, weight.double()), wide, dy.double())[0]


def backward(setting: Setting) -> Case:
    x, weight, dy = _inputs(setting, "norm backward")
    rstd = _statistics(x)
    contestants = {
        name: Contestant(run=lambda kernels=kernels: (kernels.norm_backward(dy, x, weight, rstd, None, None),))
        for name, kernels in setting.backends.items()
    }
    if TORCH in setting.peers:
        leaf = x.clone().requires_grad_()
        y = _plain(leaf, weight)
        contestants[TORCH] = Contestant(run=lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True))
    if "compile" in setting.peers:
        compiled = setting.compiled(reference.rmsnorm_backward)
        contestants["torch.compile"] = Contestant(run=lambda: (compiled(dy, x, weight, rstd),))
    if "liger" in setting.peers:
        contestants["liger"] = _liger_backward(x, weight, dy)
    if "quack" in setting.peers:
        contestants["quack"] = _quack_backward(x, weight, dy)
    return Case(
        size=_size(setting),
        demand=_demand(setting, "backward"),
        contestants=contestants,
        answer=lambda: (_gradient(x, weight, dy),),
    )


def _liger_backward(x: Tensor, weight: Tensor, dy: Tensor) -> Contestant:
    """Runs Liger's backward, in place over dy, which is its default."""
    from liger_kernel.ops import LigerRMSNormFunction

    leaf, consumed = x.clone().requires_grad_(), dy.clone()
    y = LigerRMSNormFunction.apply(leaf, weight, EPS)
    return Contestant(
        run=lambda: torch.autograd.grad(y, leaf, consumed, retain_graph=True),
        reset=lambda: consumed.data.copy_(dy),
    )


def _quack_backward(x: Tensor, weight: Tensor, dy: Tensor) -> Contestant:
    from quack import rmsnorm

    leaf = x.clone().requires_grad_()
    y = rmsnorm(leaf, weight, eps=EPS)
    return Contestant(run=lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True))


def backward_with_update(setting: Setting, *, dropped: bool) -> Case:
    """Returns the case of a dy without the adapters' share, which is added on the way."""
    options = setting.options
    x, weight, dy = _inputs(setting, "norm update")
    draws = setting.draws("norm update, adapters")
    num_ranks = 3 * options.rank  # q, k, v
    dh = draws.normal(options.tokens, num_ranks, scale=0.1)
    a = draws.normal(num_ranks, options.hidden, scale=options.hidden**-0.5)
    rstd = _statistics(x)

    # H = drop(y) A^T, which the linear kept: with it a kernel can make the update on its way
    scaled = setting.scaled_mask(options.hidden).to(setting.dtype) if dropped else 1.0
    h = (_plain(x, weight) * scaled) @ a.t()

    def engine(kernels: Kernels, h_TR: Tensor | None) -> Contestant:
        update, consumed = setting.update(kernels, dh, a, dropped=dropped, h_TR=h_TR), dy.clone()
        return Contestant(
            run=lambda: (kernels.norm_backward(consumed, x, weight, rstd, update, None),),
            reset=lambda: consumed.copy_(dy),
        )

    def answer() -> Results:
        added = dh.double() @ a.double()
        added = added * setting.scaled_mask(options.hidden) if dropped else added
        return (_gradient(x, weight, dy.double() + added),)

    contestants = {name: engine(kernels, h) for name, kernels in setting.backends.items()}
    if setting.has_triton:
        contestants["triton, two kernels"] = replace(
            engine(setting.backends["triton"], None),
            note="triton, two kernels: the update is added before; in one kernel it is a prologue of the norm's "
            "backward, which takes H besides.",
        )
    return Case(
        size=f"{_size(setting)}, rank {num_ranks}",
        demand=_demand(setting, "backward", num_ranks),
        contestants=contestants,
        answer=answer,
    )


CASES = {
    "RMSNorm forward": forward,
    "RMSNorm backward": backward,
    "RMSNorm backward, rank-r update": partial(backward_with_update, dropped=False),
    "RMSNorm backward, rank-r update, dropout": partial(backward_with_update, dropped=True),
}
