"""Bytes of one pipeline stage's forward and backward of one micro-batch; the whole model is one stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.layers.recompute import MemoryPlan
from engine.layers.saved import MIN_MOVED_BYTES
from engine.planning.attention import ContextSizes
from engine.planning.ends import EndWalk, HeadKept
from engine.planning.layers import LayerKept, LayerWalk, Needs, needs_of
from engine.planning.ledger import ACTIVATIONS, COMMUNICATION, TEMPORARY, Block, Ledger, Parts, total, without
from engine.planning.shapes import LayerShape, ModelShape
from engine.planning.sizes import WIDE, Sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRange:
    """Layers [first, last), and whether this stage has the ends."""

    first: int
    last: int
    embedding: bool = True
    head: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBytes:
    """Of one micro-batch, beside what is always there.

    Args:
        forward: at the fullest moment of forward.
        kept: between forward and backward.
        backward: at the fullest moment of backward; nothing where the stage has none.
        deferred: of a split backward, what its input gradients leave to the weights' gradients.
        away: bytes of `kept` that wait in host memory instead.
    """

    forward: Parts
    kept: Parts
    backward: Parts
    deferred: Parts = field(default_factory=dict)
    away: int = 0


def stage_bytes(
    shape: ModelShape,
    stage: StageRange,
    sizes: Sizes,
    context: ContextSizes,
    memory: MemoryPlan,
    *,
    trains: bool,
    gives_gradient: bool,
    defers: bool = False,
) -> StageBytes:
    """Goes once forward and once backward through the stage.

    Args:
        trains: whether this stage or one below it has a trainable parameter.
        gives_gradient: whether one below it has.
        defers: whether backward leaves the weights' gradients for later.
    """
    walk = _StageWalk(shape, stage, sizes, context, memory, trains=trains, gives_gradient=gives_gradient, defers=defers)
    ledger = walk.ledger
    walk.forward()
    forward, kept, away = ledger.peak, ledger.held, walk.away
    ledger.mark()
    if not trains:
        return StageBytes(forward=forward, kept={}, backward={})
    walk.backward()
    assert defers or total(ledger.held) == 0, ledger.held
    return StageBytes(forward=forward, kept=kept, backward=ledger.peak, deferred=ledger.held, away=away)


@dataclass(slots=True)
class _Passed:
    """A layer after its forward: what it keeps, its input where that is kept, and what later layers alike keep that
    were not gone through."""

    index: int
    needs: Needs
    kept: LayerKept
    x: Block | None
    between: list[Block] = field(default_factory=list)
    moved: list[Block] = field(default_factory=list)
    """What of it waits in host memory."""


class _StageWalk:
    def __init__(
        self, shape: ModelShape, stage: StageRange, sizes: Sizes, context: ContextSizes, memory: MemoryPlan,
        *, trains: bool, gives_gradient: bool, defers: bool,
    ) -> None:  # fmt: skip
        self.ledger = Ledger()
        self.away = 0
        self._shape, self._stage, self._sizes, self._memory = shape, stage, sizes, memory
        self._trains, self._gives_gradient = trains, gives_gradient
        self._layers = LayerWalk(
            self.ledger, sizes, context, shape.hidden, defers=defers, stored_dtype=memory.stored_dtype
        )
        self._ends = EndWalk(self.ledger, sizes, shape.hidden, defers=defers)
        self._kept: list[_Passed] = []
        self._tables: Block | None = None
        self._indices: Block | None = None
        self._embedded_needs = False
        self._head = HeadKept()
        self._output: Block | None = None

    def forward(self) -> None:
        ledger, shape, stage = self.ledger, self._shape, self._stage
        # cosines and sines of every token, fp32; their angles meanwhile
        half = WIDE * self._sizes.tokens * shape.num_ropes * (shape.rotary_dim // 2)
        angles = ledger.take(TEMPORARY, half)
        self._tables = ledger.take(ACTIVATIONS, 2 * half)
        ledger.drop(angles)
        if stage.embedding:
            x, self._indices = self._ends.embed(shape.embedding, scales=shape.scales_embeddings)
            needs = bool(shape.embedding.trains or shape.embedding.rank)
            self._embedded_needs = needs
        else:
            x, needs = self._layers.stream(COMMUNICATION), self._gives_gradient
        index = stage.first
        while index < stage.last:
            before = ledger.held
            x, needs = self._layer(index, x, needs)
            skipped = self._alike(index) - 2
            index += 1
            if skipped > 0:
                # of layers that are alike, those between the first and the last keep what the first does
                grown = without(ledger.held, before)
                self._kept[-1].between = [ledger.take(part, skipped * count) for part, count in grown.items()]
                self.away += skipped * sum(block.nbytes for block in self._kept[-1].moved)
                index += skipped
        if stage.head:
            saved = self._trains and (needs or shape.head.trains_norm or shape.head.trains or _adapted(shape))
            self._head = self._ends.head(shape.head, saved=saved)
        self._output_needs = needs
        if self._trains:
            self._output = x
        else:
            ledger.drop(x, self._indices, self._tables)

    def _layer(self, index: int, x: Block, needs: bool) -> tuple[Block, bool]:
        """Forward of one layer: its output, and whether that needs a gradient."""
        layer, stage = self._shape.layers[index], self._stage
        own = needs_of(layer, needs) if self._trains else Needs(False, False, False, False, False)
        # autograd keeps the input of what needs a gradient; a stage keeps its own input as long
        keeps_x = own.qkv or (index == stage.first and not stage.embedding and self._trains)
        output, kept, kept_x = self._layers.forward(layer, self._memory.level(index), own, x, keeps_x=keeps_x)
        passed = _Passed(index, own, kept, kept_x)
        self._kept.append(passed)
        if self._memory.offload and index < stage.last - 1:
            blocks = [*kept.blocks(), *([] if kept_x is None or not own.qkv else [kept_x])]
            passed.moved = [block for block in blocks if block.nbytes >= MIN_MOVED_BYTES]
            for block in passed.moved:
                self.ledger.send(block)
            self.away += sum(block.nbytes for block in passed.moved)
        return output, own.output

    def _fetch(self, place: int) -> Block | None:
        """Brings back what a layer keeps, and what the one before it does: as a block of its own where that layer was
        not gone through."""
        if not self._memory.offload:
            return None
        for block in self._kept[place].moved:
            self.ledger.fetch(block)
        if place == 0:
            return None
        before = self._kept[place - 1]
        if before.between:
            return self.ledger.take(ACTIVATIONS, sum(block.nbytes for block in before.moved))
        for block in before.moved:
            self.ledger.fetch(block)
        return None

    def _alike(self, index: int) -> int:
        """Layers in a row, from this one on, that differ in nothing; 1 where the next one's input differs."""
        shape, stage, memory = self._shape, self._stage, self._memory
        own = self._kept[-1].needs
        if index == stage.first or own.x != own.output:
            return 1
        end = index + 1
        while (
            end < stage.last and shape.layers[end] is shape.layers[index] and memory.level(end) == memory.level(index)
        ):
            end += 1
        return end - index

    def backward(self) -> None:
        ledger, shape, stage = self.ledger, self._shape, self._stage
        assert self._output is not None
        dy: Block | None
        held: list[Block | None] = []
        if stage.head:
            dy = self._ends.head_backward(shape.head, self._head, self._output, needs_gradient=self._output_needs)
        else:
            # the next stage's gradient and this one's output live as long as backward runs
            held = [self._layers.stream(COMMUNICATION), self._output]
            dy = ledger.take(COMMUNICATION, 0)
        ahead: Block | None = None
        for place in range(len(self._kept) - 1, -1, -1):
            passed = self._kept[place]
            ledger.drop(*passed.between, ahead)
            ahead = self._fetch(place)
            index, needs, kept, x = passed.index, passed.needs, passed.kept, passed.x
            if index == stage.first and not stage.embedding:
                held.append(x)  # the input lives as long too
                x = None
            if dy is None:
                _free(ledger.drop, kept, x)
                continue
            dy = self._layers.backward(shape.layers[index], self._memory.level(index), needs, kept, x, dy)
        if stage.embedding:
            self._ends.embedding_backward(shape.embedding, self._indices, dy)
        else:
            ledger.drop(dy)
        ledger.drop(self._tables, *held)


def kept_bytes(sizes: Sizes, shape: ModelShape, layer: LayerShape, memory: MemoryPlan) -> int:
    """What a layer leaves for backward of one micro-batch, its input included.

    Args:
        memory: whose `recompute` is that of the layer.
    """
    ledger = Ledger()
    walk = LayerWalk(ledger, sizes, ContextSizes(), shape.hidden, stored_dtype=memory.stored_dtype)
    needs = needs_of(layer, True)
    output, _, _ = walk.forward(layer, memory.recompute, needs, walk.stream(), keeps_x=True)
    ledger.drop(output)
    return total(ledger.held)


def _adapted(shape: ModelShape) -> bool:
    return shape.head.linear is not None and shape.head.linear.rank > 0


def _free(drop: Callable[..., None], kept: LayerKept, x: Block | None) -> None:
    """A layer that backward does not reach keeps nothing but, on a stage's edge, its input."""
    drop(x, kept.middle, kept.activated, *kept.attention.blocks())
