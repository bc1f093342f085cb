"""Which layers the pipeline ranks of a layout hold, and the schedule they go by.

The split of layers is that of `engine.training.partition`, computed from sizes that are read once for a whole search.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from engine.config.parallel import ParallelOptions
from engine.models.config import DecoderConfig
from engine.pipeline.partition import (
    LayerWeights,
    first_trainable_stage,
    parse_layers,
    split_layers,
    time_without_backward,
)
from engine.pipeline.schedule import Schedule
from engine.pipeline.schedules import chosen_schedule, default_virtual, make_schedule
from engine.planning.shapes import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRange:
    """Layers [first, last), and whether this stage has the ends."""

    first: int
    last: int
    embedding: bool = True
    head: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """The stages of a layout.

    Args:
        layers: of each stage.
        schedule: the actions of all pipeline ranks.
    """

    layers: tuple[int, ...]
    schedule: Schedule

    def stages(self, rank: int) -> dict[int, StageRange]:
        """Those of a pipeline rank, by their number in the whole model."""
        ends = [sum(self.layers[: stage + 1]) for stage in range(len(self.layers))]
        return {
            stage: StageRange(
                first=ends[stage] - self.layers[stage], last=ends[stage], embedding=stage == 0,
                head=stage == len(self.layers) - 1,
            )
            for stage in self.schedule.stages_of(rank)
        }  # fmt: skip

    @property
    def ends_meet(self) -> bool:
        """Whether the first and the last stage are on one rank, which then has one tensor for tied embeddings."""
        return self.schedule.stage_rank[0] == self.schedule.stage_rank[-1]


def pipeline_plan(
    decoder: DecoderConfig, shape: ModelShape, parallel: ParallelOptions, num_microbatches: int
) -> PipelinePlan:
    """Splits the layers for a layout.

    Raises:
        UserError: they cannot be split like that, or the schedule does not fit the micro-batches.
    """
    first_layer, frozen = shape.first_trainable_layer, shape.layers_are_frozen
    name = chosen_schedule(parallel.schedule, parallel.virtual, layers_are_frozen=frozen)
    if parallel.pipeline == 1:
        return PipelinePlan(layers=(decoder.num_layers,), schedule=_schedule("1f1b", 1, 1, num_microbatches, 0))
    virtual = parallel.virtual or default_virtual(name)
    num_stages = parallel.pipeline * virtual
    if parallel.layers_per_stage is not None:
        layers = parse_layers(",".join(map(str, parallel.layers_per_stage)), decoder.num_layers, num_stages)
    else:
        weights = LayerWeights(
            head=decoder.hidden * decoder.vocab_size / layer_matrix_elements(decoder),
            first_trainable_layer=first_layer,
            frozen_layer=time_without_backward(layers_are_frozen=frozen),
        )
        layers = _split_layers(decoder.num_layers, num_stages, weights)
    first_stage = first_trainable_stage(layers, first_layer)
    return PipelinePlan(
        layers=layers, schedule=_schedule(name, parallel.pipeline, virtual, num_microbatches, first_stage)
    )


def layer_matrix_elements(decoder: DecoderConfig) -> int:
    """Elements of the matrices of one layer, over all ranks: its arithmetic."""
    attention = 2 * decoder.num_heads + 2 * decoder.num_kv_heads
    return decoder.hidden * (attention * decoder.head_dim + 3 * decoder.intermediate)


@lru_cache(maxsize=256)
def _schedule(name: str, num_ranks: int, virtual: int, num_microbatches: int, first_stage: int) -> Schedule:
    return make_schedule(name, num_ranks, virtual, num_microbatches, first_stage)


_split_layers = lru_cache(maxsize=256)(split_layers)
