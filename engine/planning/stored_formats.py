"""The formats in which a checkpoint has its weights, as its config.json says them: no file of weights is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.choices import ENCODED, STORED
from engine.config.parallel import ParallelOptions
from engine.errors import UserError
from engine.models.names import NameMap
from engine.models.stored_formats import formats_of
from engine.ops.encoded_weight import Formats
from engine.planning.rank_layout import Workload
from engine.planning.traces import rank_model
from engine.quantization.shipped.config import KEY, encoding_of


def stored_formats(base_dtype: str | None, hf_config: Mapping[str, Any], names: NameMap) -> Formats | None:
    """Returns name of a weight -> its format in the checkpoint; None where weights are not kept as they are stored.

    Args:
        base_dtype: as model.base_dtype.
        hf_config: config.json.
        names: where the checkpoint has each weight.

    Raises:
        UserError: weights are to stay as they are stored, and config.json names no format that is read.
    """
    if base_dtype != STORED:
        return None
    if encoding_of(hf_config) is None:
        raise UserError(
            f"model.base_dtype is {STORED}, but config.json has no {KEY} that is read: give the config.json of the "
            f"checkpoint in few bits, or one of {', '.join(ENCODED)}."
        )
    return formats_of(hf_config, names)


def base_words(workload: Workload) -> str:
    """Returns how frozen weights are stored, in words: "bfloat16", "nf4", or "stored (nvfp4)"."""
    if workload.base_dtype != STORED:
        return workload.base_dtype or str(workload.dtype).removeprefix("torch.")
    found = rank_model(workload, ParallelOptions()).shape.encodings
    return f"{STORED} ({', '.join(found)})" if found else STORED
