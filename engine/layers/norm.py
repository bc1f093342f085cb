"""RMSNorm with a weight that every tensor-parallel rank holds."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.distributed.sharding import replicated_spec
from engine.layers.module import ShardedModule, empty
from engine.layers.plan import TensorLayout, TrainingPlan
from engine.ops.inputs import NormInput
from engine.ops.norm import rmsnorm


class RMSNorm(ShardedModule):
    """x / rms(x) * weight.

    Args:
        name: engine module name.
        size: of the normalised dimension.
        per_head: the norm sees this rank's heads only, so its weight's gradient is a partial sum even when every rank
            sees all tokens.
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        layout: TensorLayout,
        plan: TrainingPlan,
        device: torch.device,
        dtype: torch.dtype,
        per_head: bool = False,
    ) -> None:
        super().__init__()
        partial = per_head or layout.splits_tokens
        spec = replicated_spec(
            (size,), rank=layout.tp.rank, size=layout.tp.size, grad_reduce=("tp",) if partial else ()
        )
        self.eps = eps
        self.weight = self.own(f"{name}.weight", empty((size,), dtype, device), spec, trainable=plan.trains(name))

    def as_input(self) -> NormInput:
        """The norm as what a linear's input is made with, so that its output is never kept."""
        return NormInput(weight=self.weight.parameter, eps=self.eps, sink=self.weight.sink)

    def forward(self, x: Tensor) -> Tensor:
        return rmsnorm(x, self.weight.parameter, self.eps, self.weight.sink)
