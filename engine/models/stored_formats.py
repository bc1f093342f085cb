"""The formats in which a config.json says that a checkpoint has its linears, before any weight is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.kernels.formats import Format
from engine.models.names import NameMap
from engine.quantization.shipped.config import encoding_of


def formats_of(hf_config: Mapping[str, Any], names: NameMap) -> Callable[[str], Format | None]:
    """Returns what gives the format of a linear's weight by its logical name; None for numbers.

    Args:
        hf_config: config.json.
        names: of the family.

    Raises:
        UserError: the config has an encoding of a kind that is read, but a value that is not.
    """
    encoding = encoding_of(hf_config)
    if encoding is None:
        return lambda name: None
    return lambda name: encoding.format(names.to_hf(name).name.removesuffix(".weight"))
