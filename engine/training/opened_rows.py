"""Passes over whole rows of a model that was opened for generation."""

from __future__ import annotations

import torch

from engine.batch import InputRank
from engine.config.model import ModelOptions
from engine.config.run import RunConfig
from engine.data.row_shape import RowShape
from engine.objectives.build import build_objective
from engine.pipeline.schedules import ScheduleChoice
from engine.training.generation import OpenedModel
from engine.training.rank_stages import Stages
from engine.training.row_shape import GPU_LENGTH_MULTIPLE
from engine.training.stage import ModelStage


def row_stages(opened: OpenedModel, device: torch.device) -> Stages:
    """Returns this rank's part of a model for passes over whole rows.

    Args:
        device: of its weights.
    """
    mesh = opened.mesh
    config = RunConfig(model=ModelOptions(path=str(opened.folder)))  # of the objective, which no pass computes
    stage = ModelStage(opened.decoder, build_objective(config, cp=mesh.cp, dp=mesh.dp), device, trains=False)
    return Stages({mesh.pp.rank: stage}, mesh.pp, ScheduleChoice(num_ranks=mesh.pp.size))


def rows_of_opened(opened: OpenedModel, device: torch.device, *, micro_batch_size: int = 1) -> RowShape:
    """Returns the shape of rows that its ranks take.

    Args:
        device: of its weights.
        micro_batch_size: rows that are computed together.
    """
    mesh, layout = opened.mesh, opened.decoder.layout
    return RowShape(
        micro_batch_size=micro_batch_size,
        input_rank=InputRank.at(
            tensor=mesh.tp.rank, tensor_size=mesh.tp.size, context=0, context_size=1, pipeline=mesh.pp.rank
        ),
        pad_multiple=mesh.tp.size if layout.splits_tokens or layout.routes_local_tokens else 1,
        length_multiple=GPU_LENGTH_MULTIPLE if device.type == "cuda" else 1,
    )
