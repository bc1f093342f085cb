"""The layers that the pipeline ranks of a layout hold, their schedule, and the messages beside each of its actions.

The split of layers is that of a run, computed from sizes that are read once for a whole search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from engine.config.parallel import ParallelOptions
from engine.models.decoder import Part, split_parts
from engine.models.decoder_config import DecoderConfig
from engine.models.flops import head_in_layers
from engine.pipeline.communication import communication_steps
from engine.pipeline.partition import plan_stages
from engine.pipeline.schedule import Action, Message, Schedule
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


def messages_held(schedule: Schedule, rank: int, *, polls_sends: bool) -> Iterator[tuple[Action, int]]:
    """Yields each action, and the number of messages that the rank holds meanwhile beside those that the action uses.

    A receive has a buffer from the step that posts it to the action that consumes it. A gradient lives from the action
    that makes it until its send is found complete, at the next step that posts something. An activation is the output
    that its stage keeps until its backward; where there is none, it lives as a gradient does.

    Args:
        schedule: of all ranks.
        rank: the rank that runs the actions.
        polls_sends: whether completed sends can be found without waiting. NCCL's can; Gloo's cannot, so that their
            buffers live until the end of the step.
    """
    arriving: set[Message] = set()
    made: set[Message] = set()
    leaving: set[Message] = set()
    kept: set[Message] = set()
    """Activations that a stage holds anyway."""
    for step in _steps(schedule)[rank]:
        if step.posts and polls_sends:
            leaving.clear()
        for transfer in step.posts:
            if transfer.direction == "send":
                made.discard(transfer.message)
                leaving.add(transfer.message)
            else:
                arriving.add(transfer.message)
        action = step.action
        if action is None:
            return
        needed = schedule.needs(action)
        if needed is not None:
            arriving.discard(needed)
            made.discard(needed)  # of a stage on this rank
        yield action, len(arriving) + len((leaving | made) - kept)
        message = schedule.makes(action)
        if message is not None:
            made.add(message)
        if action.op == "F" and message is not None and action.stage >= schedule.first_trainable_stage:
            kept.add(message)
        elif action.op in ("B", "I"):
            kept.discard(Message("activation", action.stage, action.microbatch))


_steps = lru_cache(maxsize=64)(communication_steps)
