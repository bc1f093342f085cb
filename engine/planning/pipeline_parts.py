"""The layers that the pipeline ranks of a layout hold, and their schedule.

The split of layers is that of a run, computed from sizes that are read once for a whole search.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from engine.config.parallel import ParallelOptions
from engine.models.decoder import Part, split_parts
from engine.models.decoder_config import DecoderConfig
from engine.models.flops import head_in_layers
from engine.pipeline.partition import plan_stages
from engine.pipeline.schedule import Schedule
from engine.pipeline.schedules import ScheduleChoice
from engine.planning.shapes import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """The stages of a layout.

    Args:
        layers: number of layers of each stage.
        schedule: the actions of all pipeline ranks.
    """

    layers: tuple[int, ...]
    schedule: Schedule

    def stages(self, rank: int) -> dict[int, Part]:
        """Returns the stages of a pipeline rank, by their number in the whole model."""
        parts = split_parts(self.layers)
        return {stage: parts[stage] for stage in self.schedule.stages_of(rank)}

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
    layers, choice = plan_stages(
        parallel,
        num_layers=decoder.num_layers,
        head=head_in_layers(decoder),
        first_trainable_layer=shape.first_trainable_layer,
        layers_are_frozen=shape.layers_are_frozen,
    )
    return PipelinePlan(layers=layers, schedule=_schedule(choice, num_microbatches))


@lru_cache(maxsize=256)
def _schedule(choice: ScheduleChoice, num_microbatches: int) -> Schedule:
    return choice.schedule(num_microbatches)
