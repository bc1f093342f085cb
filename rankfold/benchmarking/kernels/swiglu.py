"""Cases of SwiGLU: forward, backward, and backward where its output feeds an adapter.

Legend: T tokens, F features, R rank.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.kernels import reference
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import TORCH, Case, Contestant, Results, deviation
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting


def _plain(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def _demand(setting: Setting, kind: str, num_ranks: int = 0) -> Demand:
    from engine.kernels.triton.swiglu import bytes_moved

    options = setting.options
    return Demand(moved=bytes_moved(options.tokens, options.intermediate, setting.itemsize, num_ranks)[kind])


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

    def engine(kernels: Kernels, out: Tensor) -> Results:
        kernels.swiglu_forward(gate_up, out)
        return (out,)

    contestants = {
        name: Contestant(run=partial(engine, kernels, torch.empty_like(dy)))
        for name, kernels in setting.backends.items()
    }
    if TORCH in setting.peers:
        contestants[TORCH] = Contestant(run=lambda: (_plain(gate_up),))
    if "compile" in setting.peers:
        compiled = setting.compiled(_plain)
        contestants["torch.compile"] = Contestant(run=lambda: (compiled(gate_up),))
    if "liger" in setting.peers:
        from liger_kernel.ops import LigerSiLUMulFunction

        gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=-1))
        contestants["liger"] = Contestant(
            run=lambda: (LigerSiLUMulFunction.apply(gate, up),),
            note="liger's SwiGLU takes gate and up as two tensors, as transformers' MLP makes them.",
        )
    return Case(
        size=_size(setting),
        demand=_demand(setting, "forward"),
        contestants=contestants,
        answer=lambda: (_plain(gate_up.double()),),
    )


def _gradient(gate_up: Tensor, dy: Tensor) -> Tensor:
    """Returns [dgate | dup] by autograd, in float64."""
    wide = gate_up.double().requires_grad_()
    return torch.autograd.grad(_plain(wide), wide, dy.double())[0]


def backward(setting: Setting) -> Case:
    gate_up, dy = _inputs(setting, "swiglu backward")
    contestants = {
        name: Contestant(run=lambda kernels=kernels: (kernels.swiglu_backward(dy, gate_up, None),))
        for name, kernels in setting.backends.items()
    }
    if TORCH in setting.peers:
        leaf = gate_up.clone().requires_grad_()
        y = _plain(leaf)
        contestants[TORCH] = Contestant(run=lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True))
    if "compile" in setting.peers:
        compiled = setting.compiled(reference.swiglu_backward)
        contestants["torch.compile"] = Contestant(run=lambda: (compiled(dy, gate_up),))
    if "liger" in setting.peers:
        contestants["liger"] = _liger_backward(gate_up, dy)
    return Case(
        size=_size(setting),
        demand=_demand(setting, "backward"),
        contestants=contestants,
        answer=lambda: (_gradient(gate_up, dy),),
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

    halves = gate_up.shape[1] // 2
    wide = gate_up.double()

    def error(results: Results) -> float:
        expected = _gradient(wide, dy)
        return deviation(results, (expected[:, :halves], expected[:, halves:]))

    return Contestant(run=lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), reset=reset, error=error)


def backward_with_update(setting: Setting, *, dropped: bool) -> Case:
    """Returns the case of a dy without the adapter's share, which is added on the way."""
    options = setting.options
    gate_up, dy = _inputs(setting, "swiglu update")
    draws = setting.draws("swiglu update, adapter")
    dh = draws.normal(options.tokens, options.rank, scale=0.1)
    a = draws.normal(options.rank, options.intermediate, scale=options.intermediate**-0.5)

    def engine(kernels: Kernels) -> Contestant:
        update, consumed = setting.update(kernels, dh, a, dropped=dropped), dy.clone()
        return Contestant(
            run=lambda: (kernels.swiglu_backward(consumed, gate_up, update),),
            reset=lambda: consumed.copy_(dy),
        )

    def answer() -> Results:
        added = dh.double() @ a.double()
        added = added * setting.scaled_mask(options.intermediate) if dropped else added
        return (_gradient(gate_up, dy.double() + added),)

    return Case(
        size=f"{_size(setting)}, rank {options.rank}",
        demand=_demand(setting, "backward", options.rank),
        contestants={name: engine(kernels) for name, kernels in setting.backends.items()},
        answer=answer,
    )


CASES = {
    "SwiGLU forward": forward,
    "SwiGLU backward": backward,
    "SwiGLU backward, rank-r update": partial(backward_with_update, dropped=False),
    "SwiGLU backward, rank-r update, dropout": partial(backward_with_update, dropped=True),
}
