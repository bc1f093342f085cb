"""The part of each batch that a rank of a run reads, by its place in the layout."""

from __future__ import annotations

import torch

from engine.batch import InputRank
from engine.config.rules import data_parallel_size
from engine.config.run import RunConfig
from engine.data.row_shape import RowShape
from engine.distributed.mesh import Mesh
from engine.runtime.launch import Launch

GPU_LENGTH_MULTIPLE = 128
"""Row lengths on a GPU are multiples of it. torch attends to rows of one document by cuDNN, which builds a plan for
each new length, forward and backward: rows as long as their samples would keep it building plans for most of a run."""


def shape_of_launch(config: RunConfig, launch: Launch) -> RowShape:
    """Returns the shape of this rank's rows, before there are process groups."""
    data_size = data_parallel_size(config, launch.world_size)
    # tensor-parallel neighbours are neighbouring ranks and share a data rank
    tensor, context = config.parallel.tensor, config.parallel.context
    return _shape(
        config,
        launch.device,
        data_rank=launch.rank // (tensor * context) % data_size,
        data_size=data_size,
        context_rank=launch.rank // tensor % context,
        tensor_rank=launch.rank % tensor,
        pipeline_rank=launch.rank // (tensor * context * data_size),
    )


def shape_on_mesh(config: RunConfig, device: torch.device, mesh: Mesh) -> RowShape:
    """Returns the shape of this rank's rows, by its coordinates in the mesh."""
    return _shape(
        config,
        device,
        data_rank=mesh.dp.rank,
        data_size=mesh.dp.size,
        context_rank=mesh.cp.rank,
        tensor_rank=mesh.tp.rank,
        pipeline_rank=mesh.pp.rank,
    )


def _shape(
    config: RunConfig,
    device: torch.device,
    *,
    data_rank: int,
    data_size: int,
    context_rank: int,
    tensor_rank: int,
    pipeline_rank: int,
) -> RowShape:
    tensor, context = config.parallel.tensor, config.parallel.context
    return RowShape(
        micro_batch_size=config.train.micro_batch_size,
        data_rank=data_rank,
        data_size=data_size,
        context_rank=context_rank,
        context_size=context,
        input_rank=InputRank.at(
            tensor=tensor_rank,
            tensor_size=tensor,
            context=context_rank,
            context_size=context,
            pipeline=pipeline_rank,
        ),
        pad_multiple=tensor * (2 * context if context > 1 else 1) if config.parallel.divides_tokens else 1,
        length_multiple=GPU_LENGTH_MULTIPLE if device.type == "cuda" else 1,
    )
