"""The predicted time of a step: arithmetic over the machine's speed, bytes over its bandwidth, gaps between launches,
the host's time to launch them, and the pipeline's bubble.

The launches of a layer and of the ends are counted while the engine's own code runs on the meta device (`launches.py`),
and `launch_times.py` says how long each takes. The host launches ahead of the device, so that a micro-batch takes the
longer of the two; one that is replayed as a graph takes the device's time. Collectives between tensor ranks, and
exchanges of rows with the ranks of their experts, are exposed; rows are taken to spread evenly over experts. Only what
nothing hides counts of keys of ring attention, behind the attention of a block; of gradient reductions, but for the
last bucket, behind one backward; and of copies from and to host memory, behind a layer's arithmetic, each direction by
itself. The schedule's bubble comes from `engine.pipeline.simulate`. Stragglers, the loader and the first steps, in
which kernels are compiled, cost nothing here. What a machine reaches is not known before it is measured:
`predict_range` has the step at the slowest and at the fastest that it may be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from engine.layers.branch import LinearShape
from engine.layers.recompute import Level, MemoryPlan
from engine.models.decoder import Part
from engine.ops.scaled_products import require_scaled_major, require_some_scaled
from engine.pipeline.costs import Costs
from engine.pipeline.simulate import simulate
from engine.planning.launch_times import launch_seconds
from engine.planning.launches import Launch, PieceLaunches
from engine.planning.ledger import total
from engine.planning.machine import Machine, bounds, check_encoding
from engine.planning.peak import STATE_SHARDING
from engine.planning.pipeline_parts import PipelinePlan, pipeline_plan
from engine.planning.rank_layout import Companion, Layout, SamplesCost, SamplesPredictor, Workload
from engine.planning.shapes import WIDE, LayerShape, ModelShape, Parameters
from engine.planning.traces import RankModel, rank_model
from engine.seams import resolve
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


@dataclass(frozen=True, slots=True)
class PieceTime:
    """The work of a layer, an end or a stage for one micro-batch; `weights` are seconds of the gradients of weights
    that train in full, and `host` those that the host takes to launch all of it."""

    forward: Work = Work()
    backward: Work = Work()
    weights: float = 0.0
    host: float = 0.0

    def __add__(self, other: PieceTime) -> PieceTime:
        return PieceTime(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weights + other.weights,
            self.host + other.host,
        )

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds + self.weights

    @property
    def waits(self) -> float:
        """How many times as long it takes as the device does, which waits for the host."""
        return max(1.0, self.host / self.seconds) if self.seconds else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """A prediction. Seconds.

    Args:
        step: of a whole step.
        pipeline: of it, all forwards and backwards, with the bubble.
        bubble: share of the ranks' time in the pipeline that is idle.
        links: of it, the exposed communication, between ranks and with host memory, of the rank with most of it.
        hidden_links: that rank's communication that its arithmetic hides.
        reduction: of gradients over ranks, and of gathers of updated weights where only gradients are sharded.
        exposed_reduction: the part of that which neither the last backward nor the next forward hides.
        update: of the optimizer.
        tokens_per_second: over all ranks.
        host: of launching what a rank computes, on the rank where it takes longest.
        waits: how many times as long a micro-batch takes there as the device alone would.
        sampling: seconds of a step's share of sampling what it trains on.
        samples: of a batch of completions; None where nothing is sampled.
        teachers: seconds of a step's share of the passes of frozen models that are learned from.
    """

    step: float
    pipeline: float
    bubble: float
    links: float
    hidden_links: float
    reduction: float
    exposed_reduction: float
    update: float
    tokens_per_second: float
    host: float = 0.0
    waits: float = 1.0
    sampling: float = 0.0
    samples: SamplesCost | None = None
    teachers: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """A step at the slowest, the likely and the fastest speeds of a machine."""

    slow: StepTime
    likely: StepTime
    fast: StepTime


class _Times:
    """Times of the pieces of one rank's micro-batch."""

    def __init__(
        self, workload: Workload, layout: Layout, model: RankModel, machine: Machine, memory: MemoryPlan
    ) -> None:
        parallel = layout.parallel
        self._known: dict[tuple[int, Level], PieceTime] = {}
        self._workload, self._memory, self._parallel = workload, memory, parallel
        self._shape, self._machine, self._ranks = model.shape, machine, parallel.tensor
        self._item = int(workload.dtype.itemsize)
        self._model, self._tokens, self.message = model, model.tokens, model.message
        self._keys_sent = _keys_sent(workload, parallel.context)
        self._copies = layout.copies if parallel.shard == "parameters" else {}
        self._gather_wire = machine.wire(layout.world_size) * 1e9
        self._splits = parallel.sequence_parallel and workload.decoder.splits_tokens
        self._context_wire = machine.wire(parallel.tensor * parallel.context) * 1e9

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

    def _keys(self, layer: LayerShape, passes: int, attention: float) -> Work:
        """Returns the transfers of ring attention's keys behind its arithmetic; backward sends keys again, and returns
        their gradients."""
        links = passes * self._keys_sent * 2 * layer.kv_width * self._item / self._context_wire
        return Work(0.0, max(0.0, links - attention), min(links, attention))

    def _attention_links(self, layer: LayerShape, *, last: bool = True) -> float:
        """Returns the seconds of the collectives around the attention block (not recomputed: `last`)."""
        gathers = (*layer.attention[:1], *layer.between[:1])
        scatters = max(0, len(gathers) - (not last))
        return sum(map(self.gathered_input, gathers)) + self.sequence_links(scatters)

    def _mlp_links(self, layer: LayerShape, *, last: bool = True) -> float:
        """Returns the seconds of the collectives around the MLP (not recomputed: `last`)."""
        if layer.routes_local_tokens:
            # a shared expert is an ordinary MLP; tokens that were not apart before meet again behind the experts
            joins = self.sequence_links(1) if last and not self._splits else 0.0
            return joins + (self.sequence_links(1 + last) if layer.has_shared else 0.0)
        if not layer.mlp:
            return 0.0
        return self.gathered_input(layer.mlp[0]) + (self.sequence_links(1) if last else 0.0)

    def _exchange(self, sizes: Iterable[int]) -> float:
        """Returns the seconds of exchanges of rows with the ranks of their experts.

        As many rows go to each rank as to any other. Rows for other nodes go by the network, while the rest goes
        over the links within the node.

        Args:
            sizes: bytes of each that arrive, those of this rank's own tokens among them.
        """
        ranks = self._parallel.expert
        apart = self._ranks if self._parallel.shards_experts else 1
        near = min(ranks, max(1, self._machine.node_size // apart))
        rank = sum(sizes) / ranks / 1e9
        return max((near - 1) * rank / self._machine.link, (ranks - near) * rank / self._machine.network)

    def _layer(self, layer: LayerShape, launches: PieceLaunches, level: Level) -> PieceTime:
        """Returns the work of a layer, without transfers from and to host memory and other data ranks."""
        host = self._host(launches.forward, launches.backward, launches.weights)
        forward, backward = (self._seconds(each) for each in (launches.forward, launches.backward))
        ahead, back = (
            self._seconds(one for one in each if "attention" in one.kind)
            for each in (launches.forward, launches.backward)
        )
        links = self.sequence_links(4 if layer.between else 2)
        links += self._mlp_links(layer) if layer.routes_local_tokens else self.sequence_links(2)
        links += self._exchange(launches.exchanged_backward)
        recomputed = _RECOMPUTED.get(level, ())
        ahead_links = self._attention_links(layer) + self._mlp_links(layer) + self._exchange(launches.exchanged_forward)
        again = Work()
        if recomputed:
            links += self._attention_links(layer, last=len(recomputed) > 1)
            again, back = self._keys(layer, 1, ahead), back - ahead
        if "mlp" in recomputed:
            links += self._mlp_links(layer, last=False)
        return PieceTime(
            Work(forward, ahead_links) + self._keys(layer, 1, ahead),
            Work(backward, links) + self._keys(layer, 2, back) + again,
            self._seconds(launches.weights),
            host,
        )

    def _seconds(self, launches: Iterable[Launch]) -> float:
        return sum(launch_seconds(one, self._machine) for one in launches)

    def _host(self, *launches: Iterable[Launch]) -> float:
        """Returns the seconds that the host takes to launch all of these."""
        return self._machine.host_launch * sum(one.count for one in chain(*launches))

    def layer(self, kind: int, level: Level) -> PieceTime:
        """Returns the work of a layer; computed once for layers that are alike.

        Args:
            kind: the number of a layer that is like it.
            level: its recomputation.
        """
        key = kind, level
        if key not in self._known:
            layer, parameters = self._shape.layers[kind], self._shape.layer_parameters[kind]
            plan = MemoryPlan(recompute=level, stored_dtype=self._memory.stored_dtype)
            trace = self._model.layer(kind, plan, needs=True)
            kept = total(trace.kept) if self._memory.offload else 0
            found = self._layer(layer, trace.launches, level)
            forward, backward = (self._gathered(parameters, work) for work in (found.forward, found.backward))
            moved = sum(one.moved_bytes(self._item) for one in parameters)
            weights = moved if self._workload.offload_weights else 0
            sent, fetched = (kept, weights + kept) if self._memory.offload else (0, weights)
            self._known[key] = PieceTime(
                forward + self._behind(max(sent, weights), forward),
                backward + self._behind(fetched, backward),
                found.weights,
                found.host,
            )
        return self._known[key]

    def head(self) -> PieceTime:
        """Returns the work of norm, head and loss. Under a frozen head, whose gradient is computed with the loss, most
        of it is in forward."""
        return self._end(self._model.head(needs=True, saved=True, defers=False).launches)

    def embedding(self, level: Level, *, trains: bool) -> PieceTime:
        """Returns the work of the embedding, of a vision model, and of an encoder of images for all layers."""
        found = self._end(self._model.embedding(level, saved=trains).launches)
        if not self._model.encoded:
            return found
        saved = trains and self._shape.carried_trains
        return found + self._end(self._model.encoder(level, saved=saved).launches)

    def _end(self, launches: PieceLaunches) -> PieceTime:
        forward, backward, weights = (
            self._seconds(each) for each in (launches.forward, launches.backward, launches.weights)
        )
        host = self._host(launches.forward, launches.backward, launches.weights)
        return PieceTime(Work(forward), Work(backward), weights, host)

    def _behind(self, nbytes: float, work: Work) -> Work:
        """Returns the exposed and hidden parts of a copy from or to host memory behind `work`."""
        seconds = nbytes / (self._machine.host * 1e9)
        return Work(0.0, max(0.0, seconds - work.seconds), min(seconds, work.seconds))

    def _gathered(self, parameters: Iterable[Parameters], work: Work) -> Work:
        """Returns `work` with the layer's weight gather, which the layer before it hides."""
        seconds = 0.0
        for one in parameters:
            ranks = self._copies.get(one.data, 1)
            seconds += one.gathered_bytes(self._item, ranks) * (ranks - 1) / ranks / self._gather_wire
        return work + Work(0.0, max(0.0, seconds - work.seconds), min(seconds, work.seconds))


def _keys_sent(workload: Workload, size: int) -> int:
    """Returns the tokens whose keys the first rank sends in a ring attention of rows of one document each."""
    if size == 1:
        return 0
    rows, length = workload.micro_batch, workload.seq_length
    layout = ContextLayout.even(size=size, num_rows=rows, row_length=length, document_lengths=(length,) * rows)
    return sum(step.num_sent for step in make_plan(layout, 0).steps[1:])


def predict_range(workload: Workload, layout: Layout, memory: MemoryPlan, machine: Machine) -> StepRange:
    """Predicts the time of a step at the machine's speeds, and at the bounds of what it may reach.

    Raises:
        UserError: as of `predict_time`.
    """
    slow, likely, fast = (
        predict_time(workload, layout, memory, one) for one in (bounds(machine)[0], machine, bounds(machine)[1])
    )
    return StepRange(slow=slow, likely=likely, fast=fast)


def predict_time(workload: Workload, layout: Layout, memory: MemoryPlan, machine: Machine) -> StepTime:
    """Predicts the time of a step.

    Raises:
        UserError: the model's sizes do not fit the layout, its layers cannot be split over the stages, or the machine
            has no products of the base.
    """
    workload = workload.on(layout)
    samples = _samples(workload, layout, machine)
    machine = machine.graphed() if workload.graphed else machine
    model = rank_model(workload, layout.parallel)
    shape, microbatches = model.shape, workload.num_microbatches(layout)
    plan = pipeline_plan(workload.decoder, shape, layout.parallel, microbatches)
    check_encoding(machine, workload.base_dtype)
    _check_products_of_codes(workload, machine, shape)
    times = _Times(workload, layout, model, machine, memory)
    costs, busiest, ranks = _costs(times, layout, memory, machine, shape, plan)
    simulation = simulate(plan.schedule, costs)
    reduction, exposed = _reduction(workload, layout, machine, shape, costs)
    update = _update(workload, layout, machine, shape)
    step = simulation.makespan + exposed + update
    counts_first = workload.balances and (microbatches > 1 or plan.schedule.num_ranks > 1)
    compared = 0.0 if workload.samples is None or not workload.samples.compared else 1 / workload.iterations
    if passes := int(workload.refers_to_base) + int(counts_first) + compared:
        step += passes * _forwards(costs, plan, microbatches)
    teachers = workload.base_teachers * _forwards(costs, plan, microbatches)
    teachers += sum(_pass_of(one, workload, layout, memory, machine) for one in workload.companions)
    if not workload.teaches_each_step:
        teachers /= workload.iterations
    step += teachers
    sampling = 0.0
    if workload.samples is not None and samples is not None:
        sampling = samples.seconds / workload.samples.steps
    return StepTime(
        step=step + sampling,
        pipeline=simulation.makespan,
        bubble=simulation.bubble,
        links=busiest.links * microbatches,
        hidden_links=busiest.hidden * microbatches,
        reduction=reduction,
        exposed_reduction=exposed,
        update=update,
        tokens_per_second=workload.step_tokens / (step + sampling),
        host=max(one.host for one in ranks) * microbatches,
        waits=max(one.waits for one in ranks),
        sampling=sampling,
        samples=samples,
        teachers=teachers,
    )


def _forwards(costs: Costs, plan: PipelinePlan, microbatches: int) -> float:
    """Returns the seconds of a pass of all micro-batches without a backward, with the pipeline's filling."""
    ranks = [sum(costs.forward[one] for one in plan.stages(rank)) for rank in range(plan.schedule.num_ranks)]
    return microbatches * max(ranks) + sum(ranks) - max(ranks)


def _check_products_of_codes(workload: Workload, machine: Machine, shape: ModelShape) -> None:
    """Refuses products of codes that no linear of the model has, or not on this GPU."""
    if workload.rounds_inputs:
        require_some_scaled(workload.base_dtype, shape.rounding)
    if machine.major is not None:
        for of in shape.rounding:
            require_scaled_major(of, machine.major, "the base", f"{machine.name} has {machine.major}.x")


def _pass_of(companion: Companion, workload: Workload, layout: Layout, memory: MemoryPlan, machine: Machine) -> float:
    """Returns the seconds in which a frozen model goes through a step's rows."""
    own = workload.of_companion(companion)
    model = rank_model(own, layout.parallel)
    microbatches = own.num_microbatches(layout)
    plan = pipeline_plan(own.decoder, model.shape, layout.parallel, microbatches)
    plain = MemoryPlan(recompute=memory.recompute)
    costs, _, _ = _costs(_Times(own, layout, model, machine, plain), layout, plain, machine, model.shape, plan)
    return _forwards(costs, plan, microbatches)


def _samples(workload: Workload, layout: Layout, machine: Machine) -> SamplesCost | None:
    """Returns what sampling a batch of completions takes; None where nothing is sampled."""
    if workload.samples is None:
        return None
    predict: SamplesPredictor = resolve(workload.samples.predictor)
    return predict(workload, layout, machine)


def _costs(
    times: _Times, layout: Layout, memory: MemoryPlan, machine: Machine, shape: ModelShape, plan: PipelinePlan
) -> tuple[Costs, Work, list[PieceTime]]:
    """Returns the seconds of the stages' actions, the communication of a micro-batch on the rank with most exposed, and
    what each rank computes of one."""
    numbered = {number: stage for rank in range(plan.schedule.num_ranks) for number, stage in plan.stages(rank).items()}
    first = plan.schedule.first_trainable_stage
    stages = [_stage(times, memory, shape, numbered[number], trains=number >= first) for number in range(len(numbered))]
    ranks = [PieceTime()] * plan.schedule.num_ranks
    for number, stage in enumerate(stages):
        ranks[plan.schedule.stage_rank[number]] += stage
    # a rank's host launches a micro-batch's stages one after the other, ahead of its device
    waits = [ranks[plan.schedule.stage_rank[number]].waits for number in range(len(stages))]
    neighbours = layout.world_size if layout.parallel.pipeline > 1 else 1
    costs = Costs(
        forward=tuple(wait * stage.forward.seconds for wait, stage in zip(waits, stages, strict=True)),
        input_grad=tuple(wait * stage.backward.seconds for wait, stage in zip(waits, stages, strict=True)),
        weight_grad=tuple(wait * stage.weights for wait, stage in zip(waits, stages, strict=True)),
        activation=(1.0,) * len(stages),
        transfer=times.message / (machine.wire(neighbours) * 1e9),
    )
    busiest = max((one.forward + one.backward for one in ranks), key=lambda work: (work.links, work.hidden))
    return costs, busiest, ranks


def _stage(times: _Times, memory: MemoryPlan, shape: ModelShape, stage: Part, *, trains: bool) -> PieceTime:
    """Returns the work of one stage."""
    found = PieceTime()
    if stage.embedding:
        found += times.embedding(memory.level(0), trains=trains)
    for index in range(stage.first, stage.last):
        layer = times.layer(shape.kinds[index], memory.level(index))
        # what has no backward launches about a third of the kernels
        ahead = PieceTime(layer.forward, host=layer.host / 3)
        found += layer if trains and index >= shape.first_trainable_layer else ahead
    return found + times.head() if stage.head else found


def _reduction(
    workload: Workload, layout: Layout, machine: Machine, shape: ModelShape, costs: Costs
) -> tuple[float, float]:
    """Returns the seconds of the collectives that sum gradients and gather updated weights, and of them the exposed.

    A ring sends (n - 1) / n of the bytes for a reduce-scatter or an all-gather, and twice that for an all-reduce.
    Gradients are summed in fp32. The backward of the last micro-batch hides all buckets but the last one, which is
    complete when it ends, and the next step's first forward hides the gathers. Sharded weights are gathered with the
    layers (`_Times`) and not here.
    """
    wire = machine.wire(layout.world_size) * 1e9
    bucket = layout.parallel.bucket_mb * 2**20
    sharding = STATE_SHARDING[layout.parallel.shard]
    sums = gathers = last = 0.0
    for data, elements in _trained(layout, shape).items():
        ranks = layout.copies[data]
        ring = (ranks - 1) / ranks / wire
        passes = 1 if sharding.gradients else 2
        sums += passes * ring * WIDE * elements
        last = max(last, passes * ring * min(bucket, WIDE * elements))
        if sharding.masters and not sharding.weights:
            gathers += ring * workload.dtype.itemsize * elements
    backward = max(map(sum, zip(costs.input_grad, costs.weight_grad, strict=True)))
    exposed = max(last, sums - backward) + max(0.0, gathers - max(costs.forward))
    return sums + gathers, exposed


def _update(workload: Workload, layout: Layout, machine: Machine, shape: ModelShape) -> float:
    """Returns the seconds of the update: masters, moments and gradients are read and written once, or masters and
    moments are copied from host memory and back."""
    is_sharded = STATE_SHARDING[layout.parallel.shard].masters
    own = sum(
        elements / (layout.copies[data] if is_sharded else 1) for data, elements in _trained(layout, shape).items()
    )
    update = 8 * WIDE * own / (machine.copies * 1e9)
    return max(update, 3 * WIDE * own / (machine.host * 1e9)) if workload.offload_optimizer else update


def _trained(layout: Layout, shape: ModelShape) -> dict[str, float]:
    """Returns the trained elements of a rank by the axis that their gradients are summed over, as if pipeline ranks had
    equally many."""
    return {data: count / layout.parallel.pipeline for data, count in shape.trained_elements().items()}
