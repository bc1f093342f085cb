"""Builds the parts of a step's update: flat buffers, the gradient reduction, AdamW and the loss scale."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.config.optim import OptimOptions
from engine.config.run import RunConfig
from engine.distributed.mesh import Axis, Mesh
from engine.layers.host_copies import HostMemory
from engine.layers.module import ShardEntry
from engine.layers.storage import WeightPlacement
from engine.optim.adamw import FlatAdamW
from engine.optim.backends import OptimizerBackend
from engine.optim.flat import FlatParameters
from engine.optim.loss_scale import LossScale
from engine.optim.reduce import GradientReducer
from engine.optim.state_sharding import Sharding
from engine.telemetry.log import Log
from engine.training.host_places import HostPlaces, host_sentence


def weight_placement(config: RunConfig, mesh: Mesh, host: HostMemory | None) -> WeightPlacement:
    """Returns the placement of weights between computations: on other ranks, in host memory, or on the device."""
    if config.parallel.shard != "parameters":
        return WeightPlacement(Axis("dp_cp"), host=host)
    return WeightPlacement(mesh.dp_cp, host=host, expert_axis=mesh.edp)


def build_loss_scale(config: RunConfig, device: torch.device) -> LossScale | None:
    """Returns the loss scale for float16, whose small gradients would underflow without it; else None."""
    if config.model.dtype != "float16":
        return None
    return LossScale(config.optim.loss_scale, config.optim.loss_scale_window, device)


def build_flat(
    config: RunConfig,
    device: torch.device,
    entries: list[ShardEntry],
    mesh: Mesh,
    weights: WeightPlacement,
    places: HostPlaces,
    *,
    lr_factor: Callable[[str], float],
    log: Log,
) -> FlatParameters:
    """Builds the buffers of trained parameters, and logs which of them are spread over ranks or in host memory.

    Args:
        entries: parameters of this rank.
        places: in host memory.
        lr_factor: logical name -> the share of the learning rate.
    """
    sharding = _sharding(config, mesh, weights, log)
    flat = FlatParameters(entries, device, sharding=sharding, host=places.state, lr_factor=lr_factor)
    if (sentence := host_sentence(places, weights, flat)) is not None:
        log.info(sentence)
    return flat


def build_optimizer(
    options: OptimOptions, flat: FlatParameters, mesh: Mesh, backend: OptimizerBackend, loss_scale: LossScale | None
) -> FlatAdamW:
    """Builds AdamW over the flat parameters."""
    return FlatAdamW(
        flat,
        mesh,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        clip_grad_norm=options.clip_grad_norm,
        backend=backend,
        loss_scale=loss_scale,
    )


def build_reducer(config: RunConfig, flat: FlatParameters, mesh: Mesh) -> GradientReducer:
    """Builds the reducer that sums gradients over data ranks."""
    return GradientReducer(flat, mesh, bucket_bytes=_bucket_bytes(config))


def _sharding(config: RunConfig, mesh: Mesh, weights: WeightPlacement, log: Log) -> Sharding:
    """Chooses and logs which parts of the optimizer are spread over ranks."""
    sharding = Sharding(
        level=config.parallel.shard,
        axis=mesh.dp_cp,
        expert_axis=mesh.edp,
        bucket_elements=max(1, _bucket_bytes(config) // 4),
        weights=weights,
    )
    if (sentence := sharding.sentence()) is not None:
        log.info(sentence)
    return sharding


def _bucket_bytes(config: RunConfig) -> int:
    return int(config.parallel.bucket_mb * 2**20)
