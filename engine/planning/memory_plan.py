"""The part of a configuration that says what is kept for backward, and where."""

from __future__ import annotations

from engine.config.run import RunConfig
from engine.layers.recompute import MemoryPlan
from engine.models.dtypes import STORED_DTYPES


def memory_plan_of(config: RunConfig) -> MemoryPlan:
    """Returns what a configuration keeps for backward, and where."""
    memory = config.memory
    stored = memory.activation_dtype
    return MemoryPlan(
        recompute=memory.recompute,
        recompute_layers=memory.recompute_layers,
        offload=memory.offload_activations,
        stored_dtype=None if stored is None else STORED_DTYPES[stored],
    )
