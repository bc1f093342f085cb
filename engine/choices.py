"""Names that an option offers and the code behind it goes by: written once, for the configuration and for lower layers.

A layer that is given one of these knows what to do, and not where it was asked for.
"""

from __future__ import annotations

from typing import Literal, get_args

VISION = "vision."
"""Prefix of the names of a vision model's modules, and of their parameters."""

BaseDType = Literal["nf4", "int8", "fp8", "fp8_row"]
"""How frozen linears are stored."""
BASE_DTYPES: tuple[BaseDType, ...] = get_args(BaseDType)

Recompute = Literal["none", "selective", "attention", "full"]
RECOMPUTE_LEVELS: tuple[Recompute, ...] = get_args(Recompute)
"""Each keeps less than the one before it."""

LearningRateSchedule = Literal["constant", "linear", "cosine"]

PipelineSchedule = Literal["1f1b", "interleaved", "zb_h1", "zb_v", "lora"]
SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)

ShardLevel = Literal["none", "optimizer", "gradients", "parameters"]
"""What is spread over data-parallel ranks; each spreads more than the one before it."""
