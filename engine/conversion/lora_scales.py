"""The factor on B A: one number for all adapters, or one for each adapted module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.config.lora import patterned
from engine.models.names import NameMap, fused_parts

Scale = float | Mapping[str, float]
"""The factor of all adapters, or engine module -> factor."""


def scale_of(scale: Scale, module: str) -> float:
    """Returns the factor of one adapter."""
    return scale[module] if isinstance(scale, Mapping) else scale


def one_or_each(scales: Mapping[str, float], default: float) -> Scale:
    """Returns one factor where all are equal, `default` where there are none, else all of them."""
    first = next(iter(scales.values()), default)
    return first if all(math.isclose(scale, first, rel_tol=1e-12) for scale in scales.values()) else dict(scales)


def recorded_alpha(lora: Mapping[str, Any], module: str, names: NameMap) -> float:
    """Returns alpha of an adapter.

    Args:
        lora: the settings of a run, as its checkpoints have them.
        module: the engine's name of the adapted module.
        names: of the base.
    """
    first = fused_parts(module)[0]  # the parts of a fused module have the same
    aliases = [*names.aliases(first), module]
    pattern = lora.get("alpha_pattern")  # checkpoints from before there were patterns have no such entry
    return float(patterned(pattern, lora["alpha"], first, aliases))
