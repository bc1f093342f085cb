"""The types at the end of an opcode, as numpy's."""

from __future__ import annotations

import numpy as np

from tests.ptx.machine import Dtype
from tests.ptx.program import WIDTHS

_TYPED: dict[str, Dtype] = {
    "s8": np.int8,
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
}


def typed(name: str) -> Dtype:
    """Returns the dtype to compute with; bfloat16 and packed pairs as their bits."""
    return _TYPED.get(name, WIDTHS[name])
