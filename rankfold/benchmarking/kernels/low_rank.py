"""Cases of the skinny products of adapters: H, dA, dB, and the update of the gradient of their input.

The adapters are those of the MLP's first linear: gate and up, on one input.

Legend: T tokens, I input features, O output features of both, R rows of the stacked A, r of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.records import AdapterPlace, AdapterSection
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import TORCH, Case, Contestant, Results
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting

SECTIONS = 2
"""Gate and up."""


class _Inputs(NamedTuple):
    """The operands: x [T, I], a [R, I], h and dh [T, R], dy [T, O], b [O, r]."""

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
    from engine.kernels.triton.lora import bytes_moved

    options = setting.options
    num_ranks = SECTIONS * options.rank
    return Demand(moved=bytes_moved(options.tokens, options.hidden, num_ranks, setting.itemsize)[kind])


def _output_demand(setting: Setting, widths: Sequence[int], *, both: bool) -> Demand:
    from engine.kernels.triton.output_gradients import bytes_moved

    options = setting.options
    return Demand(moved=bytes_moved(options.tokens, widths, options.rank, setting.itemsize, both=both))


def _size(setting: Setting, width: int) -> str:
    return f"{setting.options.tokens}x{width}, rank {SECTIONS}x{setting.options.rank}"


def _wide_mask(setting: Setting, dropped: bool) -> Tensor | float:
    return setting.scaled_mask(setting.options.hidden) if dropped else 1.0


def _plain_mask(setting: Setting, dropped: bool) -> Tensor | None:
    """Returns the mask for plain torch: 0 or 1 / (1 - p), made beforehand, so that it pays for one multiplication
    only.
    """
    return setting.scaled_mask(setting.options.hidden).to(setting.dtype) if dropped else None


def _with_torch(
    setting: Setting, contestants: dict[str, Contestant], plain: Callable[..., Results], *arguments: Tensor | None
) -> dict[str, Contestant]:
    """Returns plain torch and torch.compile of the same function as contestants."""
    if TORCH in setting.peers:
        contestants[TORCH] = Contestant(run=lambda: plain(*arguments))
    if "compile" in setting.peers:
        compiled = setting.compiled(plain)
        contestants["torch.compile"] = Contestant(run=lambda: compiled(*arguments))
    return contestants


def project(setting: Setting, *, dropped: bool) -> Case:
    """Returns the case H = drop(x) A^T."""
    given = _inputs(setting, "project")
    whole = AdapterPlace(first_column=0, num_columns=0, first_row=0, num_ranks=given.a.shape[0])

    def engine(kernels: Kernels) -> Contestant:
        out, mask = torch.empty_like(given.h), setting.drawn(kernels, given.x.shape[1]) if dropped else None
        scale = setting.keep_scale if dropped else 1.0

        def run() -> Results:
            kernels.project(given.x, given.a, mask, scale, [whole], out)
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
    """Returns the case dA += dH^T drop(x), into fp32."""
    given, rank = _inputs(setting, "a gradient"), setting.options.rank

    def engine(kernels: Kernels) -> Contestant:
        buffers = [torch.zeros(rank, given.x.shape[1], device=setting.device) for _ in range(SECTIONS)]
        sections = [
            AdapterSection(first_column=0, num_columns=0, first_row=index * rank, num_ranks=rank, da=buffer)
            for index, buffer in enumerate(buffers)
        ]
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
    """Returns dB of each section."""
    pairs = zip(dy.chunk(SECTIONS, dim=1), h.chunk(SECTIONS, dim=1), strict=True)
    return [part.t() @ low for part, low in pairs]


def b_gradient(setting: Setting) -> Case:
    """Returns the case dB += dY^T H, into fp32; the limit is one read of dY."""
    given, options = _inputs(setting, "b gradient"), setting.options

    def engine(kernels: Kernels) -> Contestant:
        buffers = [torch.zeros(options.intermediate, options.rank, device=setting.device) for _ in range(SECTIONS)]
        sections = [
            AdapterSection(
                first_column=index * options.intermediate,
                num_columns=options.intermediate,
                first_row=index * options.rank,
                num_ranks=options.rank,
                db=buffer,
            )
            for index, buffer in enumerate(buffers)
        ]

        def run() -> Results:
            kernels.b_gradient(given.dy, given.h, sections)
            return buffers

        return Contestant(run=run, reset=partial(_clear, buffers))

    contestants = {name: engine(kernels) for name, kernels in setting.backends.items()}
    return Case(
        size=_size(setting, given.dy.shape[1]),
        demand=_output_demand(setting, [options.intermediate] * SECTIONS, both=False),
        contestants=_with_torch(setting, contestants, _by_section, given.dy, given.h),
        answer=lambda: _by_section(given.dy.double(), given.h.double()),
    )


def _qkv(setting: Setting) -> list[int]:
    """Returns the columns of queries, keys and values."""
    shared = setting.options.kv_heads * setting.options.head_dim
    return [setting.options.heads * setting.options.head_dim, shared, shared]


def output_gradients(setting: Setting, *, widths: Callable[[Setting], Sequence[int]]) -> Case:
    """Returns the case dH = dY B and dB += dY^T H together: the products with dY of an adapter that is not folded,
    beside the base's own.

    The limit is one read of dY. A backend without a kernel for both has two products, as in a step.
    """
    options, sizes = setting.options, widths(setting)
    draws, rank = setting.draws(f"output gradients {len(sizes)}"), options.rank
    dy, h = draws.normal(options.tokens, sum(sizes)), draws.normal(options.tokens, rank * len(sizes))
    parts = [draws.normal(size, rank, scale=0.02) for size in sizes]

    def plain(dy: Tensor, h: Tensor, *parts: Tensor) -> Results:
        columns, ranks = dy.split(sizes, dim=1), h.split(rank, dim=1)
        dh = torch.cat([part @ b for part, b in zip(columns, parts, strict=True)], dim=1)
        return dh, *(part.t() @ low for part, low in zip(columns, ranks, strict=True))

    contestants = {name: _output_gradients_of(kernels, dy, h, parts) for name, kernels in setting.backends.items()}
    return Case(
        size=f"{options.tokens}x{'+'.join(map(str, sizes))}, rank {rank}",
        demand=_output_demand(setting, sizes, both=True),
        contestants=_with_torch(setting, contestants, plain, dy, h, *parts),
        answer=lambda: plain(dy.double(), h.double(), *(b.double() for b in parts)),
    )


def _output_gradients_of(kernels: Kernels, dy: Tensor, h: Tensor, parts: Sequence[Tensor]) -> Contestant:
    rank = parts[0].shape[1]
    buffers = [torch.zeros(b.shape, device=b.device) for b in parts]
    sections, column = [], 0
    for number, (b, buffer) in enumerate(zip(parts, buffers, strict=True)):
        sections.append(
            AdapterSection(
                first_column=column,
                num_columns=b.shape[0],
                first_row=number * rank,
                num_ranks=rank,
                b=b,
                db=buffer,
            )
        )
        column += b.shape[0]
    dh = torch.empty_like(h)

    def run() -> Results:
        if kernels.output_gradients is not None:
            kernels.output_gradients(dy, h, sections, dh_out=dh)
            return dh, *buffers
        for one, b in zip(sections, parts, strict=True):
            torch.mm(one.columns(dy), b, out=one.ranks(dh))
        kernels.b_gradient(dy, h, sections)
        return dh, *buffers

    return Contestant(run=run, reset=partial(_clear, buffers))


def apply_update(setting: Setting, *, dropped: bool) -> Case:
    """Returns the case dX += drop'(dH A) in a separate pass, as under attention's output projection."""
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
    "LoRA dH and dB": partial(output_gradients, widths=lambda setting: [setting.options.intermediate] * SECTIONS),
    "LoRA dH and dB of q, k, v": partial(output_gradients, widths=_qkv),
    "LoRA update of dX": partial(apply_update, dropped=False),
    "LoRA update of dX, dropout": partial(apply_update, dropped=True),
}
