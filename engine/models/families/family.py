"""The record of one model family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from engine.models.decoder_config import DecoderConfig
from engine.models.families.reading import NAMES
from engine.models.names import NameMap


class Family(NamedTuple):
    """One `model_type`: how its config becomes a DecoderConfig, and where its tensors lie.

    Args:
        config_from_hf: reads the config.
        names: places of the tensors.
        fused: modules that every checkpoint of the family stores as one matrix; see `engine.models.names.FUSED`.
        is_adopted: its layers are transformers' modules.
        computes: reads from the config whether the engine has all layers of such a model; None where it has always.
        unused: reads from the config which tensors of a checkpoint nothing is computed with; see `NameMap.unused`.
    """

    config_from_hf: Callable[[dict[str, Any]], DecoderConfig]
    names: NameMap = NAMES
    fused: tuple[str, ...] = ()
    unused: Callable[[dict[str, Any]], tuple[str, ...]] | None = None
    is_adopted: bool = False
    computes: Callable[[dict[str, Any]], bool] | None = None
