"""Plans which layers each pipeline stage holds, and the schedule that fits the trained parameters."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from engine.config.rules import gradient_accumulation_steps
from engine.config.run import RunConfig
from engine.models.decoder import Part, split_parts
from engine.models.decoder_config import DecoderConfig
from engine.models.flops import head_in_layers
from engine.pipeline.partition import first_trainable_stage, plan_stages
from engine.pipeline.schedules import ScheduleChoice

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
        """Returns the parts of the model that pipeline rank `rank` holds, by stage."""
        parts = enumerate(split_parts(self.layers))
        return {stage: part for stage, part in parts if self.stage_rank[stage] == rank}

    def training(self, trained: Collection[str]) -> Partition:
        """Returns the same stages where these parameters train: the stages below them have no backward."""
        first = first_trainable_stage(self.layers, _first_trainable_layer(trained, sum(self.layers)))
        return replace(self, choice=replace(self.choice, first_trainable_stage=first))


def plan_partition(config: RunConfig, decoder: DecoderConfig, trained: Collection[str], world_size: int) -> Partition:
    """Splits the model for `config.parallel`.

    Args:
        trained: names of all parameters that train.

    Raises:
        UserError: the layers cannot be split that way, or the schedule does not fit the micro-batches.
    """
    parallel = config.parallel
    if parallel.pipeline == 1:
        return Partition(layers=(decoder.num_layers,), choice=ScheduleChoice(), stage_rank=(0,))
    layers, choice = plan_stages(
        parallel,
        num_layers=decoder.num_layers,
        head=head_in_layers(decoder),
        first_trainable_layer=_first_trainable_layer(trained, decoder.num_layers),
        layers_are_frozen=_layers_are_frozen(trained, decoder),
    )
    schedule = choice.schedule(gradient_accumulation_steps(config, world_size))
    return Partition(layers=layers, choice=choice, stage_rank=schedule.stage_rank)


def _first_trainable_layer(trained: Iterable[str], num_layers: int) -> int:
    """Returns the model's first layer with a trained parameter; `num_layers` where only the norm or head after them
    trains."""
    first = num_layers
    for name in trained:
        layer = _LAYER.match(name)
        first = min(first, int(layer[1]) if layer else first if name.startswith(("norm.", "lm_head.")) else 0)
    return first


def _layers_are_frozen(trained: Iterable[str], decoder: DecoderConfig) -> bool:
    """Returns whether no matrix of a layer trains, adapters aside: then backward costs as much as forward."""
    further = (name for variant in decoder.variants for name in variant.further_linears())
    matrices = ("_proj.weight", *(f".{name}.weight" for name in further))
    return not any(_LAYER.match(name) and name.endswith(matrices) for name in trained)
