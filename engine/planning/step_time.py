"""The predicted time of a step: arithmetic over the machine's speed, bytes over its bandwidth, and the pipeline's
bubble.

A product takes the longer of its arithmetic and its memory traffic; everything else takes its memory traffic.
Collectives between tensor ranks are exposed. Keys of ring attention are hidden behind the attention of a block, and
gradient reductions behind one backward, so that only the excess counts. The schedule's bubble comes from
`engine.pipeline.simulate`. Copies from and to host memory are hidden behind a layer's arithmetic, each direction by
itself. Launches, stragglers and the loader cost nothing here: a real step is slower, and figures of
two layouts are meant to be compared with each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.recompute import Level, MemoryPlan
from engine.layers.rounding import FLOAT8
from engine.models.decoder import Part
from engine.pipeline.costs import Costs
from engine.pipeline.simulate import simulate
from engine.planning.ledger import total
from engine.planning.machine import Machine, check_encoding
from engine.planning.pipeline_parts import PipelinePlan, pipeline_plan
from engine.planning.rank_layout import Layout, Workload
from engine.planning.shapes import WIDE, EndShape, LayerShape, LinearShape, ModelShape, Parameters
from engine.planning.traces import RankModel, rank_model
from engine.zigzag import ContextLayout, make_plan

_RECOMPUTED: dict[Level, tuple[str, ...]] = {"attention": ("attention",), "full": ("attention", "mlp")}
"""The blocks of a layer that backward recomputes."""


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of work: computing, exposed communication, and communication hidden behind computing."""

    compute: float = 0.0
    links: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.compute + other.compute, self.links + other.links, self.hidden + other.hidden)

    @property
    def seconds(self) -> float:
        return self.compute + self.links


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """A prediction. Seconds.

    Args:
        step: of a whole step.
        pipeline: of it, all forwards and backwards, with the bubble.
        bubble: share of the ranks' time in the pipeline that is idle.
        links: of it, the exposed communication, between ranks and with host memory, of the rank with most of it.
        hidden_links: that rank's communication that its arithmetic hides.
        gradients: gradient reductions that no backward hides, and the update.
        tokens_per_second: over all ranks.
    """

    step: float
    pipeline: float
    bubble: float
    links: float
    hidden_links: float
    gradients: float
    tokens_per_second: float


class _Times:
    """Times of the pieces of one rank's micro-batch."""

    def __init__(
        self, workload: Workload, layout: Layout, model: RankModel, machine: Machine, memory: MemoryPlan
    ) -> None:
        parallel = layout.parallel
        self._known: dict[tuple[int, Level], tuple[Work, Work, float]] = {}
        self._workload, self._memory, self._parallel = workload, memory, parallel
        self._shape, self._machine, self._ranks = model.shape, machine, parallel.tensor
        self._item, self._length = int(workload.dtype.itemsize), workload.document_length
        self._model, self._tokens, self.message = model, model.tokens, model.stream
        self._keys_sent = _keys_sent(workload, parallel.context)
        self._gathers = layout.data_and_context if parallel.shard == "parameters" else 1
        self._gather_wire = machine.wire(layout.world_size) * 1e9
        self._splits = parallel.sequence_parallel
        self._context_wire = machine.wire(parallel.tensor * parallel.context) * 1e9

    def product(self, rows: int, inner: int, outer: int) -> float:
        """Returns the seconds of [rows, inner] [inner, outer]: 2 rows inner outer operations, or all matrices'
        bytes."""
        moved = self._item * (rows * inner + inner * outer + rows * outer)
        arithmetic = 2 * rows * inner * outer / (self._machine.products * 1e12)
        return max(arithmetic, self.copy(moved))

    def copy(self, nbytes: float) -> float:
        """Returns the seconds of reading and writing `nbytes`."""
        return nbytes / (self._machine.copies * 1e9)

    def linear(self, linear: LinearShape) -> float:
        """Returns the seconds of x [W | B] and the projection on A."""
        columns = linear.inputs + (linear.extra or linear.rank)
        if linear.encoding is None or linear.is_decoded:
            seconds = self.product(self._tokens, columns, linear.outputs) + self._decoded(linear)
        else:
            seconds = self._fp8_product(linear)
        return seconds + (self.product(self._tokens, linear.inputs, linear.rank) if linear.rank else 0.0)

    def _decoded(self, linear: LinearShape) -> float:
        """Returns the seconds of decoding a weight: its codes are read, its numbers written."""
        if not linear.is_decoded:
            return 0.0
        codes = 0.5 if linear.encoding == "nf4" else 1.0
        return self.copy(linear.inputs * linear.outputs * (codes + self._item))

    def _fp8_product(self, linear: LinearShape) -> float:
        """Returns the seconds of a product in FP8: x is rounded first (read twice, written once), W has a byte a
        number."""
        rounded = self.copy(self._tokens * linear.inputs * (2 * self._item + 1))
        numbers = self._tokens * linear.inputs + linear.inputs * linear.outputs
        moved = numbers + self._item * self._tokens * linear.outputs
        arithmetic = 2 * self._tokens * linear.inputs * linear.outputs
        low_rank = self.product(self._tokens, linear.rank, linear.outputs) if linear.rank else 0.0
        return rounded + max(arithmetic / (self._machine.products_fp8 * 1e12), self.copy(moved)) + low_rank

    def _transposed(self, linear: LinearShape) -> float:
        """Returns the seconds of transposing an FP8 weight's codes, for the input gradient."""
        if linear.encoding is None or linear.is_decoded:
            return 0.0
        return self.copy(2 * linear.inputs * linear.outputs)

    def weight_gradients(self, linear: LinearShape) -> float:
        """Returns the seconds of dW of what trains."""
        return sum(self.product(rows, self._tokens, linear.inputs) for rows in linear.trained_rows)

    def adapter_gradients(self, linear: LinearShape) -> float:
        """Returns the seconds of dA and dB, which read x and dY, and of the update of dX."""
        if not linear.rank:
            return 0.0
        rows = self._tokens
        return self.product(linear.rank, rows, linear.inputs) + self.product(linear.rank, rows, linear.outputs)

    def sequence_links(self, count: int) -> float:
        """Returns the seconds of `count` gathers or scatters of the residual stream over tensor ranks (all-reduce:
        two)."""
        return count * self._crossing(self._item * self._shape.hidden)

    def gathered_input(self, linear: LinearShape) -> float:
        """Returns the seconds of the gather before a column linear; with scales by row it moves codes and a scale a
        token. H beside it is narrow, and left out of all layouts alike."""
        if self._splits and linear.encoding == "fp8_row":
            return self._crossing(linear.inputs + WIDE)
        return self.sequence_links(1)

    def _crossing(self, nbytes: float) -> float:
        """Returns the seconds of a gather or scatter of `nbytes` a token between tensor ranks."""
        if self._ranks == 1:
            return 0.0
        moved = self._tokens * nbytes * (self._ranks - 1) / self._ranks
        return moved / (self._machine.wire(self._ranks) * 1e9)

    def attention(self, layer: LayerShape, *, products: int) -> Work:
        """Returns the work of causal attention: each of `products` takes half of 2 T S w operations. Forward has two,
        backward five; backward sends keys again, and returns their gradients."""
        length = self._length if layer.window is None else min(2 * layer.window, self._length)
        compute = products * self._tokens * length * layer.width / (self._machine.products * 1e12)
        sent = self._keys_sent * 2 * layer.kv_width * self._item
        links = sent * (1 if products == 2 else 2) / self._context_wire
        return Work(compute, max(0.0, links - compute), min(links, compute))

    def attention_block(self, layer: LayerShape, *, last: bool = True) -> Work:
        """Returns the work of norm, q, k, v, rotation, attention and the output projection (not recomputed: `last`)."""
        numbers = 2 * self._shape.hidden + 2 * (layer.width + 2 * layer.kv_width)
        compute = self.linear(layer.qkv) + (self.linear(layer.out) if last else 0.0)
        compute += self.copy(self._item * self._tokens * (numbers + (3 * self._shape.hidden if last else 0)))
        links = self.gathered_input(layer.qkv) + (self.sequence_links(1) if last else 0.0)
        return Work(compute, links) + self.attention(layer, products=2)

    def mlp_block(self, layer: LayerShape, *, last: bool = True) -> Work:
        """Returns the work of norm, gate and up, SwiGLU and the down projection."""
        compute = self.linear(layer.gate_up) + (self.linear(layer.down) if last else 0.0)
        numbers = 2 * self._shape.hidden + 3 * layer.down.inputs + (3 * self._shape.hidden if last else 0)
        links = self.gathered_input(layer.gate_up) + (self.sequence_links(1) if last else 0.0)
        return Work(compute + self.copy(self._item * self._tokens * numbers), links)

    def forward(self, layer: LayerShape) -> Work:
        return self.attention_block(layer) + self.mlp_block(layer)

    def backward(self, layer: LayerShape, level: Level) -> Work:
        """Returns the work of every linear's dX, attention, norms and SwiGLU (recomputed unless kept), and
        recomputation."""
        compute = sum(self.linear(one) + self.adapter_gradients(one) + self._transposed(one) for one in layer.linears)
        numbers = 10 * self._shape.hidden + 5 * layer.down.inputs + 2 * (layer.width + 2 * layer.kv_width)
        recomputed = _RECOMPUTED.get(level, ())
        if level != "none":
            numbers += 4 * self._shape.hidden + 3 * layer.down.inputs
        work = Work(compute + self.copy(self._item * self._tokens * numbers), self.sequence_links(4))
        work += self.attention(layer, products=5)
        if recomputed:
            work += self.attention_block(layer, last=len(recomputed) > 1)
        if "mlp" in recomputed:
            work += self.mlp_block(layer, last=False)
        return work

    def layer(self, layer: LayerShape, level: Level) -> tuple[Work, Work, float]:
        """Returns forward, backward and weight gradients of a layer; computed once for layers that are alike."""
        key = id(layer), level
        if key not in self._known:
            kept = self._kept(layer, level, self._memory.stored_dtype) if self._memory.offload else 0
            rounding = self._rounding(layer, level)
            forward = self.gathered(layer, self.forward(layer) + Work(13 * rounding))
            backward = self.gathered(layer, self.backward(layer, level) + Work(7 * rounding))
            weights = self._moved(layer)
            sent, fetched = (kept, weights + kept) if self._memory.offload else (0, weights)
            self._known[key] = (
                forward + self._behind(max(sent, weights), forward),
                backward + self._behind(fetched, backward),
                self.weights(layer),
            )
        return self._known[key]

    def _rounding(self, layer: LayerShape, level: Level) -> float:
        """Returns the seconds of a pass over one byte of each number that is kept in fewer bits. Rounding bf16 to
        float8 passes 13 bytes a number (the row's maximum, scaling, rounding), and back 7."""
        if self._memory.stored_dtype is None:
            return 0.0
        numbers = self._kept(layer, level, None) / self._item
        return self.copy(numbers * (1.0 if self._memory.stored_dtype == FLOAT8 else 0.5))

    def _kept(self, layer: LayerShape, level: Level, stored_dtype: torch.dtype | None) -> int:
        """Returns the bytes that a layer keeps for backward of one micro-batch, its input included."""
        plan = MemoryPlan(recompute=level, stored_dtype=stored_dtype)
        return total(self._model.layer(self._shape.kinds[self._index(layer)], plan, needs=True).kept)

    def _index(self, layer: LayerShape) -> int:
        return next(index for index, one in enumerate(self._shape.layers) if one is layer)

    def _moved(self, layer: LayerShape) -> int:
        """Returns the bytes of the layer's offloaded weights."""
        if not self._workload.offload_weights:
            return 0
        return self._parameters(layer).moved_bytes(self._item)

    def _parameters(self, layer: LayerShape) -> Parameters:
        return self._shape.layer_parameters[self._index(layer)]

    def _behind(self, nbytes: float, work: Work) -> Work:
        """Returns the exposed and hidden parts of a copy from or to host memory behind `work`."""
        seconds = nbytes / (self._machine.host * 1e9)
        return Work(0.0, max(0.0, seconds - work.seconds), min(seconds, work.seconds))

    def gathered(self, layer: LayerShape, work: Work) -> Work:
        """Returns `work` with the layer's weight gather, which the layer before it hides."""
        elements = sum(linear.outputs * (linear.inputs + linear.extra) for linear in layer.linears)
        seconds = self._weight_bytes(layer, elements) * (self._gathers - 1) / self._gathers / self._gather_wire
        return work + Work(0.0, max(0.0, seconds - work.seconds), min(seconds, work.seconds))

    def _weight_bytes(self, layer: LayerShape, elements: int) -> int:
        encoded = self._parameters(layer).encoded
        return encoded if encoded else self._item * elements

    def weights(self, layer: LayerShape) -> float:
        return sum(self.weight_gradients(linear) for linear in layer.linears)

    def head(self, end: EndShape) -> float:
        """Returns the seconds of the product with the vocabulary, one way."""
        return self.product(self._tokens, self._shape.hidden, end.rows)

    def head_weights(self, end: EndShape) -> float:
        """Returns the seconds of the head's dW, where it trains."""
        return sum(self.product(rows, self._tokens, self._shape.hidden) for rows in end.trained_rows)


def _keys_sent(workload: Workload, size: int) -> int:
    """Returns the tokens whose keys the first rank sends in a ring attention of rows of one document each."""
    if size == 1:
        return 0
    rows, length = workload.micro_batch, workload.seq_length
    layout = ContextLayout(size=size, num_rows=rows, row_length=length, document_lengths=(length,) * rows)
    return sum(step.num_sent for step in make_plan(layout, 0).steps[1:])


def predict_time(workload: Workload, layout: Layout, memory: MemoryPlan, machine: Machine) -> StepTime:
    """Predicts the time of a step.

    Raises:
        UserError: the model's sizes do not fit the layout, or its layers cannot be split over the stages.
    """
    model = rank_model(workload, layout.parallel)
    shape, microbatches = model.shape, workload.num_microbatches(layout)
    plan = pipeline_plan(workload.decoder, shape, layout.parallel, microbatches)
    check_encoding(machine, workload.base_dtype)
    times = _Times(workload, layout, model, machine, memory)
    costs, links, hidden = _costs(times, workload, layout, memory, machine, shape, plan)
    simulation = simulate(plan.schedule, costs)
    gradients = _gradients(workload, layout, machine, shape, plan, max(costs.input_grad))
    step = simulation.makespan + gradients
    if workload.refers_to_base:
        stages = [sum(costs.forward[one] for one in plan.stages(rank)) for rank in range(plan.schedule.num_ranks)]
        step += microbatches * max(stages) + sum(stages) - max(stages)
    return StepTime(
        step=step,
        pipeline=simulation.makespan,
        bubble=simulation.bubble,
        links=links * microbatches,
        hidden_links=hidden * microbatches,
        gradients=gradients,
        tokens_per_second=workload.global_batch * workload.seq_length / step,
    )


def _costs(
    times: _Times,
    workload: Workload,
    layout: Layout,
    memory: MemoryPlan,
    machine: Machine,
    shape: ModelShape,
    plan: PipelinePlan,
) -> tuple[Costs, float, float]:
    """Returns the seconds of the stages' actions, and the exposed and hidden communication of a micro-batch on the rank
    with most exposed."""
    stages = {number: stage for rank in range(plan.schedule.num_ranks) for number, stage in plan.stages(rank).items()}
    columns: list[tuple[float, float, float]] = []
    waits = [Work()] * plan.schedule.num_ranks
    first = plan.schedule.first_trainable_stage
    for number in range(len(stages)):
        forward, backward, weights = _stage(times, memory, shape, stages[number], trains=number >= first)
        columns.append((forward.seconds, backward.seconds, weights))
        waits[plan.schedule.stage_rank[number]] += forward + backward
    neighbours = layout.world_size if layout.parallel.pipeline > 1 else 1
    costs = Costs(
        forward=tuple(column[0] for column in columns),
        input_grad=tuple(column[1] for column in columns),
        weight_grad=tuple(column[2] for column in columns),
        activation=(1.0,) * len(columns),
        transfer=times.message / (machine.wire(neighbours) * 1e9),
    )
    busiest = max(waits, key=lambda work: (work.links, work.hidden))
    return costs, busiest.links, busiest.hidden


def _stage(
    times: _Times, memory: MemoryPlan, shape: ModelShape, stage: Part, *, trains: bool
) -> tuple[Work, Work, float]:
    """Returns forward, input gradient and weight gradients of one stage."""
    forward, backward, weights = Work(), Work(), 0.0
    for index in range(stage.first, stage.last):
        ahead, back, products = times.layer(shape.layers[index], memory.level(index))
        forward += ahead
        if trains and index >= shape.first_trainable_layer:
            backward += back
            weights += products
    if stage.head:
        # under a frozen head both products are in forward
        once = Work(times.head(shape.head))
        forward += once if shape.head.trains else once + once
        backward += once if shape.head.trains else Work()
        weights += times.head_weights(shape.head)
    return forward, backward, weights


def _gradients(
    workload: Workload, layout: Layout, machine: Machine, shape: ModelShape, plan: PipelinePlan, hides: float
) -> float:
    """Returns the seconds of gradient reductions that exceed a backward, and of the update: masters, moments and
    gradients are read and written once, or masters and moments are copied from host memory and back."""
    elements = shape.trained_elements() / layout.parallel.pipeline
    ranks = layout.data_and_context
    wire = machine.wire(layout.world_size) * 1e9
    sums = 2 * (ranks - 1) / ranks * WIDE * elements / wire
    own = elements / (ranks if layout.parallel.shard != "none" else 1)
    update = 8 * WIDE * own / (machine.copies * 1e9)
    if workload.offload_optimizer:
        update = max(update, 3 * WIDE * own / (machine.host * 1e9))
    return max(0.0, sums - hides) + update
