"""A model that is evaluated: one opened for it, or one that is being trained, in its layout and with its adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config.run import RunConfig
from engine.data.row_shape import RowShape
from engine.distributed.mesh import Axis, Mesh
from engine.inference.model_part import Parts
from engine.models.decoder_config import DecoderConfig
from engine.training.build import Training
from engine.training.generation import OpenedModel
from engine.training.opened_rows import row_stages, rows_of_opened
from engine.training.rank_stages import Stages
from engine.training.row_shape import shape_on_mesh


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
        return cls(
            stages=row_stages(opened, device),
            parts=Parts({mesh.pp.rank: decoder}, range(mesh.pp.size)),
            mesh=mesh,
            shape=rows_of_opened(opened, device),
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
