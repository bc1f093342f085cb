"""The choice of a token: the largest sum, of a score and a Gumbel number drawn for it, in each row.

gumbel_argmax(scores_NV, rows_N, positions_N, *, first_id, key) -> the sum, fp64 [N], and its column, int64 [N]; None
for torch's operations one after the other. engine.inference.sampling specifies the draw.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.native import generation
from engine.ops.kernels.op import Cost, Op


class GumbelArgmax(Protocol):
    """See above."""

    def __call__(
        self, scores_NV: Tensor, rows_N: Tensor, positions_N: Tensor, *, first_id: int, key: tuple[int, int]
    ) -> tuple[Tensor, Tensor]: ...


def _argmax_shape(scores_NV: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    rows = scores_NV.shape[:1]
    return scores_NV.new_empty(rows, dtype=torch.float64), scores_NV.new_empty(rows, dtype=torch.int64)


GUMBEL_ARGMAX = Op(
    native=generation.gumbel_argmax,
    triton="engine.kernels.triton.sampling:gumbel_argmax",
    shape=_argmax_shape,
    triton_cost=lambda scores_NV, *_, **__: Cost(2, scores_NV.nbytes),
)
