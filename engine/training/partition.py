"""Which layers each pipeline stage holds, and the schedule that fits what is trained."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.checkpoint.model_folder import ModelFolder
from engine.config.parallel import ParallelOptions
from engine.config.rules import gradient_accumulation_steps
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.layers.module import ShardEntry, shard_entries
from engine.layers.plan import TrainingPlan
from engine.models.config import DecoderConfig
from engine.models.decoder import Part
from engine.models.describe import meta_model
from engine.pipeline.partition import (
    LayerWeights,
    first_trainable_stage,
    parse_layers,
    split_layers,
    time_without_backward,
)
from engine.pipeline.schedules import chosen_schedule, default_virtual
from engine.training.stages import ScheduleChoice

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """The pipeline of a run.

    Args:
        layers: number of layers of each stage.
        choice: of the schedule.
        stage_rank: stage -> pipeline rank.
    """

    layers: tuple[int, ...]
    choice: ScheduleChoice
    stage_rank: tuple[int, ...]

    def parts(self, rank: int) -> dict[int, Part]:
        """The parts of the model that pipeline rank `rank` holds, by stage."""
        last = len(self.layers) - 1
        return {
            stage: Part(
                first=sum(self.layers[:stage]),
                last=sum(self.layers[: stage + 1]),
                embedding=stage == 0,
                head=stage == last,
            )
            for stage in range(len(self.layers))
            if self.stage_rank[stage] == rank
        }


def plan_partition(config: RunConfig, model: ModelFolder, plan: TrainingPlan, world_size: int) -> Partition:
    """Splits the model for `config.parallel`.

    Raises:
        UserError: the layers cannot be split like that, or the schedule does not fit the micro-batches.
    """
    parallel, decoder = config.parallel, model.decoder
    if parallel.pipeline == 1:
        return Partition(layers=(decoder.num_layers,), choice=ScheduleChoice(), stage_rank=(0,))
    entries = list(shard_entries(meta_model(decoder, plan=plan)))
    frozen = _layers_are_frozen(entries)
    name = chosen_schedule(parallel.schedule, parallel.virtual, layers_are_frozen=frozen)
    virtual = parallel.virtual or default_virtual(name)
    num_stages = parallel.pipeline * virtual
    first_layer = _first_trainable_layer(entries, decoder)
    weights = LayerWeights(
        head=_head_in_layers(decoder, entries),
        first_trainable_layer=first_layer,
        frozen_layer=time_without_backward(layers_are_frozen=frozen),
    )
    layers = _split(parallel, decoder, num_stages, weights)
    choice = ScheduleChoice(
        name=name,
        num_ranks=parallel.pipeline,
        virtual=virtual,
        first_trainable_stage=first_trainable_stage(layers, first_layer),
    )
    schedule = choice.schedule(gradient_accumulation_steps(config, world_size))
    return Partition(layers=layers, choice=choice, stage_rank=schedule.stage_rank)


def _split(
    parallel: ParallelOptions, decoder: DecoderConfig, num_stages: int, weights: LayerWeights
) -> tuple[int, ...]:
    if parallel.layers_per_stage is not None:
        return parse_layers(",".join(map(str, parallel.layers_per_stage)), decoder.num_layers, num_stages)
    if num_stages > decoder.num_layers:
        raise UserError(
            f"parallel.pipeline {parallel.pipeline} with {num_stages // parallel.pipeline} stages a rank needs "
            f"{num_stages} layers, but the model has {decoder.num_layers}: use fewer pipeline ranks or stages."
        )
    return split_layers(decoder.num_layers, num_stages, weights)


def _first_trainable_layer(entries: list[ShardEntry], decoder: DecoderConfig) -> int:
    """Of the model; its number of layers where only the norm or head after them trains."""
    first = decoder.num_layers
    for entry in entries:
        if entry.sink is not None:
            layer = _LAYER.match(entry.name)
            first = min(first, int(layer[1]) if layer else 0 if entry.name.startswith("embed_tokens") else first)
    return first


def _layers_are_frozen(entries: list[ShardEntry]) -> bool:
    """Whether no matrix of a layer trains, adapters aside: then backward costs what forward costs."""
    return not any(
        entry.sink is not None and _LAYER.match(entry.name) and entry.name.endswith("_proj.weight") for entry in entries
    )


def _head_in_layers(decoder: DecoderConfig, entries: list[ShardEntry]) -> float:
    """The head's arithmetic in that of a layer: both are products with each of their weights."""
    layer = sum(
        entry.spec.global_shape[0] * entry.spec.global_shape[1]
        for entry in entries
        if entry.name.startswith("layers.0.") and entry.name.endswith("_proj.weight")
    )
    return decoder.hidden * decoder.vocab_size / layer
