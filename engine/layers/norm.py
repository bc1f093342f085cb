"""RMSNorm, whose weight every tensor-parallel rank holds; and that over all heads together, whose weight is split."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor

from engine.distributed.sharding import ShardSpec, replicated_spec
from engine.errors import UserError
from engine.layers.context import LayerContext
from engine.layers.module import ShardedModule
from engine.ops.head_norm import HeadNorms
from engine.ops.inputs import NormInput, Stream
from engine.ops.norm import output_rmsnorm, rmsnorm
from engine.ops.wide_norm import WideNorm, wide_norms


class RMSNorm(ShardedModule):
    """x / rms(x) * (weight + offset).

    Args:
        name: engine module name.
        size: of the normalised dimension.
        per_head: the norm sees this rank's heads only, so its weight's gradient is a partial sum even when every rank
            sees all tokens.
        offset: of the model's family; 0 in most.

    Raises:
        UserError: there is an offset, and the backend's norms do not take the fp32 weight that it makes.
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        build: LayerContext,
        per_head: bool = False,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        layout = build.layout
        if offset != 0.0 and layout.kernels.name == "apex" and build.dtype != torch.float32:
            raise UserError(
                f"model.kernels is apex, whose norms take weights of the compute dtype, but this model adds {offset:g} "
                "to its norms' weights in float32: set model.kernels to auto."
            )
        partial = per_head or layout.splits_tokens or build.defers_reduce
        spec = replicated_spec(
            (size,), rank=layout.tp.rank, size=layout.tp.size, grad_reduce=("tp",) if partial else ()
        )
        self.eps, self.offset, self._kernels = eps, offset, layout.kernels
        storage = build.empty((size,))
        self.weight = self.own(f"{name}.weight", storage, spec, trainable=build.plan.trains(name))
        if self.weight.sink is not None:
            self.weight.sink.uses = build.norm_readers

    def as_input(self, divisor: float = 1.0, around: Stream | None = None) -> NormInput:
        """Returns the norm as what a linear's input is made with, so that its output is never kept.

        Args:
            divisor: the output is divided by it.
            around: the stream that it reads, where one op makes the output.
        """
        return NormInput(
            weight=self.weight.parameter,
            eps=self.eps,
            sink=self.weight.sink,
            offset=self.offset,
            divisor=divisor,
            around=None if around is None else ref(around),
        )

    def with_keys(self, keys: RMSNorm) -> HeadNorms:
        """Returns this norm, of queries, and that of keys, as one op takes them."""
        return HeadNorms(
            q_weight=self.weight.parameter,
            k_weight=keys.weight.parameter,
            q_sink=self.weight.sink,
            k_sink=keys.weight.sink,
            eps=self.eps,
            offset=self.offset,
        )

    def forward(self, x: Tensor) -> Tensor:
        return rmsnorm(x, self.weight.parameter, self.eps, self.weight.sink, self.offset)

    def of_output(self, x_TF: Tensor) -> Tensor:
        """Returns the norm of a linear's output, by the backend's kernels."""
        return output_rmsnorm(x_TF, self.weight.parameter, self.eps, self.weight.sink, self.offset, self._kernels)


class QueryKeyNorm(ShardedModule):
    """RMSNorm of queries and of keys, each over all heads of the model together.

    Args:
        prefix: engine module name of the attention.
        q_spec, kv_spec: shards of the two weights, as the heads are split.
    """

    def __init__(
        self,
        prefix: str,
        q_spec: ShardSpec,
        kv_spec: ShardSpec,
        eps: float,
        *,
        build: LayerContext,
    ) -> None:
        super().__init__()
        layout = build.layout
        self._eps, self._axis, self._kernels = eps, layout.tp, layout.kernels
        entries = [
            self.own(
                f"{prefix}.{name}.weight",
                build.empty(spec.local_shape),
                spec,
                trainable=build.plan.trains(f"{prefix}.{name}"),
            )
            for name, spec in (("q_norm", q_spec), ("k_norm", kv_spec))
        ]
        self._leaves = tuple(entry.parameter for entry in entries if entry.sink is not None)
        q, k = (
            WideNorm(
                weight_F=entry.parameter.data,
                sink=entry.sink,
                width=entry.spec.global_shape[0],
                copies=layout.kv_replica.size if entry.spec.replicated else 1,
            )
            for entry in entries
        )
        self._norms = (q, k)

    def forward(self, q_TF: Tensor, k_TF: Tensor) -> tuple[Tensor, Tensor]:
        if self._axis.size == 1:  # all heads are here
            q, k = (
                output_rmsnorm(x, entry.parameter, self._eps, entry.sink, 0.0, self._kernels)
                for x, entry in zip((q_TF, k_TF), self.entries, strict=True)
            )
            return q, k
        return wide_norms(q_TF, k_TF, self._norms, eps=self._eps, axis=self._axis, leaves=self._leaves)
