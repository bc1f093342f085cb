"""The part of each batch that a rank of a run reads, by its place in the layout."""

from __future__ import annotations

import torch

from engine.batch import InputRank
from engine.config.rules import data_parallel_size
from engine.config.run import RunConfig
from engine.data.row_shape import RowShape
from engine.distributed.mesh import Mesh
from engine.distributed.ranks import RankGrid
from engine.runtime.launch import Launch

GPU_LENGTH_MULTIPLE = 128
"""Row lengths on a GPU are multiples of it. torch attends to rows of one document by cuDNN, which builds a plan for
each new length, forward and backward: rows as long as their samples would keep it building plans for most of a run."""


def shape_of_launch(config: RunConfig, launch: Launch) -> RowShape:
    """Returns the shape of this rank's rows, before there are process groups."""
    parallel, data_size = config.parallel, data_parallel_size(config, launch.world_size)
    grid = RankGrid(tp=parallel.tensor, cp=parallel.context, dp=data_size, pp=parallel.pipeline)
    return _shape(config, launch.device, data_size, **grid.coordinates(launch.rank))


def shape_on_mesh(config: RunConfig, device: torch.device, mesh: Mesh) -> RowShape:
    """Returns the shape of this rank's rows, by its coordinates in the mesh."""
    axes = (mesh.tp, mesh.cp, mesh.dp, mesh.pp)
    return _shape(config, device, mesh.dp.size, **{axis.name: axis.rank for axis in axes})


def _shape(config: RunConfig, device: torch.device, data_size: int, *, tp: int, cp: int, dp: int, pp: int) -> RowShape:
    tensor, context = config.parallel.tensor, config.parallel.context
    return RowShape(
        micro_batch_size=config.train.micro_batch_size,
        data_rank=dp,
        data_size=data_size,
        context_rank=cp,
        context_size=context,
        input_rank=InputRank.at(tensor=tp, tensor_size=tensor, context=cp, context_size=context, pipeline=pp),
        pad_multiple=tensor * (2 * context if context > 1 else 1) if config.parallel.divides_tokens else 1,
        length_multiple=GPU_LENGTH_MULTIPLE if device.type == "cuda" else 1,
    )
