"""Searches the layouts of a number of devices that fit their memory, ranks them by predicted step time, and recommends
one.

Every factorisation into tensor x context x pipeline x data ranks is tried, with and without sequence parallelism, with
one and with two stages a pipeline rank, with the experts of a mixture whole or cut and divided over every number of
ranks, and with the least recomputation that fits; where that is not none, with offload and fewer bits, too. Layouts
that a rule of the configuration refuses, or the proof of a model whose layers are not the engine's own, are listed with
the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import inf

import torch

from engine.choices import RECOMPUTE_LEVELS
from engine.config.parallel import ParallelOptions
from engine.config.rules import check_config, check_world
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.layers.recompute import Level, MemoryPlan
from engine.layers.rounding import FLOAT8
from engine.ops.attention.ulysses import check_context_heads
from engine.optim.state_sharding import ShardLevel
from engine.planning.machine import Machine, check_encoding
from engine.planning.peak import PeakEstimate, fullest, predict_layout, predict_static
from engine.planning.rank_layout import Layout, Routing, Workload
from engine.planning.stage_proofs import StageProofs
from engine.planning.step_time import StepTime, predict_time
from engine.telemetry.format import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """The question that a search answers.

    Args:
        config: sizes of the batch and trained parameters; its parallel and memory sections are not read.
        devices: number of devices.
        capacity: bytes of a device that may be used.
        host_capacity: bytes of host memory that a rank may use.
        recompute: the levels to try; all by default.
        offload: kinds of memory that may be offloaded to the host: "weights", "optimizer" and "activations".
        stored: the dtypes to try for kept activations; None is their own.
        routing: under which a layout must fit where experts are divided over ranks; see engine.planning.traced_batch.
    """

    config: RunConfig
    devices: int
    capacity: float
    host_capacity: float = inf
    recompute: tuple[Level, ...] = RECOMPUTE_LEVELS
    offload: tuple[str, ...] = ()
    stored: tuple[torch.dtype | None, ...] = (None,)
    routing: Routing = "balanced"

    def holds(self, candidate: Candidate) -> bool:
        """Whether it fits the device and host memory."""
        return candidate.peak <= self.capacity and candidate.host <= self.host_capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout that the rules allow.

    Args:
        workload: with its offloaded parts.
        estimates: of all pipeline ranks, where tokens spread evenly over experts.
        crowded: the same where all tokens choose the experts of one rank, if that must fit.
        traced: whether the estimates are of whole steps; else they are of what is held all the time, which alone is
            too large.
        time: None where it does not fit.
    """

    layout: Layout
    workload: Workload
    memory: MemoryPlan
    estimates: tuple[PeakEstimate, ...]
    crowded: tuple[PeakEstimate, ...] | None = None
    traced: bool = True
    time: StepTime | None = None

    @property
    def estimate(self) -> PeakEstimate:
        """The estimate of the pipeline rank with the highest peak."""
        return fullest(self.estimates)

    @property
    def peak(self) -> int:
        """The bytes that must fit a device."""
        return fullest(self.crowded or self.estimates).peak

    @staticmethod
    def predict(workload: Workload, layout: Layout, memory: MemoryPlan, routing: Routing) -> Candidate:
        """Predicts a layout's memory, which must fit under `routing`."""
        estimates = tuple(predict_layout(workload, layout, memory))
        found = Candidate(layout=layout, workload=workload, memory=memory, estimates=estimates)
        return found if routing == "balanced" else replace(found, crowded=found.worst())

    def worst(self) -> tuple[PeakEstimate, ...]:
        """Predicts all pipeline ranks where all tokens choose the experts of one rank; where experts are not divided,
        as where they spread evenly."""
        if self.layout.parallel.expert == 1:
            return self.estimates
        return self.crowded or tuple(predict_layout(replace(self.workload, routing="worst"), self.layout, self.memory))

    @property
    def host(self) -> int:
        """The bytes of host memory of the pipeline rank that takes most."""
        return max(estimate.host for estimate in self.estimates)

    def label(self) -> str:
        """Returns layout and recomputation in a few words."""
        memory = self.memory
        layers = "" if memory.recompute_layers is None else f" of {counted(memory.recompute_layers, 'layer')}"
        workload = self.workload
        places = (workload.offload_weights, workload.offload_optimizer, memory.offload)
        away = [name for name, there in zip(("weights", "optimizer", "activations"), places, strict=True) if there]
        words = [f"recompute {memory.recompute}{layers}"]
        if away:
            words.append(f"{' and '.join(away)} in host memory")
        if memory.stored_dtype is not None:
            words.append(f"activations kept in {'float8' if memory.stored_dtype == FLOAT8 else 'bfloat16'}")
        return "; ".join((self.layout.label(), *words))


@dataclass(frozen=True, slots=True)
class RefusedLayout:
    """A layout that a rule refuses."""

    layout: Layout
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of a search.

    Args:
        fitting: the recommended one first (see SAME_TIME), then fastest first.
        too_large: layouts that do not fit however much is recomputed, smallest first; last those that were not traced.
        refused: layouts that a rule refuses.
    """

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: tuple[RefusedLayout, ...]


def search(
    wanted: SearchRequest,
    workload: Workload,
    machine: Machine,
    each: Callable[[Sequence[Layout]], Iterable[Layout]] = iter,
) -> SearchResult:
    """Tries every layout.

    Args:
        each: passes the layouts on while they are tried, and may show how far the search is.

    Raises:
        UserError: the machine has no products for the base's encoding, or of its codes where these are asked for.
    """
    check_encoding(machine, workload.base_dtype)
    fitting: list[list[Candidate]] = []
    too_large: list[Candidate] = []
    refused: list[RefusedLayout] = []
    decoder = workload.decoder
    proofs = StageProofs(workload) if wanted.config.model.proof else None
    places = layouts(wanted.devices, has_experts=decoder.divided_experts > 0, splits_tokens=decoder.splits_tokens)
    for layout in each(list(places)):
        try:
            _check(wanted, workload, layout)
            if proofs is not None:
                proofs.check(layout)
            tried = _least_sharding(wanted, workload, layout)
        except UserError as error:
            refused.append(RefusedLayout(layout, str(error)))
            continue
        too_large += [one for one in tried if not wanted.holds(one)]
        fitting.append([_timed(one, machine) for one in tried if wanted.holds(one)])
    limit = WORTH_KEEPING * min((_seconds(one)[0] for one in chain(*fitting)), default=0.0)
    shown: list[Candidate] = []
    for alike in fitting:
        kept = _with_more_kept(wanted, [one for one in alike if _seconds(one)[0] <= limit])
        shown += _fastest_alike(alike + [_timed(one, machine) for one in kept])[:_SHOWN_OF_A_LAYOUT]
    return SearchResult(
        fitting=_recommended_first(sorted(shown, key=_seconds)),
        too_large=_traced_first(wanted, too_large),
        refused=tuple(refused),
    )


def _timed(candidate: Candidate, machine: Machine) -> Candidate:
    return replace(candidate, time=predict_time(candidate.workload, candidate.layout, candidate.memory, machine))


def _with_more_kept(wanted: SearchRequest, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns those candidates that recompute norms and gates without that, where it fits."""
    if "none" not in wanted.recompute:
        return []
    found = [
        Candidate.predict(one.workload, one.layout, replace(one.memory, recompute="none"), wanted.routing)
        for one in candidates
        if one.memory.recompute == "selective"
    ]
    return [one for one in found if wanted.holds(one)]


WORTH_KEEPING = 1.25
"""Times the fastest step: no slower layout is fast enough to be shown if it recomputes neither norms nor gates."""


def _recommended_first(fitting: list[Candidate]) -> tuple[Candidate, ...]:
    """Moves the candidate that is recommended to the front: the fastest, unless others about as fast need clearly less
    memory, and of these the one that needs least.

    Args:
        fitting: fastest first.
    """
    if not fitting:
        return ()
    fastest = fitting[0]
    less = [one for one in fitting if _is_as_good(one, fastest) and one.peak <= (1 - LESS_MEMORY) * fastest.peak]
    best = min(less, key=lambda one: one.peak, default=fastest)
    return (best, *(one for one in fitting if one is not best))


def _is_as_good(one: Candidate, fastest: Candidate) -> bool:
    """Whether a candidate is as fast as the prediction can tell, rounds activations no further, and takes no more host
    memory."""
    assert one.time is not None and fastest.time is not None
    is_as_exact = one.memory.stored_dtype in (None, fastest.memory.stored_dtype)
    return one.time.step <= fastest.time.step * (1 + SAME_TIME) and is_as_exact and one.host <= fastest.host


def _traced_first(wanted: SearchRequest, too_large: list[Candidate]) -> tuple[Candidate, ...]:
    """Returns the layouts that do not fit, smallest first, and last those that were not traced, but for the smallest
    few."""
    by_peak = sorted(too_large, key=lambda one: one.peak)
    traced, rest = ([one for one in by_peak if one.traced is traced] for traced in (True, False))
    few = max(0, _SHOWN_OF_A_LAYOUT - len(traced))
    traced += [Candidate.predict(one.workload, one.layout, one.memory, wanted.routing) for one in rest[:few]]
    return (*sorted(traced, key=lambda one: one.peak), *rest[few:])


SAME_TIME = 0.03
"""Share below which a difference of predicted step times says nothing: the shares of peak speed that they assume were
measured on one GPU, with products of one size."""
LESS_MEMORY = 0.1
"""Share of the fastest layout's peak that one about as fast must save to be recommended instead."""

_SHOWN_OF_A_LAYOUT = 8


def _fastest_alike(candidates: list[Candidate]) -> list[Candidate]:
    """Keeps the fastest of the candidates that differ only in the number of recomputed layers."""
    best: dict[object, Candidate] = {}
    for one in sorted(candidates, key=_seconds):
        workload, memory = one.workload, replace(one.memory, recompute_layers=None)
        best.setdefault((one.layout.label(), workload.offload_weights, workload.offload_optimizer, memory), one)
    return list(best.values())


def _seconds(candidate: Candidate) -> tuple[float, int]:
    """Returns the key that sorts candidates by step time, and equally fast ones by memory."""
    assert candidate.time is not None
    return round(candidate.time.step, 6), candidate.peak


def layouts(devices: int, *, has_experts: bool = False, splits_tokens: bool = True) -> Iterator[Layout]:
    """Yields all layouts, simple ones first.

    Args:
        has_experts: the model is a mixture, whose experts may be spread over other ranks than the rest.
        splits_tokens: its tensor ranks may divide the tokens between linears; if not, experts are whole beside one.
    """
    sequences = (None, False) if splits_tokens else (False,)
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for pipeline in divisors:
        for context in divisors:
            for tensor in divisors:
                if devices % (pipeline * context * tensor):
                    continue
                data = devices // (pipeline * context * tensor)
                divides_experts = has_experts and (splits_tokens or tensor == 1)
                for sequence in sequences if tensor > 1 else (None,):
                    for virtual in (1, 2) if pipeline > 1 else (None,):
                        plain = ParallelOptions(
                            tensor=tensor, sequence=sequence, pipeline=pipeline, virtual=virtual, context=context
                        )
                        yield Layout(parallel=plain, data=data)
                        for expert, cut in _expert_ranks(tensor, data * context) if divides_experts else ():
                            yield Layout(parallel=replace(plain, expert=expert, expert_tensor=cut), data=data)


def _expert_ranks(tensor: int, copies: int) -> Iterator[tuple[int, int]]:
    """Yields the ranks over which experts may be divided, and the tensor ranks that share each expert: all ways but the
    one in which experts are spread like the rest of the model.

    Args:
        copies: data and context parallel ranks.
    """
    for cut in dict.fromkeys((1, tensor)):
        ranks = copies * tensor // cut
        for expert in range(1, ranks + 1):
            if ranks % expert == 0 and (expert > 1 or cut < tensor):
                yield expert, cut


def _check(wanted: SearchRequest, workload: Workload, layout: Layout) -> None:
    """Applies the rules of the configuration to a layout.

    Raises:
        UserError: one of them refuses the layout.
    """
    config = replace(wanted.config, parallel=layout.parallel)
    check_config(config)
    check_world(config, wanted.devices)
    parallel, decoder = layout.parallel, workload.decoder
    if parallel.context > 1:
        decoder.check_context(parallel.context, parallel.context_method)
    if parallel.context > 1 and parallel.context_method == "ulysses":
        heads = (decoder.num_heads // parallel.tensor, max(1, decoder.num_kv_heads // parallel.tensor))
        check_context_heads(*heads, parallel.context)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placement:
    """The offloads and the dtype of kept activations that are tried beside a layout.

    Args:
        workload: names whether weights and optimizer state are offloaded.
        offload: whether activations are offloaded.
        stored: the dtype that activations are kept in; None for their own.
    """

    workload: Workload
    offload: bool = False
    stored: torch.dtype | None = None


def _placements(wanted: SearchRequest, workload: Workload, layout: Layout) -> list[_Placement]:
    """Returns all placements that may be tried, the one without offload first."""
    weights = "weights" in wanted.offload and layout.parallel.shard != "parameters"
    choices = product(
        _may(weights), _may("optimizer" in wanted.offload), _may("activations" in wanted.offload), wanted.stored
    )
    return [
        _Placement(
            workload=replace(workload, offload_weights=weights, offload_optimizer=state), offload=moves, stored=stored
        )
        for weights, state, moves, stored in choices
    ]


def _may(allowed: bool) -> tuple[bool, ...]:
    return (False, True) if allowed else (False,)


def _least_sharding(wanted: SearchRequest, workload: Workload, layout: Layout) -> list[Candidate]:
    """Returns the candidates of a layout: unsharded, and with a higher level of sharding where that needs less
    recomputation, or fits at all; and where something must be recomputed, with offload and fewer bits instead."""
    tried: list[Candidate] = []
    sharded = max(layout.copies.values()) > 1
    levels: tuple[ShardLevel, ...] = ("none", "gradients", "parameters") if sharded else ("none",)
    others: list[tuple[Layout, _Placement]] = []
    for level in levels:
        own = replace(layout, parallel=replace(layout.parallel, shard=level))
        plain, *places = _placements(wanted, workload, own)
        tried += _least_recomputation(wanted, plain, own)
        others += [(own, place) for place in places]
        if any(one.memory.recompute in _LIGHT and wanted.holds(one) for one in tried):
            break
    else:
        for own, place in others:
            tried += _least_recomputation(wanted, place, own)
    fitting = [one for one in tried if wanted.holds(one)]
    return fitting or [min(tried, key=lambda one: (not one.traced, one.peak))]


def _least_recomputation(wanted: SearchRequest, place: _Placement, layout: Layout) -> list[Candidate]:
    """Returns the candidates of a layout and a placement: the light level that keeps least, and of the others the
    fewest layers that fit.

    Recomputing more than needed is never faster, so a level that recomputes whole regions is tried only where the
    light one is too large; but where activations are offloaded, which recomputed layers do not need, some more
    layers are tried on one device. Where nothing fits, the smallest; where what is held all the time does not fit, no
    recomputation helps, and nothing is traced.
    """

    def plan(level: Level, layers: int | None = None) -> MemoryPlan:
        return MemoryPlan(recompute=level, recompute_layers=layers, offload=place.offload, stored_dtype=place.stored)

    def candidate(level: Level, layers: int | None = None) -> Candidate:
        return Candidate.predict(place.workload, layout, plan(level, layers), wanted.routing)

    decoder = place.workload.decoder
    regions = [level for level in _REGIONS if level in wanted.recompute and level in decoder.recomputed_regions]
    light = [level for level in _LIGHT if level in wanted.recompute]
    if not regions and not light:
        raise UserError(
            f"layers of {decoder.family} models are recomputed whole or not at all: let memory.recompute be full or "
            "selective."
        )
    static = tuple(predict_static(place.workload, layout))
    if fullest(static).step > wanted.capacity:
        most = plan(next(level for level in reversed(RECOMPUTE_LEVELS) if level in wanted.recompute))
        return [Candidate(layout=layout, workload=place.workload, memory=most, estimates=static, traced=False)]
    tried = [candidate(level) for level in light[-1:]]
    fitting = [one for one in tried if wanted.holds(one)]
    if fitting and not place.offload:
        return fitting
    num_layers = decoder.num_layers
    for level in regions:
        tried.append(candidate(level))
        if not wanted.holds(tried[-1]):
            continue
        fewest = _fewest_layers(wanted, num_layers, tried[-1], candidate)
        fitting.append(fewest)
        if place.offload and layout.world_size == 1:
            first = fewest.memory.recompute_layers or num_layers
            step = max(1, num_layers // _MORE_LAYERS)
            fitting += [candidate(level, layers) for layers in range(first + step, num_layers, step)]
    return fitting or [min(tried, key=lambda one: one.peak)]


_LIGHT: tuple[Level, ...] = ("none", "selective")
_REGIONS: tuple[Level, ...] = ("attention", "full")
_MORE_LAYERS = 16
"""Shares of the model's layers that are tried beyond the fewest."""


def _fewest_layers(
    wanted: SearchRequest, num_layers: int, whole: Candidate, candidate: Callable[[Level, int], Candidate]
) -> Candidate:
    """Returns the same level on as few layers as fit, by bisection: every further layer saves memory."""
    best, low, high = whole, 1, num_layers
    while low < high:
        middle = (low + high) // 2
        found = candidate(whole.memory.recompute, middle)
        if wanted.holds(found):
            best, high = found, middle
        else:
            low = middle + 1
    return best
