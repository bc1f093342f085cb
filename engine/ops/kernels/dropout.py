"""draw_mask(key) -> the elements that dropout keeps, in the form that the backend's own functions read: booleans
[T, F], or packed bits; see `engine.kernels.philox`.

drop(x, key, into) -> drop(x), or `into` with drop(x) added in place. The mask is drawn where it is applied, and never
kept: for inputs that are read once, as those of experts' adapters are.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kernels.native.dropout import drop, dropout_bits
from engine.kernels.philox import drop as drop_in_torch
from engine.kernels.philox import dropout_mask
from engine.kernels.records import DropoutKey
from engine.ops.kernels.op import Op, like


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


def _dropped(x_TF: Tensor, key: DropoutKey, into: Tensor | None = None) -> Tensor:
    return like(x_TF) if into is None else into


DROP = Op(reference=drop_in_torch, native=drop, triton="engine.kernels.triton.dropout:drop", shape=_dropped)
