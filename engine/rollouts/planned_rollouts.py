"""Predicts the memory and time of a rollout by the model that trains: cache, prompts, and the passes that decode.

The engine's own generation (`engine.inference.model_part`) runs on the meta device, as the pieces of a step do: a pass
of prompts and one of a token for every slot, halfway through the completions, while launches and storages are recorded.
So nothing here knows how a cache is laid out or what a pass launches. The first layers run, all kinds of layers among
them, and count for those that are like them. Prompts and completions all have the same length;
rows that end early give their slots to others, so that all passes but the last have a row in every slot. Completions of
several turns have as many as rollout.max_turns allows, two where it does not say. The results between two of them are
part of the completion, and run in a pass of their own behind the row's tokens in the cache.

What is computed on all pipeline ranks counts as if they ran in turn, which they do. Not counted: reward functions, and
the private memory of graphs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise

import torch

from engine.config.parallel import ParallelOptions
from engine.distributed.mesh import Axis
from engine.inference.model_part import InferenceStage
from engine.inference.options import Sampling
from engine.inference.pages import PAGE
from engine.inference.prompt_coordinates import text_coordinates
from engine.layers.merged_codes import merging_storages
from engine.models.decoder import Decoder, Part, build_decoder
from engine.models.layer_kinds import layer_kinds
from engine.planning.launch_times import launch_seconds
from engine.planning.launches import Launch, LaunchCounter, TorchAttention
from engine.planning.ledger import total
from engine.planning.machine import Machine
from engine.planning.pipeline_parts import pipeline_plan
from engine.planning.rank_layout import Layout, Samples, SamplesCost, Workload
from engine.planning.recording import Recording
from engine.planning.traced_batch import META
from engine.planning.traces import counted_layout, rank_model, shape_layout
from engine.rollouts.cache_size import PREFILL_TOKENS, cache_size

_LAYER = re.compile(r"layers\.(\d+)\b")
"""The number in the name of a layer, or of a part of one."""
_TURNS = 2
"""Turns of a completion whose model may call tools, where rollout.max_turns does not say; an assumption."""
_RESULT_TOKENS = 64
"""Tokens of the results between two turns, as far as there is room for them; an assumption."""
LATENCY = 12e-6
"""Seconds of a small collective between GPUs of a node; an estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Traced:
    """The passes of one rank with all layers.

    Args:
        cache: bytes of the cache, of each layer.
        beside: bytes at the peak of both passes, without the cache.
        prompts: in the pass of prompts.
        prefill, decode: launches of the passes.
        turn: launches of the pass between two turns of a row; none where completions have one turn.
        merges: launches that merge adapters into codes before the first pass.
        graphs: whether decode passes can be graphs.
    """

    cache: tuple[int, ...]
    beside: int
    prompts: int
    prefill: tuple[Launch, ...]
    decode: tuple[Launch, ...]
    turn: tuple[Launch, ...]
    merges: tuple[Launch, ...]
    graphs: bool


def predict_rollout(workload: Workload, layout: Layout, machine: Machine | None) -> SamplesCost:
    """Predicts a rollout; see `engine.planning.rank_layout.SamplesPredictor`. Of a server that samples elsewhere, all
    is 0."""
    samples = workload.samples
    assert samples is not None
    if samples.options.server is not None:
        return SamplesCost(
            cache=0, peak=0, prefill=0.0, decode=0.0, passes=0, pass_seconds=0.0, launches=0, graphed=False,
            host_limits=False,
        )  # fmt: skip
    parallel = layout.parallel
    traced, cache = _traced(workload, layout, samples)
    peak = traced.beside + cache
    evaluated = replace(samples, options=samples.options.for_evaluation())
    if evaluated.options.num_generations < samples.options.num_generations:  # more prompts, each with its own cache
        other, own = _traced(workload, layout, evaluated)
        peak, cache = max(peak, other.beside + own), max(cache, own)
    rows = -(-samples.batch // layout.data_and_context)
    slots, group = samples.options.slots, samples.options.num_generations
    prompts = -(-rows // group)
    passes = max(0, -(-rows * (samples.completion - 1) // slots))
    graphed = traced.graphs and samples.options.cuda_graph == "auto" and workload.device_type == "cuda"
    graphed = graphed and parallel.pipeline == 1 and parallel.expert == 1 and parallel.shard != "parameters"
    turns = (samples.options.max_turns or _TURNS) if samples.options.takes_turns else 1
    prefill = decode = each = between = merging = 0.0
    host_limits = False
    if machine is not None:
        ahead, host = _seconds(traced.prefill, machine)
        links = _links(workload, layout, machine, PREFILL_TOKENS)
        first = samples.prompt / _prompt_length(samples)
        if samples.options.environment is not None or samples.options.agent is not None:
            prompts = rows  # each may have another one
        prefill = -(-prompts // traced.prompts) * max(first * (ahead + links), host)
        if turns > 1:  # the results before each further turn, in a pass of their own
            device, host = _seconds(traced.turn, machine)
            between = (
                rows * (turns - 1) * max(device + _links(workload, layout, machine, _result_tokens(samples)), host)
            )
        merging = max(_seconds(traced.merges, machine)) / parallel.pipeline
        device, host = _seconds(traced.decode, machine.graphed() if graphed else machine)
        device += _links(workload, layout, machine, slots)
        each, host_limits = max(device, host), host > device
        decode = passes * each
    choice = _choice(traced.decode)
    return SamplesCost(
        cache=cache,
        peak=peak,
        prefill=prefill,
        decode=decode,
        passes=passes,
        turns=turns,
        result_tokens=_result_tokens(samples) if turns > 1 else 0,
        between=between,
        merging=merging,
        pass_seconds=each,
        launches=sum(one.count for one in traced.decode),
        nbytes=sum(one.nbytes for one in traced.decode),
        choice_launches=sum(one.count for one in choice),
        choice_bytes=sum(one.nbytes for one in choice),
        graphed=graphed,
        host_limits=host_limits,
    )


def _traced(workload: Workload, layout: Layout, samples: Samples) -> tuple[_Traced, int]:
    """Returns the passes that sample in one way, and the bytes of their cache where it is largest."""
    own = replace(workload, samples=samples)
    found = _trace(replace(own, global_batch=0, beside=0, companions=(), graphed=False), _whole(layout.parallel))
    return found, _largest_cache(found, own, layout)


def _choice(decode: Sequence[Launch]) -> Sequence[Launch]:
    """Returns the launches of a pass that follow its last product, which is the head's."""
    products = [place for place, one in enumerate(decode) if one.result is not None]
    return decode[products[-1] + 1 :] if products else ()


def _seconds(launches: Iterable[Launch], machine: Machine) -> tuple[float, float]:
    """Returns the seconds of the device, and of the host that launches."""
    found = list(launches)
    host = machine.host_launch * sum(one.count for one in found)
    return sum(launch_seconds(one, machine) for one in found), host


def _links(workload: Workload, layout: Layout, machine: Machine, tokens: int) -> float:
    """Returns the seconds of a pass's collectives: two sums over tensor ranks in each layer, and the gathers of sharded
    weights, which nothing hides where a pass is short."""
    parallel, decoder, item = layout.parallel, workload.decoder, int(workload.dtype.itemsize)
    seconds = 0.0
    if (ranks := parallel.tensor) > 1:
        moved = 2 * (ranks - 1) / ranks * tokens * decoder.hidden * item
        seconds += 2 * decoder.num_layers * (moved / (machine.wire(ranks) * 1e9) + LATENCY)
    if parallel.shard == "parameters":
        shape = rank_model(workload, parallel).shape
        for one in chain.from_iterable(shape.layer_parameters):
            ranks = layout.copies.get(one.data, 1)
            gathered = one.gathered_bytes(item, ranks) * (ranks - 1) / ranks
            seconds += gathered / (machine.wire(layout.world_size) * 1e9) + (LATENCY if ranks > 1 else 0.0)
    return seconds


def _whole(parallel: ParallelOptions) -> ParallelOptions:
    """Returns the part of a layout that decides what a rank with all layers computes."""
    return ParallelOptions(
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        lora_reduce=parallel.lora_reduce,
    )


def _largest_cache(traced: _Traced, workload: Workload, layout: Layout) -> int:
    """Returns the bytes of the cache on the pipeline rank where it is largest."""
    if layout.parallel.pipeline == 1:
        return sum(traced.cache)
    model = rank_model(workload, layout.parallel)
    plan = pipeline_plan(workload.decoder, model.shape, layout.parallel, workload.num_microbatches(layout))
    return max(
        sum(sum(traced.cache[stage.first : stage.last]) for stage in plan.stages(rank).values())
        for rank in range(layout.parallel.pipeline)
    )


class _LayerMarks:
    """Where the launches of each layer begin and end, to count those of layers that are alike.

    Args:
        model: with the first layers, all kinds among them.
        kinds: for each layer of the whole model the number of the first one that is like it.
        counter: of the launches.
    """

    def __init__(self, model: Decoder, kinds: Sequence[int], counter: LaunchCounter) -> None:
        self._kinds, self._counter = kinds, counter
        self._marks: list[int] = []
        layers = [*model.called_layers.values()]
        for layer in layers:
            layer.register_forward_pre_hook(self._mark)
        layers[-1].register_forward_hook(self._mark)

    def _mark(self, *_: object) -> None:
        self._marks.append(len(self._counter.launches))

    def begin(self) -> None:
        """Starts a pass."""
        self._counter.launches.clear()
        self._marks.clear()

    def launches(self) -> tuple[Launch, ...]:
        """Returns the launches of a pass of the whole model."""
        found, ends = self._counter.launches, self._marks
        layers = [found[start:end] for start, end in pairwise(ends)]
        return (*found[: ends[0]], *chain.from_iterable(layers[kind] for kind in self._kinds), *found[ends[-1] :])


@lru_cache(maxsize=64)
def _trace(workload: Workload, parallel: ParallelOptions) -> _Traced:
    """Runs a pass of prompts and a pass that decodes on the meta device."""
    samples = workload.samples
    assert samples is not None
    options = samples.options
    recording, counter = Recording(), LaunchCounter(packed=True)
    layout = counted_layout(shape_layout(workload, parallel, lambda axis, tensor: None), counter)
    decoder = workload.decoder
    kinds = layer_kinds(decoder, workload.plan)
    first = max(kinds) + 1  # layers, among which are all kinds
    with recording:
        model = build_decoder(
            decoder,
            layout=layout,
            plan=workload.plan,
            device=META,
            dtype=workload.dtype,
            part=Part(first=0, last=first),
        )
        model.inverse_frequencies = tuple(one.to(META) for one in model.inverse_frequencies)
        if layout.base is not None:
            layout.base.scratch.take((0,), torch.uint8, META)
    marks = _LayerMarks(model, kinds, counter)
    cache = cache_size(options, prompt=samples.prompt, row=workload.seq_length)
    with recording, counter, TorchAttention(counter), torch.no_grad():
        merges = _merges(model, kinds, counter) if workload.merges_once else ()
        before, begin = recording.alive(), len(recording.events)
        stage = InferenceStage(
            model,
            tp=layout.tp,
            pp=Axis("pp"),
            sampling=_sampling(samples),
            slots=options.slots,
            length=cache.length,
            new=cache.new,
            group=cache.group,
            conversations=cache.conversations,
            device=META,
            with_logps=True,
            tokens_multiple=options.slots,
        )
        marks.begin()
        prompts = _prompts_at_once(samples)
        _prefill(stage, samples, prompts)
        prefill = marks.launches()
        decode: tuple[Launch, ...] = ()
        if samples.completion > 1:
            place = _half_way(stage, samples)
            marks.begin()
            stage.decode([place] * options.slots, [place] * options.slots, range(options.slots))
            decode = marks.launches()
        turn: tuple[Launch, ...] = ()
        if options.takes_turns:
            length, new = _prompt_length(samples), _result_tokens(samples)
            marks.begin()
            stage.continue_row(0, range(length), length - new, range(length - new, length), 0)
            turn = marks.launches()
        found = Counter[int]()
        for name, nbytes in stage.cache.bytes_by_layer().items():
            layers = _LAYER.findall(name)  # none in what is kept for all of them
            found[int(layers[0]) if layers else 0] += nbytes
        return _Traced(
            cache=tuple(found[kind] for kind in kinds),
            beside=total(recording.peak(begin, before)) - found.total(),
            prompts=prompts,
            prefill=prefill,
            decode=decode,
            turn=turn,
            merges=merges,
            graphs=stage.graph_obstacle is None,
        )


def _merges(model: Decoder, kinds: Sequence[int], counter: LaunchCounter) -> tuple[Launch, ...]:
    """Puts merged codes in the place of the base's; returns the launches for the whole model.

    Args:
        model, kinds, counter: as of `_LayerMarks`.
    """
    layers = []
    for layer in model.called_layers.values():
        counter.launches.clear()
        for storage in merging_storages((layer,)):
            storage.merge_in_place()
        layers.append(tuple(counter.launches))
    return tuple(chain.from_iterable(layers[kind] for kind in kinds))


def _sampling(samples: Samples) -> Sampling:
    options = samples.options
    return Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=samples.seed % 2**32,
    )


def _prompts_at_once(samples: Samples) -> int:
    """Returns the prompts of one pass: as many as have room in its tokens, and slots for their completions."""
    options = samples.options
    if options.environment is not None or options.agent is not None:
        return 1
    by_slots = max(1, options.slots // options.num_generations)
    found = min(by_slots, max(1, PREFILL_TOKENS // samples.prompt))
    # of tools, whose prompts begin together, longer rows that have as many tokens
    return -(-found * samples.prompt // _prompt_length(samples))


def _prompt_length(samples: Samples) -> int:
    """Returns the tokens of the prompts in a traced pass: the last turn of several continues nearly a whole row."""
    return samples.tokens - 1 if samples.options.takes_turns else samples.prompt


def _result_tokens(samples: Samples) -> int:
    """Returns the tokens of the results between two turns."""
    return max(1, min(_RESULT_TOKENS, samples.completion // 2))


def _rows_of_each(samples: Samples, prompts: int) -> int:
    """Returns the rows that continue each prompt of a pass."""
    options = samples.options
    return 1 if options.takes_turns else min(options.slots // prompts, options.num_generations)


def _half_way(stage: InferenceStage, samples: Samples) -> int:
    """Gives every slot a row, and all rows the pages of half of a completion; returns the place of their newest token.

    Args:
        stage: that has run a pass of prompts.
    """
    slots, group = samples.options.slots, samples.options.num_generations
    prompts = _prompts_at_once(samples)
    for first in range(prompts * _rows_of_each(samples, prompts), slots, group):
        own = range(first, min(first + group, slots))
        stage.cache.begin(own, samples.prompt, samples.options.max_completion_length, waits=False)
    last = samples.prompt + samples.completion // 2
    places = [samples.prompt, *range(samples.prompt // PAGE * PAGE + PAGE, last, PAGE)]
    for place in places:
        stage.cache.write([place] * slots)
    return last


def _prefill(stage: InferenceStage, samples: Samples, prompts: int) -> None:
    """Runs the prompts, and gives every slot a row, as `engine.inference.generate` would."""
    length = _prompt_length(samples)
    new = samples.prompt + samples.options.max_completion_length - length
    each = _rows_of_each(samples, prompts)
    rows = [range(first * each, (first + 1) * each) for first in range(prompts)]
    for own in rows:
        stage.cache.begin(own, length, new, waits=False)
    stage.prefill([range(length)] * prompts, text_coordinates([length] * prompts), 0, rows)
