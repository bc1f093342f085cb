"""draw_mask(key) -> the elements that dropout keeps, in the form that the backend's own functions read: booleans
[T, F], or packed bits; see `engine.kernels.philox`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kernels.native.dropout import dropout_bits
from engine.kernels.philox import dropout_mask
from engine.kernels.records import DropoutKey
from engine.ops.kernels.op import Op


def _draw_bits(key: DropoutKey, *, whole: int) -> Tensor:
    """Allocates a bit an element, in rows of whole bytes or of a multiple of them."""
    row = -(-key.num_features // (8 * whole)) * whole
    return key.token_index.new_empty(key.token_index.shape[0], row, dtype=torch.uint8)


DRAW_MASK = Op(
    reference=dropout_mask,
    native=dropout_bits,
    triton="engine.kernels.triton.dropout:dropout_bits",
    shape=partial(_draw_bits, whole=8),
    triton_shape=partial(_draw_bits, whole=1),
)
