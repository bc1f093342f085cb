"""Bytes of one pipeline stage's forward and backward of one micro-batch, put together from traces of its pieces.

Beside a piece's own memory a stage holds the tensors that the pieces before it keep for backward, the residual stream
between two pieces or its gradient, and, until its backward ends, its input and output and the gradient that the next
stage sends. Features of images for later layers are stacked after the stream that enters a stage, in one memory with
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from engine.layers.recompute import Level, MemoryPlan
from engine.models.decoder import Part
from engine.planning.ledger import ACTIVATIONS, COMMUNICATION, Parts, added, most, times, without
from engine.planning.traces import RankModel, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBytes:
    """Memory that one micro-batch takes on a stage, beside permanent allocations.

    Args:
        forward: at the peak of forward.
        kept: between forward and backward.
        backward: at the peak of backward; nothing where the stage has none.
        deferred: in a split backward, bytes that the input gradients keep for the weight gradients.
        away: bytes of activations that are offloaded, and so not in `kept`.
    """

    forward: Parts
    kept: Parts
    backward: Parts
    deferred: Parts = field(default_factory=dict)
    away: int = 0


@dataclass(frozen=True, slots=True)
class _LayerGroup:
    """Consecutive layers that are alike.

    Args:
        trace: the trace of each of them.
        count: number of layers.
        goes_back: whether backward reaches them.
        is_first: this is the stage's first layer, whose input is the stage's.
        is_last: this is the stage's last layer.
        waiting: bytes of gradients that layers behind it, on this stage, left beside that of the stream.
    """

    trace: Trace
    count: int
    goes_back: bool
    is_first: bool
    is_last: bool
    waiting: int


class _Below(NamedTuple):
    """Bytes below the stream in a stage's input and output: features for later layers, and all else but images that
    is sent on with it."""

    entering: int
    leaving: int


@lru_cache(maxsize=4096)
def stage_bytes(
    model: RankModel, stage: Part, memory: MemoryPlan, *, trains: bool, gives_gradient: bool, defers: bool = False
) -> StageBytes:
    """Puts together one forward and one backward of the stage.

    Args:
        trains: whether this stage or one below it has a trainable parameter.
        gives_gradient: whether one below it has.
        defers: whether backward defers the weight gradients.
    """
    shape, stream = model.shape, model.stream
    tables, images = model.tables(), {ACTIVATIONS: model.encoded}
    first = model.embedding(memory.level(0), saved=trains) if stage.embedding else None
    encoder = None
    if stage.embedding and model.encoded:
        encoder = model.encoder(memory.level(0), saved=trains and shape.carried_trains)
    needs = shape.embedding_trains if stage.embedding else gives_gradient
    # before the layers: the head is traced on the model that the positions and the embedding were
    head_needs = needs or any(map(shape.needs_backward, range(stage.first, stage.last)))
    last = model.head(needs=head_needs and trains, saved=trains, defers=defers) if stage.head else None
    runs = list(_layer_groups(model, stage, memory, needs=needs and trains, trains=trains, defers=defers))
    ends = (stage.first, stage.last)
    below = _Below(*(model.levels(layer) * stream + model.beside(layer) - model.encoded for layer in ends))
    forward, kept = _forward([tables, encoder], images, first, runs, last, stream, below, trains)
    away = sum(run.trace.away * run.count for run in runs)
    if not trains:
        return StageBytes(forward=forward, kept={}, backward={})
    if shape.carried_trains:  # the gradient of the encoded images adds up while backward runs
        kept_in_backward = added(kept, images)
    else:
        kept_in_backward = kept
    backward, left = _backward(encoder, first, runs, last, kept_in_backward, stream, below)
    return StageBytes(forward=forward, kept=kept, backward=backward, deferred=left, away=away)


def _layer_groups(
    model: RankModel, stage: Part, memory: MemoryPlan, *, needs: bool, trains: bool, defers: bool
) -> Iterator[_LayerGroup]:
    """Yields the stage's layers in order. The first and the last are groups of their own; the last is never offloaded,
    because backward begins with it."""
    shape = model.shape

    def alike(index: int) -> tuple[int, Level, bool, bool, bool, bool]:
        # layers before the first trained one need no gradient
        own = needs or any(map(shape.needs_backward, range(stage.first, index)))
        ends = index == stage.first, index == stage.last - 1
        return shape.kinds[index], memory.level(index), own and trains, shape.needs_backward(index), *ends

    for (kind, level, own, has_leaves, is_first, is_last), group in groupby(range(stage.first, stage.last), alike):
        plan = MemoryPlan(recompute=level, offload=memory.offload and not is_last, stored_dtype=memory.stored_dtype)
        trace = model.layer(kind, plan, needs=own, saved=trains, defers=defers)
        layers = list(group)
        waiting = 0 if is_last or not own else max(map(model.waiting, layers))
        yield _LayerGroup(trace, len(layers), trains and (own or has_leaves), is_first, is_last, waiting)


def _forward(
    shared: list[Trace | None],
    images: Parts,
    first: Trace | None,
    runs: list[_LayerGroup],
    last: Trace | None,
    stream: int,
    below: _Below,
    trains: bool,
) -> tuple[Parts, Parts]:
    """Returns the peak of forward, and the bytes kept at its end.

    Args:
        shared: the pieces of the coordinates of all layers, and of encoded images.
        images: those that all layers attend to, which live as long as the coordinates.
    """
    moments, base = list[Parts](), images
    for trace in shared:
        if trace is not None:
            moments.append(added(base, trace.forward))
            base = added(base, trace.kept)
    # the first layer's input lives as long as forward runs, whether the layer keeps it or not
    held: Parts = {}
    flow = {ACTIVATIONS if first is not None else COMMUNICATION: stream}
    if first is not None:
        moments.append(added(base, first.forward))
        base = added(base, first.kept)
    # the first layer keeps its input, and with it the rows below
    base = added(base, {next(iter(flow)): below.entering})
    for run in runs:
        trace = run.trace
        before = added(base, times(trace.kept, run.count - 1))
        moments.append(added(before, held, flow, trace.forward))
        base = added(before, trace.kept)
        if run.is_first and not trace.keeps_input:
            held = flow
        flow = {ACTIVATIONS: stream}
    if last is not None:
        moments.append(added(base, held, flow, last.forward))
        base = added(base, last.kept)
    if last is None and images[ACTIVATIONS]:  # which are sent on in one message with the stream
        moments.append(added(base, held, flow, images, {COMMUNICATION: stream}))
    if not trains:
        return most(moments), {}
    kept = [base]
    if last is None:
        kept.append(added(flow, {ACTIVATIONS: below.leaving}))
    if first is None:
        kept.append(held)
    return most(moments), added(*kept)


def _backward(
    encoder: Trace | None,
    first: Trace | None,
    runs: list[_LayerGroup],
    last: Trace | None,
    kept: Parts,
    stream: int,
    below: _Below,
) -> tuple[Parts, Parts]:
    """Returns the peak of backward, and the bytes kept for deferred weight gradients."""
    moments, base, left = [], kept, {}
    gradient = {ACTIVATIONS: stream}
    if last is not None:
        moments.append(added(base, *_at_peak(last, False, False)))
        base, left = without(base, last.kept), added(left, last.left)
    else:
        gradient = {COMMUNICATION: stream + below.leaving}
    for run, before in zip(reversed(runs), [*reversed(runs[:-1]), None], strict=True):
        trace = run.trace
        if run.goes_back:
            holds = run.is_first and first is None, run.is_last and last is None
            # the offloaded activations of the layer before are prefetched
            coming = trace if run.count > 1 else before.trace if before is not None else None
            ahead = {ACTIVATIONS: 0 if coming is None else coming.away}
            waiting = {ACTIVATIONS: run.waiting}
            fullest = added(gradient, ahead, waiting, *_at_peak(trace, *holds))
            moments.append(added(base, left, fullest))
            others = run.count - 1
            moments.append(added(without(base, times(trace.kept, others)), left, times(trace.left, others), fullest))
            left = added(left, times(trace.left, run.count))
        base = without(base, times(trace.kept, run.count))
        if run.is_last and last is None:
            base = added(base, gradient)  # which the next stage sent
        gradient = {ACTIVATIONS: stream}
    if first is not None:
        gradient = added(gradient, {ACTIVATIONS: below.entering})
    for trace in (first, encoder):
        if trace is not None:
            moments.append(added(base, left, gradient, *_at_peak(trace, False, False)))
            base, gradient = without(base, trace.kept), {}
    return most(moments), left


def _at_peak(trace: Trace, holds_input: bool, holds_gradient: bool) -> list[Parts]:
    found = trace.backward.get((holds_input, holds_gradient))
    return [] if found is None else [found]
