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
from rankfold.benchmarking.case import Case, Contestant, Results, calling
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
    options = setting.options
    return Demand(moved=setting.moved("lora", options.tokens, options.hidden, SECTIONS * options.rank)[kind])


def _output_demand(setting: Setting, widths: Sequence[int], *, both: bool) -> Demand:
    options = setting.options
    return Demand(moved=setting.moved("output_gradients", options.tokens, widths, options.rank, both=both))


def _size(setting: Setting, width: int) -> str:
    return f"{setting.options.tokens}x{width}, rank {SECTIONS}x{setting.options.rank}"


def _wide_mask(setting: Setting, dropped: bool) -> Tensor | float:
    return setting.scaled_mask(setting.options.hidden) if dropped else 1.0


def _plain_mask(setting: Setting, dropped: bool) -> Tensor | None:
    """Returns the mask for plain torch: 0 or 1 / (1 - p), made beforehand, so that it pays for one multiplication
    only.
    """
    return setting.scaled_mask(setting.options.hidden).to(setting.dtype) if dropped else None


def _engine_mask(setting: Setting, kernels: Kernels, dropped: bool) -> tuple[Tensor | None, float]:
    """Returns the mask of a backend, and the scale of kept elements."""
    return (setting.drawn(kernels, setting.options.hidden), setting.keep_scale) if dropped else (None, 1.0)


def sections_of(
    widths: Sequence[int], rank: int, *, da: Sequence[Tensor] = (), b: Sequence[Tensor] = (), db: Sequence[Tensor] = ()
) -> list[AdapterSection]:
    """Returns adapters of one rank on neighbouring columns.

    Args:
        widths: columns of each.
        rank: of each.
        da, b, db: gradients of A, factors B and gradients of B of each; none where empty.
    """
    return [
        AdapterSection(
            first_column=sum(widths[:index]),
            num_columns=width,
            first_row=index * rank,
            num_ranks=rank,
            da=da[index] if da else None,
            b=b[index] if b else None,
            db=db[index] if db else None,
        )
        for index, width in enumerate(widths)
    ]


def project(setting: Setting, *, dropped: bool) -> Case:
    """Returns the case H = drop(x) A^T."""
    given = _inputs(setting, "project")
    whole = AdapterPlace(first_column=0, num_columns=0, first_row=0, num_ranks=given.a.shape[0])

    def engine(kernels: Kernels) -> Contestant:
        out, (mask, scale) = torch.empty_like(given.h), _engine_mask(setting, kernels, dropped)

        def run() -> Results:
            kernels.project(given.x, given.a, mask, scale, [whole], out)
            return (out,)

        return Contestant(run=run)

    def plain(x: Tensor, a: Tensor, mask: Tensor | None) -> Results:
        return ((x if mask is None else x * mask) @ a.t(),)

    return Case(
        size=_size(setting, given.x.shape[1]),
        demand=_demand(setting, "project"),
        contestants=setting.contestants(
            engine, **setting.plain(plain, given.x, given.a, _plain_mask(setting, dropped))
        ),
        answer=lambda: ((given.x.double() * _wide_mask(setting, dropped)) @ given.a.double().t(),),
    )


def a_gradient(setting: Setting, *, dropped: bool) -> Case:
    """Returns the case dA += dH^T drop(x), into fp32."""
    given, rank = _inputs(setting, "a gradient"), setting.options.rank

    def engine(kernels: Kernels) -> Contestant:
        buffers = [torch.zeros(rank, given.x.shape[1], device=setting.device) for _ in range(SECTIONS)]
        sections = sections_of([0] * SECTIONS, rank, da=buffers)
        mask, scale = _engine_mask(setting, kernels, dropped)

        def run() -> Results:
            kernels.a_gradient(given.dh, given.x, mask, scale, sections)
            return buffers

        return Contestant(run=run, reset=partial(clear, buffers))

    def plain(dh: Tensor, x: Tensor, mask: Tensor | None) -> Results:
        return (dh.t() @ (x if mask is None else x * mask)).split(rank)

    def answer() -> Results:
        return (given.dh.double().t() @ (given.x.double() * _wide_mask(setting, dropped))).split(rank)

    return Case(
        size=_size(setting, given.x.shape[1]),
        demand=_demand(setting, "a_gradient"),
        contestants=setting.contestants(
            engine, **setting.plain(plain, given.dh, given.x, _plain_mask(setting, dropped))
        ),
        answer=answer,
    )


def clear(buffers: list[Tensor]) -> None:
    """Sets gradients to zero."""
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
        sections = sections_of([options.intermediate] * SECTIONS, options.rank, db=buffers)

        def run() -> Results:
            kernels.b_gradient(given.dy, given.h, sections)
            return buffers

        return Contestant(run=run, reset=partial(clear, buffers))

    return Case(
        size=_size(setting, given.dy.shape[1]),
        demand=_output_demand(setting, [options.intermediate] * SECTIONS, both=False),
        contestants=setting.contestants(engine, **setting.plain(_by_section, given.dy, given.h)),
        answer=lambda: _by_section(given.dy.double(), given.h.double()),
    )


def _qkv(setting: Setting) -> list[int]:
    """Returns the columns of queries, keys and values."""
    shared = setting.options.kv_heads * setting.options.head_dim
    return [setting.options.heads * setting.options.head_dim, shared, shared]


def output_gradients(setting: Setting, *, widths: Callable[[Setting], Sequence[int]]) -> Case:
    """Returns the case dH = dY B and dB += dY^T H together: the products with dY of an adapter that is not folded,
    beside the base's own.

    The limit is one read of dY.
    """
    options, sizes = setting.options, widths(setting)
    draws, rank = setting.draws(f"output gradients {len(sizes)}"), options.rank
    dy, h = draws.normal(options.tokens, sum(sizes)), draws.normal(options.tokens, rank * len(sizes))
    parts = [draws.normal(size, rank, scale=0.02) for size in sizes]

    def plain(dy: Tensor, h: Tensor, *parts: Tensor) -> Results:
        columns, ranks = dy.split(sizes, dim=1), h.split(rank, dim=1)
        dh = torch.cat([part @ b for part, b in zip(columns, parts, strict=True)], dim=1)
        return dh, *(part.t() @ low for part, low in zip(columns, ranks, strict=True))

    return Case(
        size=f"{options.tokens}x{'+'.join(map(str, sizes))}, rank {rank}",
        demand=_output_demand(setting, sizes, both=True),
        contestants=setting.contestants(
            lambda kernels: _output_gradients_of(kernels, dy, h, parts), **setting.plain(plain, dy, h, *parts)
        ),
        answer=lambda: plain(dy.double(), h.double(), *(b.double() for b in parts)),
    )


def _output_gradients_of(kernels: Kernels, dy: Tensor, h: Tensor, parts: Sequence[Tensor]) -> Contestant:
    buffers = [torch.zeros(b.shape, device=b.device) for b in parts]
    sections = sections_of([b.shape[0] for b in parts], parts[0].shape[1], b=parts, db=buffers)
    dh = torch.empty_like(h)

    def run() -> Results:
        run_output_gradients(kernels, dy, h, sections, dh)
        return dh, *buffers

    return Contestant(run=run, reset=partial(clear, buffers))


def run_output_gradients(kernels: Kernels, dy: Tensor, h: Tensor, sections: list[AdapterSection], dh: Tensor) -> None:
    """Writes dH and adds dB. A backend without a kernel for both has two products, as in a step."""
    if kernels.output_gradients is not None:
        kernels.output_gradients(dy, h, sections, dh_out=dh)
        return
    for one in sections:
        torch.mm(one.columns(dy), one.b, out=one.ranks(dh))
    kernels.b_gradient(dy, h, sections)


def apply_update(setting: Setting, *, dropped: bool) -> Case:
    """Returns the case dX += drop'(dH A) in a separate pass, as under attention's output projection."""
    given = _inputs(setting, "update")
    dx = setting.draws("update, dx").normal(*given.x.shape)
    scaled = _plain_mask(setting, dropped)

    def engine(kernels: Kernels) -> Contestant:
        update, target = setting.update(kernels, given.dh, given.a, dropped=dropped), dx.clone()
        return calling(kernels.apply_update, target, update, reset=lambda: target.copy_(dx))

    def plain(target: Tensor) -> Tensor:
        if scaled is None:
            return target.addmm_(given.dh, given.a)
        return target.addcmul_(given.dh @ given.a, scaled)

    def peer() -> Contestant:
        target = dx.clone()
        return calling(plain, target, reset=lambda: target.copy_(dx))

    return Case(
        size=_size(setting, given.x.shape[1]),
        demand=_demand(setting, "add_input_gradient"),
        contestants=setting.contestants(engine, torch=peer),
        answer=lambda: (dx.double() + setting.added(given.dh, given.a, dropped=dropped),),
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
