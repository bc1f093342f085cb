"""Vocabulary-parallel embedding lookup, with its low-rank path.

    y = W[id] + s * A^T[id] B^T

Each rank looks up the ids in its own vocabulary rows and leaves zeros for the others; the sum over ranks completes both
terms at once. A [r, V / tp] is split with W, and its gradient is complete; B [hidden, r] is whole on every rank and its
gradient is a partial sum. There is no dropout on this path (as in PEFT). The adapter's dH and dB are those of a linear
adapter with the projection H = s A^T[id].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import all_gather, all_reduce, reduce_scatter
from engine.distributed.mesh import Axis
from engine.ops.adapters import Adapter, LowRank
from engine.ops.gradients import GradientSink
from engine.ops.kernels import Kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingOperands:
    """The operands of the lookup on this rank.

    Args:
        weight_VH: [V, hidden], this rank's rows with padding.
        first_id, num_ids: the ids held here: [first_id, first_id + num_ids).
        sink: gradient of the weight, None where frozen.
        a_RV, b_HR, scale, sink_a, sink_b: the adapter; a_RV None without one.
        axis, sequence_parallel, kernels: as in the parallel linears.
    """

    weight_VH: Tensor
    first_id: int
    num_ids: int
    sink: GradientSink | None
    a_RV: Tensor | None
    b_HR: Tensor | None
    scale: float
    sink_a: GradientSink | None
    sink_b: GradientSink | None
    axis: Axis
    sequence_parallel: bool
    kernels: Kernels

    @property
    def low_rank(self) -> LowRank | None:
        """The adapter, or None; its columns of A are the ids."""
        if self.a_RV is None or self.b_HR is None:
            return None
        adapter = Adapter(
            b_OR=self.b_HR,
            first_column=0,
            num_columns=self.b_HR.shape[0],
            first_row=0,
            num_ranks=self.b_HR.shape[1],
            scale=self.scale,
            sink_a=self.sink_a,
            sink_b=self.sink_b,
        )
        return LowRank(a_RI=self.a_RV, adapters=(adapter,), dropout=None)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, operands: EmbeddingOperands, *leaves: Tensor) -> Tensor:
        local_T = ids_T - operands.first_id
        here_T1 = ((local_T >= 0) & (local_T < operands.num_ids))[:, None]
        # ids of other ranks take any row, but not all the same one: the sink adds equal indices one after the other
        index_T = local_T % operands.weight_VH.shape[0]
        y_TH = operands.weight_VH[index_T].mul_(here_T1)
        h_TR, low_rank = None, operands.low_rank
        if low_rank is not None:
            h_TR = low_rank.scale_(low_rank.a_RI.t()[index_T].contiguous().mul_(here_T1))
            low_rank.expand(y_TH, h_TR)
        scatters = operands.sequence_parallel and operands.axis.size > 1
        y_TH = reduce_scatter(y_TH, operands.axis) if scatters else all_reduce(y_TH, operands.axis)
        ctx.save_for_backward(index_T, here_T1, h_TR)
        ctx.operands, ctx.scatters, ctx.num_leaves = operands, scatters, len(leaves)
        return y_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[None, ...]:
        index_T, here_T1, h_TR = ctx.saved_tensors
        operands: EmbeddingOperands = ctx.operands
        if ctx.scatters:
            dy_TH = all_gather(dy_TH, operands.axis)
        if operands.sink is not None:
            operands.sink.add_rows(index_T, dy_TH * here_T1)
        low_rank = operands.low_rank
        if low_rank is not None:
            dh_TR = low_rank.output_gradients(dy_TH, h_TR, operands.kernels)
            if operands.sink_a is not None:
                operands.sink_a.add_columns(index_T, dh_TR.mul_(here_T1).t())
        return (None, None, *([None] * ctx.num_leaves))


def embedding(ids_T: Tensor, operands: EmbeddingOperands, leaves: tuple[Tensor, ...]) -> Tensor:
    """Looks up int64 ids [T].

    Returns:
        [T, hidden], or [T / tp, hidden] with sequence parallelism.
    """
    return _Embedding.apply(ids_T, operands, *leaves)
