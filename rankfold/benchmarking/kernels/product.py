"""Cases of a frozen linear with adapters: one product of extended operands, or several. Their table decides which is
used.

    fold        [x | H] [W | B]^T;       dY [W | B] = [dX | dH], then dX += dH A
    separate    x W^T, then += H B^T;    dY B = dH, dY W, then += dH A

H is beside x already, where the op that makes x writes it there; where x comes from elsewhere (attention's output)
the fold has to copy it, which is a contestant of its own. The scale of the adapters is applied to H and dH and omitted
here.

Whether to fold in backward alone is decided by its total time, dB included: the fold has dH from its product and reads
dY again for dB, while otherwise one read of dY gives both. The fold's dX lies in rows that are wider than dX; where
attention reads it, it is copied, again a contestant of its own. `engine.ops.kernels.product` has the rule that follows.

Legend: T tokens, I input features, O output features of all sections, R rows of the stacked A, r of each section.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import Case, Contestant, Results, deviation
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.low_rank import clear, run_output_gradients, sections_of
from rankfold.benchmarking.kernels.setting import Setting

FOLD, COPIED, SEPARATE, FROZEN = "fold", "fold, x copied", "separate", "frozen alone"
DENSE = "fold, dX copied"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Linear:
    """Operands of one linear with adapters on all its sections.

    Args:
        extended: [O, I + E], W and the block-diagonal B beside it, padded.
        inputs: I.
        a: [R, I].
        spans: first and last output column of each section.
        rank: r.
    """

    extended: Tensor
    inputs: int
    a: Tensor
    spans: tuple[tuple[int, int], ...]
    rank: int

    @property
    def weight(self) -> Tensor:
        return self.extended[:, : self.inputs]

    @property
    def num_ranks(self) -> int:
        return self.rank * len(self.spans)

    def sections(self) -> list[tuple[slice, slice, Tensor]]:
        """Returns output columns, columns of H and B [o, r] of each section."""
        found = []
        for index, (start, stop) in enumerate(self.spans):
            ranks = slice(index * self.rank, (index + 1) * self.rank)
            b = self.extended[start:stop, self.inputs + ranks.start : self.inputs + ranks.stop]
            found.append((slice(start, stop), ranks, b))
        return found


def widths_of(setting: Setting) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Returns name -> input width and output widths of the four linears of a block."""
    options = setting.options
    kv = options.kv_heads * options.head_dim
    return {
        "qkv": (options.hidden, (options.hidden, kv, kv)),
        "o": (options.hidden, (options.hidden,)),
        "gate and up": (options.hidden, (options.intermediate, options.intermediate)),
        "down": (options.intermediate, (options.hidden,)),
    }


def _linear(setting: Setting, name: str) -> _Linear:
    inputs, widths = widths_of(setting)[name]
    draws, rank = setting.draws(f"product {name}"), setting.options.rank
    num_ranks = rank * len(widths)
    multiple = max(kernels.fold_multiple for kernels in setting.backends.values())
    extended = setting.empty(sum(widths), inputs + -(-num_ranks // multiple) * multiple).zero_()
    extended[:, :inputs] = draws.normal(sum(widths), inputs, scale=inputs**-0.5)
    starts = [sum(widths[:index]) for index in range(len(widths))]
    linear = _Linear(
        extended=extended,
        inputs=inputs,
        a=draws.normal(num_ranks, inputs, scale=inputs**-0.5),
        spans=tuple((start, start + width) for start, width in zip(starts, widths, strict=True)),
        rank=rank,
    )
    for _, _, b in linear.sections():
        b.copy_(draws.normal(*b.shape, scale=0.1))
    return linear


def _size(setting: Setting, linear: _Linear) -> str:
    rank = f"{len(linear.spans)}x{linear.rank}"
    return f"{setting.options.tokens}x{linear.inputs}x{linear.extended.shape[0]}, rank {rank}"


def _demand(setting: Setting, linear: _Linear) -> Demand:
    """Returns the demand of the base's product and the low-rank one, without the zeros beside B."""
    tokens, outputs = setting.options.tokens, linear.extended.shape[0]
    both = linear.num_ranks + linear.inputs
    moved = tokens * (both + outputs) + outputs * (linear.inputs + linear.rank)
    return Demand(moved=moved * setting.itemsize, operations=2 * tokens * outputs * (linear.inputs + linear.rank))


def _frozen(left: Tensor, right: Tensor, out: Tensor) -> Contestant:
    """Returns the base's product alone as a contestant."""
    return Contestant(
        run=lambda: (torch.mm(left, right, out=out),),
        error=lambda found: deviation(found, (left.double() @ right.double(),)),
    )


def forward(setting: Setting, *, name: str) -> Case:
    """Returns the case Y from x and H."""
    linear, draws = _linear(setting, name), setting.draws(f"product {name}, x")
    tokens, outputs = setting.options.tokens, linear.extended.shape[0]
    buffer = setting.empty(tokens, linear.extended.shape[1]).zero_()
    x, h = draws.normal(tokens, linear.inputs), draws.normal(tokens, linear.num_ranks)
    buffer[:, : linear.inputs], buffer[:, linear.inputs : linear.inputs + linear.num_ranks] = x, h
    y = setting.empty(tokens, outputs)

    def fold() -> Results:
        return (torch.mm(buffer, linear.extended.t(), out=y),)

    def copied() -> Results:
        buffer[:, : linear.inputs] = x
        return fold()

    def separate() -> Results:
        torch.mm(x, linear.weight.t(), out=y)
        for columns, ranks, b in linear.sections():
            y[:, columns].addmm_(h[:, ranks], b.t())
        return (y,)

    def answer() -> Results:
        wide = x.double() @ linear.weight.double().t()
        for columns, ranks, b in linear.sections():
            wide[:, columns] += h[:, ranks].double() @ b.double().t()
        return (wide,)

    contestants = {
        FOLD: Contestant(run=fold),
        COPIED: Contestant(run=copied),
        SEPARATE: Contestant(run=separate),
        FROZEN: _frozen(x, linear.weight.t(), y),
    }
    return Case(
        size=_size(setting, linear),
        demand=_demand(setting, linear),
        contestants=contestants,
        answer=answer,
        baseline=FROZEN,
        verdicts={"where x is made beside H": (FOLD, SEPARATE), "where x is given": (COPIED, SEPARATE)},
    )


def backward(setting: Setting, *, name: str) -> Case:
    """Returns the case dH and the whole dX from dY."""
    linear, draws = _linear(setting, name), setting.draws(f"product {name}, dy")
    tokens, outputs = setting.options.tokens, linear.extended.shape[0]
    dy = draws.normal(tokens, outputs)
    both = setting.empty(tokens, linear.extended.shape[1])
    dx, dh = setting.empty(tokens, linear.inputs), setting.empty(tokens, linear.num_ranks)

    def fold() -> Results:
        torch.mm(dy, linear.extended, out=both)
        low = both[:, linear.inputs : linear.inputs + linear.num_ranks]
        return both[:, : linear.inputs].addmm_(low, linear.a), low

    def separate() -> Results:
        for columns, ranks, b in linear.sections():
            torch.mm(dy[:, columns], b, out=dh[:, ranks])
        return torch.mm(dy, linear.weight, out=dx).addmm_(dh, linear.a), dh

    contestants = {
        FOLD: Contestant(run=fold),
        SEPARATE: Contestant(run=separate),
        FROZEN: _frozen(dy, linear.weight, dx),
    }
    return Case(
        size=_size(setting, linear),
        demand=_demand(setting, linear),
        contestants=contestants,
        answer=lambda: _input_gradient(linear, dy),
        baseline=FROZEN,
        verdicts={"": (FOLD, SEPARATE)},
    )


def _input_gradient(linear: _Linear, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the whole dX and dH in float64."""
    low = torch.cat([dy[:, columns].double() @ b.double() for columns, _, b in linear.sections()], dim=1)
    return dy.double() @ linear.weight.double() + low @ linear.a.double(), low


def whole_backward(setting: Setting, *, name: str) -> Case:
    """Returns the case dH, the whole dX and dB += dY^T H from dY, by each backend's kernels."""
    linear, draws = _linear(setting, name), setting.draws(f"product {name}, dy")
    tokens, outputs = setting.options.tokens, linear.extended.shape[0]
    dy, h = draws.normal(tokens, outputs), draws.normal(tokens, linear.num_ranks)
    both = setting.empty(tokens, linear.extended.shape[1])
    dx, dh = setting.empty(tokens, linear.inputs), setting.empty(tokens, linear.num_ranks)
    db = [setting.empty(*b.shape, dtype=torch.float32) for _, _, b in linear.sections()]
    widths = widths_of(setting)[name][1]
    sections = sections_of(widths, linear.rank, b=[b for _, _, b in linear.sections()], db=db)

    def fold(kernels: Kernels, *, copied: bool) -> Results:
        torch.mm(dy, linear.extended, out=both)
        low = both[:, linear.inputs : linear.inputs + linear.num_ranks]
        kernels.b_gradient(dy, h, sections)
        whole = both[:, : linear.inputs].addmm_(low, linear.a)
        return whole.contiguous() if copied else whole, low, *db

    def separate(kernels: Kernels) -> Results:
        run_output_gradients(kernels, dy, h, sections, dh)
        return torch.mm(dy, linear.weight, out=dx).addmm_(dh, linear.a), dh, *db

    def answer() -> Results:
        gradients = [dy[:, columns].double().t() @ h[:, ranks].double() for columns, ranks, _ in linear.sections()]
        return *_input_gradient(linear, dy), *gradients

    contestants, verdicts = {}, {}
    for backend, kernels in setting.backends.items():
        runs = {FOLD: partial(fold, kernels, copied=False), SEPARATE: partial(separate, kernels)}
        if name == "o":  # attention takes the gradient of its output without gaps
            runs = {DENSE: partial(fold, kernels, copied=True), SEPARATE: partial(separate, kernels)}
        named = {f"{backend}, {way}": Contestant(run=run, reset=partial(clear, db)) for way, run in runs.items()}
        contestants |= named
        verdicts[backend] = tuple(named)
    contestants[FROZEN] = _frozen(dy, linear.weight, dx)
    return Case(
        size=_size(setting, linear),
        demand=_demand(setting, linear),
        contestants=contestants,
        answer=answer,
        baseline=FROZEN,
        verdicts=verdicts,
    )


_DIRECTIONS = {"forward": forward, "backward": backward, "backward with dB": whole_backward}
CASES = {
    f"{name}, {title}": partial(direction, name=name)
    for name in ("qkv", "o", "gate and up", "down")
    for title, direction in _DIRECTIONS.items()
}
