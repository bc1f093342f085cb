"""Chooses which tensors of a run are kept in host memory, and describes them for the log."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.config.memory import MemoryOptions
from engine.layers.host_copies import HostMemory, host_memory
from engine.layers.storage import WeightPlacement
from engine.optim.flat import FlatParameters
from engine.telemetry.format import format_bytes


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


def host_sentence(places: HostPlaces, weights: WeightPlacement, flat: FlatParameters) -> str | None:
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
