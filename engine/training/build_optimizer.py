"""Builds the parts of a step's update: flat buffers, AdamW and the loss scale, and their places in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.config.memory import MemoryOptions
from engine.config.optim import OptimOptions
from engine.config.run import RunConfig
from engine.distributed.mesh import Axis, Mesh
from engine.layers.host_copies import HostMemory, host_memory
from engine.layers.module import ShardEntry
from engine.layers.storage import WeightPlacement
from engine.optim.adamw import FlatAdamW
from engine.optim.backends import OptimizerBackend
from engine.optim.flat import FlatParameters
from engine.optim.loss_scale import LossScale
from engine.optim.state_sharding import Sharding
from engine.telemetry.format import format_bytes
from engine.telemetry.log import Log


class HostPlaces(NamedTuple):
    """Where frozen weights, and masters and moments, wait; None where they stay on the device."""

    weights: HostMemory | None
    state: HostMemory | None


def host_places(memory: MemoryOptions, device: torch.device) -> HostPlaces:
    """Returns the places that a configuration asks for."""
    asked = memory.offload_weights or memory.offload_optimizer
    place = host_memory(device) if asked else None
    return HostPlaces(
        weights=place if memory.offload_weights else None, state=place if memory.offload_optimizer else None
    )


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
    sharding = Sharding(
        level=config.parallel.shard,
        axis=mesh.dp_cp,
        expert_axis=mesh.edp,
        bucket_elements=max(1, bucket_bytes(config) // 4),
        weights=weights,
    )
    if (sentence := sharding.sentence()) is not None:
        log.info(sentence)
    flat = FlatParameters(entries, device, sharding=sharding, host=places.state, lr_factor=lr_factor)
    if (sentence := _host_sentence(places, weights, flat)) is not None:
        log.info(sentence)
    return flat


def bucket_bytes(config: RunConfig) -> int:
    """Returns the size of the buckets in which gradients are reduced."""
    return int(config.parallel.bucket_mb * 2**20)


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


def _host_sentence(places: HostPlaces, weights: WeightPlacement, flat: FlatParameters) -> str | None:
    """Returns the log line on this rank's tensors in host memory; None where none was asked for."""
    place = places.weights or places.state
    if place is None:
        return None
    parts = []
    if places.weights is not None:
        parts.append(f"{format_bytes(weights.host_bytes())} of frozen weights")
    if places.state is not None:
        parts.append(f"{format_bytes(3 * flat.master.nbytes)} of optimizer state")
    kind = "pinned memory" if place.is_pinned else "plain memory, since the device's is the host's"
    return f"in host memory on rank 0: {' and '.join(parts)} ({kind})"
