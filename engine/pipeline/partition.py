"""The split of the layers over the pipeline stages: contiguous ranges, the longest stage as short as possible.

A run and the planner both ask `plan_stages`, so that the predicted stages are the trained ones.

Costs are in layers: the forward and backward of one trainable layer is 1. The embedding belongs to the first stage,
the head and the loss to the last. Layers below the first trainable one have no backward; with a frozen base, where
backward costs as much as forward, they cost half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.errors import UserError
from engine.pipeline.schedules import ScheduleChoice, chosen_schedule, default_virtual

_PARTS = 10**6  # costs are compared in millionths of a layer, so that equal ones are equal


def time_without_backward(*, layers_are_frozen: bool) -> float:
    """Returns the time of a layer below the first trainable one, in layers that have a backward: 1/2 with a frozen
    base, whose backward costs as much as forward, and 1/3 where weight gradients cost as much again."""
    return 1 / 2 if layers_are_frozen else 1 / 3


class PipelineOptions(Protocol):
    """A user's options of the pipeline; the section `parallel` of a run has them."""

    @property
    def pipeline(self) -> int:
        """Pipeline ranks."""

    @property
    def schedule(self) -> str:
        """One of `engine.choices.SCHEDULES`, or "auto"."""

    @property
    def virtual(self) -> int | None:
        """Stages per rank; None for the schedule's own number."""

    @property
    def layers_per_stage(self) -> tuple[int, ...] | None:
        """The split; None for the best one."""


def plan_stages(
    parallel: PipelineOptions,
    *,
    num_layers: int,
    head: float,
    first_trainable_layer: int,
    layers_are_frozen: bool,
) -> tuple[tuple[int, ...], ScheduleChoice]:
    """Returns the number of layers of each stage, and the schedule over them.

    Args:
        parallel: the pipeline's ranks, and the user's options of stages and schedule.
        num_layers: of the model.
        head: the time of the head and the loss, in layers.
        first_trainable_layer: the first one with a trainable parameter; `num_layers` where only parameters after
            the layers train.
        layers_are_frozen: no matrix of a layer trains, adapters aside.

    Raises:
        UserError: the layers cannot be split like that.
    """
    if parallel.pipeline == 1:
        return (num_layers,), ScheduleChoice()
    name = chosen_schedule(parallel.schedule, parallel.virtual, layers_are_frozen=layers_are_frozen)
    virtual = parallel.virtual or default_virtual(name)
    num_stages = parallel.pipeline * virtual
    if parallel.layers_per_stage is not None:
        layers = parse_layers(",".join(map(str, parallel.layers_per_stage)), num_layers, num_stages)
    else:
        weights = LayerWeights(
            head=head,
            first_trainable_layer=first_trainable_layer,
            frozen_layer=time_without_backward(layers_are_frozen=layers_are_frozen),
        )
        layers = split_layers(num_layers, num_stages, weights)
    choice = ScheduleChoice(
        name=name,
        num_ranks=parallel.pipeline,
        virtual=virtual,
        first_trainable_stage=first_trainable_stage(layers, first_trainable_layer),
    )
    return layers, choice


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """The parts of a stage's time that are not trainable layers, in layers.

    Args:
        embedding: the embedding's time.
        head: the time of the head and the loss. Under a frozen head the loss computes its gradient in forward; it is
            the sum that counts here.
        first_trainable_layer: layers below it have no backward.
        frozen_layer: the time of such a layer, see `time_without_backward`.

    Raises:
        UserError: a negative weight.
    """

    embedding: float = 0.0
    head: float = 0.0
    first_trainable_layer: int = 0
    frozen_layer: float = 1 / 2

    def __post_init__(self) -> None:
        for name, value in (
            ("embedding", self.embedding),
            ("head", self.head),
            ("first trainable layer", self.first_trainable_layer),
            ("frozen layer", self.frozen_layer),
        ):
            if value < 0:
                raise UserError(f"the partition's {name} is {value}: give 0 or more.")


class _Sums:
    """Costs of stages of any layers, in integers."""

    def __init__(self, weights: LayerWeights, num_layers: int, num_stages: int) -> None:
        frozen = round(weights.frozen_layer * _PARTS)
        first = weights.first_trainable_layer
        self._until = [min(layer, first) * frozen + max(0, layer - first) * _PARTS for layer in range(num_layers + 1)]
        self._extra = [0] * num_stages
        self._extra[0] += round(weights.embedding * _PARTS)
        self._extra[-1] += round(weights.head * _PARTS)

    def cost(self, stage: int, start: int, end: int) -> int:
        return self._until[end] - self._until[start] + self._extra[stage]


def split_layers(num_layers: int, num_stages: int, weights: LayerWeights | None = None) -> tuple[int, ...]:
    """Returns the number of layers of each stage.

    The longest stage is as short as possible. Among such splits the stages are as even as possible (least sum of
    squared times); where that leaves a choice, later stages have more, because earlier ones keep more micro-batches
    alive. Every stage has at least one layer.

    Args:
        num_layers: of the model.
        num_stages: over all ranks.
        weights: the layers that do not cost one trainable layer; none by default.

    Raises:
        UserError: fewer layers than stages.
    """
    if not 1 <= num_stages <= num_layers:
        raise UserError(
            f"{num_layers} layers cannot be split into {num_stages} stages: every stage needs a layer, so give fewer "
            "pipeline ranks or virtual stages."
        )
    sums = _Sums(weights or LayerWeights(), num_layers, num_stages)
    # best[start]: (sum of squares, layers) of the stages from the current one on, which begins at `start`
    longest = _least_longest(sums, num_layers, num_stages)
    best: list[tuple[int, tuple[int, ...]] | None] = [None] * num_layers + [(0, ())]
    for stage in reversed(range(num_stages)):
        left = num_stages - 1 - stage
        for start in range(num_layers + 1):
            best[start] = _best_stage(sums, stage, start, num_layers - left, longest, best)
    found = best[0]
    assert found is not None
    return found[1]


def _best_stage(
    sums: _Sums,
    stage: int,
    start: int,
    last_end: int,
    longest: int,
    tails: Sequence[tuple[int, tuple[int, ...]] | None],
) -> tuple[int, tuple[int, ...]] | None:
    """Returns the most even split of the layers from `start` on; `tails` has those of the later stages, beyond
    `start`."""
    found: tuple[int, tuple[int, ...]] | None = None
    for end in range(start + 1, last_end + 1):
        cost = sums.cost(stage, start, end)
        if cost > longest:
            break
        tail = tails[end]
        if tail is not None and (found is None or cost**2 + tail[0] < found[0]):
            found = (cost**2 + tail[0], (end - start, *tail[1]))
    return found


def _least_longest(sums: _Sums, num_layers: int, num_stages: int) -> int:
    """Returns the time of the longest stage in the best split, by bisection: each try fills the stages from the
    front."""
    low, high = 0, max(sums.cost(stage, 0, num_layers) for stage in range(num_stages))
    while low < high:
        middle = (low + high) // 2
        if _fits(sums, num_layers, num_stages, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(sums: _Sums, num_layers: int, num_stages: int, longest: int) -> bool:
    start = 0
    for stage in range(num_stages):
        if sums.cost(stage, start, start + 1) > longest:
            return False
        end = start + 1
        last_end = num_layers - (num_stages - 1 - stage)
        while end < last_end and sums.cost(stage, start, end + 1) <= longest:
            end += 1
        start = end
    return start == num_layers


def parse_layers(text: str, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Returns the split that the user wrote, as in "8,8,8,6".

    Raises:
        UserError: not numbers of layers, not one for each stage, or not the model's number of layers.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(
            f"{text!r} is not a split of layers: write the layers of each stage, each at least 1, as 8,8,8,6."
        )
    layers = tuple(int(part) for part in parts)
    if len(layers) != num_stages:
        raise UserError(
            f"{text!r} splits the layers into {len(layers)} stages, but there are {num_stages}: give one each."
        )
    if sum(layers) != num_layers:
        raise UserError(f"{text!r} has {sum(layers)} layers, but the model has {num_layers}: change one of them.")
    return layers


def first_trainable_stage(layers: Sequence[int], first_trainable_layer: int) -> int:
    """Returns the stage of the first layer with a trainable parameter.

    Args:
        layers: of each stage.
        first_trainable_layer: of the model; its number of layers where only parameters after them train (the last
            stage).
    """
    end = 0
    for stage, count in enumerate(layers):
        end += count
        if first_trainable_layer < end:
            return stage
    return len(layers) - 1
