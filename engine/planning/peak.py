"""A rank's peak memory by part: in a step, while loading and while saving.

Static memory is counted on a model on the meta device: weights with their folded columns, adapters, and four fp32
buffers over what trains. A step's allocations are traced through one micro-batch of each stage (`stage_bytes.py`), and
put together in the order of the pipeline's schedule. Not counted: allocations of a library inside its own calls, the
device's context and its communicators, and memory that a caching allocator holds unused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from engine.choices import STORED
from engine.kernels import reference_formats
from engine.kernels.formats import FORMATS
from engine.kernels.reference_quantize import CHUNK
from engine.layers.recompute import MemoryPlan
from engine.ops.head_loss import BLOCK_BYTES
from engine.optim.host_state import NUM_STATES, device_bytes
from engine.optim.publish import PREFETCHED
from engine.optim.reduce import MAX_IN_FLIGHT, SQUARED_AT_ONCE
from engine.optim.state_sharding import ShardLevel
from engine.planning.ledger import (
    ADAPTERS,
    BATCHES,
    COMMUNICATION,
    DECODED,
    GRADIENTS,
    JUDGES,
    LOGITS,
    MASTERS,
    OPTIMIZER,
    TEMPORARY,
    WEIGHTS,
    Parts,
    added,
    largest_part,
    total,
    without,
)
from engine.planning.pipeline_parts import PipelinePlan, messages_held, pipeline_plan
from engine.planning.rank_layout import Companion, Layout, SamplesPredictor, Workload
from engine.planning.shapes import WIDE, Parameters, RegionKey
from engine.planning.stage_bytes import StageBytes, stage_bytes
from engine.planning.traces import RankModel, rank_model
from engine.seams import resolve

_BATCH_BYTES = 4 * 8 + 4
"""Bytes of a token: its id, label, position and dropout coordinate as int64, its loss weight as fp32."""
_ENCODING_BYTES = {"nf4": 14, "int8": 9, "fp8": 9, "fp8_row": 9}
"""Bytes of a number being encoded, beside its source: an fp32 copy, a scaled one, its scale, and its codes."""
_FORMAT_BYTES = 16
"""The same of the vendors' formats, which are encoded in smaller chunks."""
_ANSWER_BYTES = 8
"""Bytes of a token's answer number, where answers are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSharding:
    """The tensors that are sharded over the ranks that sum gradients."""

    masters: bool = False
    moments: bool = False
    gradients: bool = False
    weights: bool = False


STATE_SHARDING: dict[ShardLevel, StateSharding] = {
    "none": StateSharding(),
    "optimizer": StateSharding(masters=True, moments=True),
    "gradients": StateSharding(masters=True, moments=True, gradients=True),
    "parameters": StateSharding(masters=True, moments=True, gradients=True, weights=True),
}
"""The levels of engine.optim.state_sharding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakEstimate:
    """A prediction for one rank. Bytes.

    Args:
        parts: bytes at the peak of a step, by part (`engine.planning.ledger.PARTS`).
        moment: the phase of that peak: "forward", "backward" or "optimizer step".
        static: those of `parts` that are allocated all the time.
        load: peak while the model is built and read.
        save: peak while a checkpoint is written.
        host: bytes of host memory that is offloaded to, beside all this.
        sampling: peak while completions are sampled, of an objective that samples what it trains on; 0 for others.
        kept_codes: of that, the base's codes that are kept beside merged ones.
        pipeline_rank: the rank whose peak this is.
    """

    parts: Parts
    moment: str
    static: Parts
    load: int
    save: int
    host: int = 0
    sampling: int = 0
    kept_codes: int = 0
    pipeline_rank: int = 0

    @property
    def step(self) -> int:
        """Peak bytes of a step."""
        return total(self.parts)

    @property
    def peak(self) -> int:
        """Peak bytes over loading, sampling, steps and saving."""
        return max(self.step, self.load, self.save, self.sampling)

    def fullest(self) -> tuple[str, Parts]:
        """Returns the phase of the overall peak, and its bytes by part; of a step's phases, and of others the static
        ones."""
        moments = {self.moment: self.step, "loading": self.load, "saving": self.save, "sampling": self.sampling}
        moment = max(moments, key=lambda name: moments[name])
        return moment, self.parts if moment == self.moment else self.static

    def largest_part(self) -> str:
        """Returns the part with the most bytes of a step."""
        return largest_part(self.parts)


def fullest(estimates: Iterable[PeakEstimate]) -> PeakEstimate:
    """Returns the estimate with the highest peak."""
    return max(estimates, key=lambda one: one.peak)


def predict_layout(workload: Workload, layout: Layout, memory: MemoryPlan) -> list[PeakEstimate]:
    """Returns an estimate for each pipeline rank; its tensor, context and data neighbours hold as much, or less where
    all tokens choose this rank's experts (`workload.routing`).

    Raises:
        UserError: the model's sizes do not fit the layout, or its layers cannot be split over the stages.
    """
    memory.check_layers(workload.decoder.num_layers)
    return [rank.estimate() for rank in _ranks(workload, layout, memory)]


def predict_static(workload: Workload, layout: Layout) -> list[PeakEstimate]:
    """Returns for each pipeline rank the bytes that it always holds, a lower bound of every step: nothing is traced.

    Raises:
        UserError: as of `predict_layout`.
    """
    return [rank.estimate(traced=False) for rank in _ranks(workload, layout, MemoryPlan())]


def _ranks(workload: Workload, layout: Layout, memory: MemoryPlan) -> list[_Rank]:
    workload = workload.on(layout)
    model = rank_model(workload, layout.parallel)
    plan = pipeline_plan(workload.decoder, model.shape, layout.parallel, workload.num_microbatches(layout))
    return [_Rank(workload, layout, memory, model, plan, rank) for rank in range(layout.parallel.pipeline)]


class _Rank:
    """One pipeline rank."""

    def __init__(
        self, workload: Workload, layout: Layout, memory: MemoryPlan, model: RankModel, plan: PipelinePlan, rank: int
    ) -> None:
        self._workload, self._layout, self._memory, self._model = workload, layout, memory, model
        self._plan, self._rank, self._shape = plan, rank, model.shape
        self._copies = layout.copies
        self._sharding = STATE_SHARDING[layout.parallel.shard if max(self._copies.values()) > 1 else "none"]
        self._stages = plan.stages(rank)

    def estimate(self, *, traced: bool = True) -> PeakEstimate:
        static = self._static()
        stages = {number: self._stage(number) for number in self._stages} if traced else {}
        moments = list(self._moments(stages)) if traced else [("forward", {})]
        moment, moving = max(moments, key=lambda pair: total(pair[1]))
        written = max((group.largest for group in self._groups() if group.trained), default=0)
        return PeakEstimate(
            parts=added(static, moving),
            moment=moment,
            static=static,
            load=self._load(static),
            save=total(static) + written * WIDE,
            host=self._host() + (self._peak_offloaded(stages) if traced else 0),
            sampling=total(static) + self._sampling() if traced and self._workload.samples is not None else 0,
            kept_codes=self._kept_codes() - self._kept_on_host(),
            pipeline_rank=self._rank,
        )

    def _sampling(self) -> int:
        """Counts the cache, what passes take beside it, and the base's codes where merged ones stand in their place."""
        samples = self._workload.samples
        assert samples is not None
        predict: SamplesPredictor = resolve(samples.predictor)
        return predict(self._workload, self._layout, None).peak + self._kept_codes() - self._kept_on_host()

    def _kept_codes(self) -> int:
        """Counts the base's codes that are kept while completions are sampled from merged ones."""
        if not self._workload.merges_once:
            return 0
        merged = Counter[str]()
        for group in self._groups():
            merged[group.data] += group.merged
        return self._held(self._sharding.weights, merged)

    def _kept_on_host(self) -> int:
        """Counts those of offloaded weights."""
        if not (self._workload.merges_once and self._workload.offload_weights):
            return 0
        return sum(group.merged_moved for group in self._groups())

    def _units(self) -> Iterator[tuple[Parameters, ...]]:
        """Yields the parameters of this rank's layers and ends, in the order of forward."""
        shape = self._shape
        for stage in self._stages.values():
            if stage.embedding:
                yield (shape.embedding_parameters,)
            yield from shape.layer_parameters[stage.first : stage.last]
            if stage.head:
                yield (shape.head_parameters,)
                if shape.tied and not stage.embedding and not self._plan.ends_meet:
                    yield (shape.embedding_parameters,)  # the copy of a tied head

    def _groups(self) -> Iterator[Parameters]:
        """Yields the same, what other ranks hold copies of by itself."""
        return chain.from_iterable(self._units())

    def _regions(self) -> dict[RegionKey, int]:
        """Returns the number of elements of each region of the optimizer."""
        regions: dict[RegionKey, int] = {}
        for group in self._groups():
            for key, count in group.trained.items():
                regions[key] = regions.get(key, 0) + count
        return regions

    def _static(self) -> dict[str, int]:
        """Counts weights in the model's dtype, and masters, gradients and two moments of trained ones in fp32."""
        item, groups = self._workload.dtype.itemsize, list(self._groups())
        beside = self._beside()
        whole = item * sum(one.whole for one in groups)
        base, adapters = Counter({"dp_cp": beside - whole}), Counter[str]()
        for one in groups:
            base[one.data] += one.base_bytes(item)
            adapters[one.data] += item * one.adapters
        flat = self._flat()
        parts = {
            WEIGHTS: self._held(self._sharding.weights, base) + whole,
            ADAPTERS: self._held(self._sharding.weights, adapters),
            MASTERS: self._held(self._sharding.masters, flat),
            GRADIENTS: self._held(self._sharding.gradients, flat),
            OPTIMIZER: (2 + self._references) * self._held(self._sharding.moments, flat),
            DECODED: self._scratch(),
        }
        if self._workload.offload_weights:
            parts[WEIGHTS] -= sum(group.moved_bytes(item) - group.copied * item for group in groups)
        if self._workload.offload_optimizer:
            # sharded masters are sent from a copy in the weights' dtype
            parts[MASTERS] = parts[MASTERS] // WIDE * item if self._sharding.masters else 0
            parts[OPTIMIZER] = device_bytes(self._largest_span())
        parts[WEIGHTS] += sum(map(self._companion, self._workload.companions))
        if self._workload.block_losses and any(stage.head for stage in self._stages.values()):
            parts[LOGITS] = self._distributions()
        samples = self._workload.samples
        if samples is not None and samples.neighbour is not None:
            parts[JUDGES] = samples.neighbour.on_rank(self._layout, self._rank)
        return added(parts)

    def _companion(self, companion: Companion) -> int:
        """Counts the weights of a frozen model beside the trained one, adapters among them."""
        static = predict_static(self._workload.of_companion(companion), self._layout)[self._rank].static
        return static.get(WEIGHTS, 0) + static.get(ADAPTERS, 0)

    @property
    def _references(self) -> int:
        """Further copies of the masters: 1 where a reference moves."""
        samples = self._workload.samples
        return int(samples is not None and samples.moves_reference)

    def _distributions(self) -> int:
        """Counts what the loss of whole distributions has in blocks, and the outputs of teachers that it keeps."""
        workload, parallel = self._workload, self._layout.parallel
        tokens = workload.micro_batch * workload.seq_length // parallel.context
        block = min(BLOCK_BYTES, WIDE * tokens * -(-workload.decoder.vocab_size // parallel.tensor))
        held = tokens // (parallel.tensor if parallel.sequence_parallel else 1)
        widths = sum(one.decoder.hidden for one in workload.companions) if workload.keeps_outputs else 0
        kept = held * widths * workload.dtype.itemsize * workload.num_microbatches(self._layout)
        return workload.block_losses * block + kept

    def _flat(self) -> Counter[str]:
        """Returns the bytes of a flat fp32 buffer over trained parameters, by the axis that gradients are summed
        over."""
        flat = Counter[str]()
        for (data, *_), count in self._regions().items():
            flat[data] += WIDE * count
        return flat

    def _held(self, sharded: bool, nbytes: Mapping[str, int]) -> int:
        """Returns this rank's share of bytes that are counted by axis: its part, where they are sharded."""
        return sum(-(-count // self._copies[data]) if sharded else count for data, count in nbytes.items())

    def _beside(self) -> int:
        """Counts the frozen parameters outside the decoder, divided over ranks like those of layers."""
        parallel = self._layout.parallel
        nbytes: int = self._workload.beside * self._workload.dtype.itemsize
        return nbytes // (parallel.tensor * parallel.pipeline)

    def _scratch(self) -> int:
        """Counts the scratch: the largest matrix that is decoded on this rank, with the columns of folded adapters."""
        stages = self._stages.values()
        linears = [
            one
            for stage in stages
            for layer in self._shape.layers[stage.first : stage.last]
            for one in layer.linears
            if one.is_decoded
        ]
        elements = max((one.outputs * (one.inputs + one.extra) for one in linears), default=0)
        return max(elements * self._workload.dtype.itemsize, self._shape.decoded_experts)

    def _largest_span(self) -> int:
        """Returns the elements of the largest span of this rank's masters; see `engine.optim.flat.Span`."""
        sharded, bucket = self._sharding.masters, self._bucket()
        limit = bucket if sharded and not self._sharding.gradients else None
        return max(
            (
                self._held(sharded, {data: count if limit is None else min(count, limit)})
                for (data, *_), count in self._regions().items()
            ),
            default=0,
        )

    def _host(self) -> int:
        """Counts the host memory of offloaded weights, masters and moments."""
        weights = state = 0
        if self._workload.offload_weights:
            weights = sum(group.moved_bytes(self._workload.dtype.itemsize) for group in self._groups())
            weights += self._kept_on_host()
        if self._workload.offload_optimizer:
            state = (NUM_STATES + self._references) * self._held(self._sharding.masters, self._flat())
        return weights + state

    def _load(self, static: Parts) -> int:
        """Counts loading: weights, masters and gradients without moments, and one tensor in the dtype it is stored in,
        at most fp32; beside a base in few bits in that of the model, as a rule. Encoding it takes copies of a chunk of
        it, see `engine.kernels.reference_quantize`; gate and up are there together where they share a scale."""
        groups, base = list(self._groups()), self._workload.base_dtype
        largest = max((group.largest for group in groups), default=0)
        encoding, width, together = 0, WIDE, 1
        if base == STORED:
            width = self._workload.dtype.itemsize
        elif (each := _ENCODING_BYTES.get(base or "")) is not None:
            encoding = min(largest, CHUNK) * each
        elif base is not None:
            encoding = min(largest, reference_formats.CHUNK) * _FORMAT_BYTES
            together = 2 if FORMATS[base].has_tensor_scale else 1
        there = without(static, {name: static[name] for name in (OPTIMIZER, DECODED)})
        return total(there) + together * largest * width + encoding

    # A step.

    def _gathered(self, microbatches: int) -> dict[str, int]:
        """Counts the weights of two layers, one in use and one prefetched; and whole buckets of gradients until they
        are reduced: a few with one micro-batch a step, all with more."""
        weights = gradients = 0
        item = self._workload.dtype.itemsize
        if self._sharding.weights or self._workload.offload_weights:
            layers = [
                sum(
                    one.moved_bytes(item)
                    if self._workload.offload_weights
                    else one.gathered_bytes(item, self._copies[one.data])
                    for one in unit
                )
                for unit in self._units()
            ]
            weights = max(sum(pair) for pair in zip(layers, [*layers[1:], 0], strict=True))
        if self._sharding.gradients:
            # gradients of which one rank has all the data are whole anyway
            whole = sum(count for (data, *_), count in self._regions().items() if self._copies[data] > 1)
            gradients = whole if microbatches > 1 else min(whole, (MAX_IN_FLIGHT + 2) * self._bucket())
        return {COMMUNICATION: weights, GRADIENTS: gradients * WIDE}

    def _bucket(self) -> int:
        """Returns the elements of a bucket of gradients."""
        bucket = int(self._layout.parallel.bucket_mb * 2**20) // WIDE
        return min(bucket, sum(self._regions().values()))

    def _moments(self, stages: dict[int, StageBytes]) -> Iterator[tuple[str, Parts]]:
        """Yields the bytes of each phase that may be the peak, without the static ones."""
        count = self._workload.num_microbatches(self._layout)
        token = _BATCH_BYTES + (_ANSWER_BYTES if self._workload.answers else 0)
        pixels = self._model.pixels if any(stage.embedding for stage in self._stages.values()) else 0
        batches = added({BATCHES: (token * self._model.tokens + pixels) * count}, self._gathered(count))
        alive: dict[tuple[int, int], Parts] = {}
        deferred: dict[tuple[int, int], Parts] = {}
        for action, waiting in messages_held(self._plan.schedule, self._rank, polls_sends=self._workload.polls_sends):
            key, stage = (action.stage, action.microbatch), stages[action.stage]
            messages = {COMMUNICATION: self._model.message * waiting}
            others = added(batches, messages, *alive.values(), *deferred.values())
            if action.op == "F":
                yield "forward", added(others, stage.forward)
                if stage.backward:
                    alive[key] = stage.kept
            elif action.op in ("B", "I"):
                yield "backward", added(without(others, alive.pop(key)), stage.backward)
                if action.op == "I":
                    deferred[key] = stage.deferred
            else:
                deferred.pop(key)
        yield from self._update(batches)

    def _peak_offloaded(self, stages: dict[int, StageBytes]) -> int:
        """Returns the peak of offloaded activations: those of micro-batches whose backward has not run yet."""
        now = most = 0
        for action in self._plan.schedule.actions[self._rank]:
            nbytes = stages[action.stage].away
            now += nbytes if action.op == "F" else -nbytes if action.op in ("B", "I") else 0
            most = max(most, now)
        return most

    def _update(self, batches: Parts) -> Iterator[tuple[str, Parts]]:
        """Yields the optimizer step: some elements in fp64 where plain torch computes the gradient's norm, and, where
        masters are sharded, the weights of the buckets that are gathered at a time."""
        squared = 0
        if self._workload.square_sum_writes:
            squared = 8 * min(SQUARED_AT_ONCE, max(self._regions().values(), default=0))
        gathered = 0
        if self._sharding.masters:
            whole = sum(self._regions().values())
            gathered = min(whole, (PREFETCHED + 1) * self._bucket()) * self._workload.dtype.itemsize
        without_whole = without(batches, {GRADIENTS: batches[GRADIENTS]})
        yield "optimizer step", added(without_whole, {TEMPORARY: squared})
        yield "optimizer step", added(without_whole, {COMMUNICATION: gathered})

    def _stage(self, number: int) -> StageBytes:
        first = self._plan.schedule.first_trainable_stage
        return stage_bytes(
            self._model,
            self._stages[number],
            self._memory,
            trains=number >= first,
            gives_gradient=number > first,
            defers=any(action.op == "I" for action in self._plan.schedule.actions[self._rank]),
        )
