"""The skinny products of adapters: H, dA, dB, and what they add to the gradient of their input.

As the MLP's first linear has them: two adapters, gate and up, on one input.

Legend: T tokens, I input features, O output features of both, R rows of the stacked A, r of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops.kernels import Kernels

from ..case import TORCH, Case, Contestant, Results
from ..ceilings import Demand
from .setting import Setting

SECTIONS = 2
"""Gate and up."""


class _Inputs(NamedTuple):
    """x [T, I], a [R, I], h and dh [T, R], dy [T, O], b [O, r]."""

    x: Tensor
    a: Tensor
    h: Tensor
    dh: Tensor
    dy: Tensor
    b: Tensor


def _inputs(setting: Setting, name: str) -> _Inputs:
    options, draws = setting.options, setting.draws(name)
    num_ranks, outputs = SECTIONS * options.rank, SECTIONS * options.intermediate
    return _Inputs(
        x=draws.normal(options.tokens, options.hidden),
        a=draws.normal(num_ranks, options.hidden, scale=options.hidden**-0.5),
        h=draws.normal(options.tokens, num_ranks),
        dh=draws.normal(options.tokens, num_ranks),
        dy=draws.normal(options.tokens, outputs),
        b=draws.normal(outputs, options.rank, scale=0.02),
    )


def _demand(setting: Setting, kind: str) -> Demand:
    from triton_kernels.lora import bytes_moved

    options = setting.options
    sizes = (options.tokens, options.hidden, options.intermediate)
    if kind == "output_gradients":  # each section has its own columns of dY and of H
        return Demand(moved=SECTIONS * bytes_moved(*sizes, options.rank, setting.itemsize)[kind])
    return Demand(moved=bytes_moved(*sizes, SECTIONS * options.rank, setting.itemsize)[kind])


def _size(setting: Setting, width: int) -> str:
    return f"{setting.options.tokens}x{width}, rank {SECTIONS}x{setting.options.rank}"


def _wide_mask(setting: Setting, dropped: bool) -> Tensor | float:
    return setting.scaled_mask(setting.options.hidden) if dropped else 1.0


def _plain_mask(setting: Setting, dropped: bool) -> Tensor | None:
    """For plain torch: 0 or 1 / (1 - p), made beforehand, so that it pays for one multiplication only."""
    return setting.scaled_mask(setting.options.hidden).to(setting.dtype) if dropped else None


def _with_torch(
    setting: Setting, contestants: dict[str, Contestant], plain: Callable[..., Results], *arguments: Tensor | None
) -> dict[str, Contestant]:
    """Plain torch and torch.compile of the same function."""
    if TORCH in setting.peers:
        contestants[TORCH] = Contestant(run=lambda: plain(*arguments))
    if "compile" in setting.peers:
        compiled = setting.compiled(plain)
        contestants["torch.compile"] = Contestant(run=lambda: compiled(*arguments))
    return contestants


def project(setting: Setting, *, dropped: bool) -> Case:
    """H = drop(x) A^T."""
    given = _inputs(setting, "project")

    def engine(kernels: Kernels) -> Contestant:
        out, mask = torch.empty_like(given.h), setting.drawn(kernels, given.x.shape[1]) if dropped else None
        scale = setting.keep_scale if dropped else 1.0

        def run() -> Results:
            kernels.project(given.x, given.a, mask, scale, out)
            return (out,)

        return Contestant(run=run)

    def plain(x: Tensor, a: Tensor, mask: Tensor | None) -> Results:
        return ((x if mask is None else x * mask) @ a.t(),)

    contestants = {name: engine(kernels) for name, kernels in setting.backends.items()}
    return Case(
        size=_size(setting, given.x.shape[1]),
        demand=_demand(setting, "project"),
        contestants=_with_torch(setting, contestants, plain, given.x, given.a, _plain_mask(setting, dropped)),
        answer=lambda: ((given.x.double() * _wide_mask(setting, dropped)) @ given.a.double().t(),),
    )


def a_gradient(setting: Setting, *, dropped: bool) -> Case:
    """dA += dH^T drop(x), into fp32."""
    given, rank = _inputs(setting, "a gradient"), setting.options.rank

    def engine(kernels: Kernels) -> Contestant:
        buffers = [torch.zeros(rank, given.x.shape[1], device=setting.device) for _ in range(SECTIONS)]
        sections = [(index * rank, buffer) for index, buffer in enumerate(buffers)]
        mask, scale = setting.drawn(kernels, given.x.shape[1]) if dropped else None, setting.keep_scale
        scale = scale if dropped else 1.0

        def run() -> Results:
            kernels.a_gradient(given.dh, given.x, mask, scale, sections)
            return buffers

        return Contestant(run=run, reset=partial(_clear, buffers))

    def plain(dh: Tensor, x: Tensor, mask: Tensor | None) -> Results:
        return (dh.t() @ (x if mask is None else x * mask)).split(rank)

    def answer() -> Results:
        return (given.dh.double().t() @ (given.x.double() * _wide_mask(setting, dropped))).split(rank)

    contestants = {name: engine(kernels) for name, kernels in setting.backends.items()}
    return Case(
        size=_size(setting, given.x.shape[1]),
        demand=_demand(setting, "a_gradient"),
        contestants=_with_torch(setting, contestants, plain, given.dh, given.x, _plain_mask(setting, dropped)),
        answer=answer,
    )


def _clear(buffers: list[Tensor]) -> None:
    for buffer in buffers:
        buffer.zero_()


def _by_section(dy: Tensor, h: Tensor) -> Results:
    """dB of each section."""
    pairs = zip(dy.chunk(SECTIONS, dim=1), h.chunk(SECTIONS, dim=1), strict=True)
    return [part.t() @ low for part, low in pairs]


def b_gradient(setting: Setting) -> Case:
    """dB += dY^T H, into fp32; the limit is one read of dY."""
    given, options = _inputs(setting, "b gradient"), setting.options

    def engine(kernels: Kernels) -> Contestant:
        buffers = [torch.zeros(options.intermediate, options.rank, device=setting.device) for _ in range(SECTIONS)]
        sections = [
            (index * options.intermediate, index * options.rank, buffer) for index, buffer in enumerate(buffers)
        ]

        def run() -> Results:
            kernels.b_gradient(given.dy, given.h, sections)
            return buffers

        return Contestant(run=run, reset=partial(_clear, buffers))

    contestants = {name: engine(kernels) for name, kernels in setting.backends.items()}
    return Case(
        size=_size(setting, given.dy.shape[1]),
        demand=_demand(setting, "output_gradients"),
        contestants=_with_torch(setting, contestants, _by_section, given.dy, given.h),
        answer=lambda: _by_section(given.dy.double(), given.h.double()),
    )


def output_gradients(setting: Setting) -> Case:
    """dH = dY B and dB = dY^T H together; what an unfolded adapter computes of dY beside the base's product."""
    given, options = _inputs(setting, "output gradients"), setting.options

    def plain(dy: Tensor, h: Tensor, b: Tensor) -> Results:
        halves = zip(dy.chunk(SECTIONS, dim=1), b.chunk(SECTIONS), strict=True)
        return torch.cat([part @ each for part, each in halves], dim=1), *_by_section(dy, h)

    contestants: dict[str, Contestant] = {}
    if setting.has_triton:
        contestants["triton, one read"] = _triton_output_gradients(setting, given)
    return Case(
        size=f"{options.tokens}x{given.dy.shape[1]}, rank {SECTIONS}x{options.rank}",
        demand=_demand(setting, "output_gradients"),
        contestants=_with_torch(setting, contestants, plain, given.dy, given.h, given.b),
        answer=lambda: plain(given.dy.double(), given.h.double(), given.b.double()),
    )


def _triton_output_gradients(setting: Setting, given: _Inputs) -> Contestant:
    from triton_kernels.lora import output_gradients as launch

    options = setting.options
    dh = torch.empty_like(given.dh)
    buffers = [torch.zeros(options.intermediate, options.rank, device=setting.device) for _ in range(SECTIONS)]

    def run() -> Results:
        for index, buffer in enumerate(buffers):
            columns = slice(index * options.intermediate, (index + 1) * options.intermediate)
            ranks = slice(index * options.rank, (index + 1) * options.rank)
            launch(given.dy[:, columns], given.h[:, ranks], given.b[columns], 1.0, dh_out=dh[:, ranks], db_out=buffer)
        return dh, *buffers

    return Contestant(run=run)


def apply_update(setting: Setting, *, dropped: bool) -> Case:
    """dX += drop'(dH A) in a pass of its own, as under attention's output projection."""
    given = _inputs(setting, "update")
    dx = setting.draws("update, dx").normal(*given.x.shape)
    scaled = _plain_mask(setting, dropped)

    def engine(kernels: Kernels) -> Contestant:
        update, target = setting.update(kernels, given.dh, given.a, dropped=dropped), dx.clone()
        return Contestant(run=lambda: (kernels.apply_update(target, update),), reset=lambda: target.copy_(dx))

    def plain(target: Tensor) -> Results:
        if scaled is None:
            return (target.addmm_(given.dh, given.a),)
        return (target.addcmul_(given.dh @ given.a, scaled),)

    contestants = {name: engine(kernels) for name, kernels in setting.backends.items()}
    if TORCH in setting.peers:
        target = dx.clone()
        contestants[TORCH] = Contestant(run=lambda: plain(target), reset=lambda: target.copy_(dx))
    return Case(
        size=_size(setting, given.x.shape[1]),
        demand=_demand(setting, "add_input_gradient"),
        contestants=contestants,
        answer=lambda: (dx.double() + (given.dh.double() @ given.a.double()) * _wide_mask(setting, dropped),),
    )


CASES = {
    "LoRA H": partial(project, dropped=False),
    "LoRA H, dropout": partial(project, dropped=True),
    "LoRA dA": partial(a_gradient, dropped=False),
    "LoRA dA, dropout": partial(a_gradient, dropped=True),
    "LoRA dB": b_gradient,
    "LoRA dH and dB": output_gradients,
    "LoRA update of dX": partial(apply_update, dropped=False),
    "LoRA update of dX, dropout": partial(apply_update, dropped=True),
}
