"""Cases of SwiGLU: forward, backward, and backward where its output feeds an adapter.

Legend: T tokens, F features, R rank.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kernels import reference
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import Case, Contestant, Results, by_autograd, calling, deviation
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting
from rankfold.benchmarking.oracles import swiglu, with_gradients


def _demand(setting: Setting, kind: str, num_ranks: int = 0) -> Demand:
    options = setting.options
    return Demand(moved=setting.moved("swiglu", options.tokens, options.intermediate, num_ranks=num_ranks)[kind])


def _size(setting: Setting) -> str:
    return f"{setting.options.tokens}x{setting.options.intermediate}"


def _inputs(setting: Setting, name: str) -> tuple[Tensor, Tensor]:
    """Returns [gate | up] [T, 2F], dy [T, F]."""
    draws, options = setting.draws(name), setting.options
    return (
        draws.normal(options.tokens, 2 * options.intermediate),
        draws.normal(options.tokens, options.intermediate),
    )


def forward(setting: Setting) -> Case:
    gate_up, dy = _inputs(setting, "swiglu forward")

    def engine(kernels: Kernels) -> Contestant:
        out = torch.empty_like(dy)

        def run() -> Results:
            kernels.swiglu_forward(gate_up, out)
            return (out,)

        return Contestant(run=run)

    def liger() -> Contestant:
        from liger_kernel.ops import LigerSiLUMulFunction

        return calling(
            LigerSiLUMulFunction.apply,
            *(half.contiguous() for half in gate_up.chunk(2, dim=-1)),
            note="liger's SwiGLU takes gate and up as two tensors, as transformers' MLP makes them.",
        )

    return Case(
        size=_size(setting),
        demand=_demand(setting, "forward"),
        contestants=setting.contestants(engine, **setting.plain(swiglu, gate_up), liger=liger),
        answer=lambda: (swiglu(gate_up.double()),),
    )


def _gradient(gate_up: Tensor, dy: Tensor) -> Results:
    """Returns [dgate | dup] by autograd, in float64."""
    return with_gradients(swiglu, (gate_up,), (dy,))[1:]


def backward(setting: Setting) -> Case:
    gate_up, dy = _inputs(setting, "swiglu backward")
    return Case(
        size=_size(setting),
        demand=_demand(setting, "backward"),
        contestants=setting.contestants(
            lambda kernels: calling(kernels.swiglu_backward, dy, gate_up, None),
            torch=lambda: by_autograd(swiglu, gate_up, dy),
            compile=lambda: setting.compiled(reference.swiglu_backward, dy, gate_up),
            liger=lambda: _liger_backward(gate_up, dy),
        ),
        answer=lambda: _gradient(gate_up, dy),
    )


def _liger_backward(gate_up: Tensor, dy: Tensor) -> Contestant:
    """Runs Liger's backward, which is always in place over gate and up."""
    from liger_kernel.ops import LigerSiLUMulFunction

    gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=-1))
    leaves = [half.clone().requires_grad_() for half in (gate, up)]
    y = LigerSiLUMulFunction.apply(*leaves)

    def reset() -> None:
        # bypasses the version counter, as the kernel itself does
        leaves[0].data.copy_(gate)
        leaves[1].data.copy_(up)

    wide = gate_up.double()
    return Contestant(
        run=lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True),
        reset=reset,
        error=lambda found: deviation(found, _gradient(wide, dy)[0].chunk(2, dim=1)),
    )


def backward_with_update(setting: Setting, *, dropped: bool) -> Case:
    """Returns the case of a dy without the adapter's share, which is added on the way."""
    options = setting.options
    gate_up, dy = _inputs(setting, "swiglu update")
    dh, a = setting.adapter("swiglu update, adapter", options.rank, options.intermediate)

    def engine(kernels: Kernels) -> Contestant:
        update, consumed = setting.update(kernels, dh, a, dropped=dropped), dy.clone()
        return calling(kernels.swiglu_backward, consumed, gate_up, update, reset=lambda: consumed.copy_(dy))

    return Case(
        size=f"{_size(setting)}, rank {options.rank}",
        demand=_demand(setting, "backward", options.rank),
        contestants=setting.contestants(engine),
        answer=lambda: _gradient(gate_up, dy.double() + setting.added(dh, a, dropped=dropped)),
    )


CASES = {
    "SwiGLU forward": forward,
    "SwiGLU backward": backward,
    "SwiGLU backward, rank-r update": partial(backward_with_update, dropped=False),
    "SwiGLU backward, rank-r update, dropout": partial(backward_with_update, dropped=True),
}
