"""combine_rows(y, rows, weights) -> each token's sum over its slots of w y[row], in their order and in fp32."""

from __future__ import annotations

from torch import Tensor

from engine.kernels import reference
from engine.kernels.native import rows as native
from engine.ops.kernels.op import Op


def _combined(y_NF: Tensor, rows_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    return y_NF.new_empty(rows_TK.shape[0], y_NF.shape[1])


COMBINE_ROWS = Op(
    reference=reference.combine_rows,
    native=native.combine_rows,
    triton="engine.kernels.triton.rows:combine_rows",
    shape=_combined,
)
