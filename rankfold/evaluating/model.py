"""A model that is evaluated: one opened for it, or one that is being trained, in its layout and with its adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.batch import InputRank
from engine.config.model import ModelOptions
from engine.config.run import RunConfig
from engine.data.row_shape import RowShape
from engine.distributed.mesh import Axis, Mesh
from engine.inference.model_part import Parts
from engine.models.decoder_config import DecoderConfig
from engine.objectives.build import build_objective
from engine.pipeline.schedules import ScheduleChoice
from engine.training.build import Training
from engine.training.generation import OpenedModel
from engine.training.rank_stages import Stages
from engine.training.row_shape import GPU_LENGTH_MULTIPLE, shape_on_mesh
from engine.training.stage import ModelStage


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedModel:
    """This rank's part of a model, as passes of evaluations take it.

    Args:
        stages: the parts for passes over whole rows.
        parts: the same parts for passes with a cache.
        mesh: of the ranks; those of `dp_cp` hold copies, which answer different requests.
        shape: this rank's part of a batch.
        config: of the whole model.
        in_step_with: ranks that must run as many passes as this one; None where there are none.
        prepare: called before passes.
    """

    stages: Stages
    parts: Parts
    mesh: Mesh
    shape: RowShape
    config: DecoderConfig
    in_step_with: Axis | None = None
    prepare: Callable[[], None] = lambda: None

    @property
    def device(self) -> torch.device:
        return self.stages.step.device

    @classmethod
    def of_opened(cls, opened: OpenedModel, device: torch.device) -> EvaluatedModel:
        """Returns a model that was opened for generation.

        Args:
            device: of its weights.
        """
        mesh, decoder = opened.mesh, opened.decoder
        config = RunConfig(model=ModelOptions(path=str(opened.folder)))  # of the objective, which no pass computes
        stage = ModelStage(decoder, build_objective(config, cp=mesh.cp, dp=mesh.dp), device, trains=False)
        divides = decoder.layout.splits_tokens or decoder.layout.routes_local_tokens
        shape = RowShape(
            input_rank=InputRank.at(
                tensor=mesh.tp.rank, tensor_size=mesh.tp.size, context=0, context_size=1, pipeline=mesh.pp.rank
            ),
            pad_multiple=mesh.tp.size if divides else 1,
            length_multiple=GPU_LENGTH_MULTIPLE if device.type == "cuda" else 1,
        )
        return cls(
            stages=Stages({mesh.pp.rank: stage}, mesh.pp, ScheduleChoice(num_ranks=mesh.pp.size)),
            parts=Parts({mesh.pp.rank: decoder}, range(mesh.pp.size)),
            mesh=mesh,
            shape=shape,
            config=opened.config,
        )

    @classmethod
    def of_training(cls, config: RunConfig, training: Training) -> EvaluatedModel:
        """Returns the model of a run, with its current weights.

        Args:
            config: of the run.
        """
        mesh, partition = training.mesh, training.plan.partition
        numbers = partition.parts(mesh.pp.rank)
        together = config.parallel.shard == "parameters" or config.parallel.expert > 1
        return cls(
            stages=training.stages,
            parts=Parts(dict(zip(numbers, training.parts, strict=True)), partition.stage_rank),
            mesh=mesh,
            shape=shape_on_mesh(config, training.stages.step.device, mesh),
            config=training.source.model.decoder,
            in_step_with=mesh.dp_cp if together else None,
            # a rank that has no requests runs no forward, which would take part in gathering the newest weights
            prepare=training.optimizer.flat.finish_publish,
        )
