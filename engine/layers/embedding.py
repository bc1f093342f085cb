"""The token embedding, split over the vocabulary."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from engine.distributed.sharding import padded_split_spec, replicated_spec
from engine.layers.context import LayerContext
from engine.layers.module import ShardedModule
from engine.ops.embedding import EmbeddingOperands, embedding


class VocabParallelEmbedding(ShardedModule):
    """int64 ids [T] -> [T, hidden], or [T / tp, hidden] with sequence parallelism.

    Args:
        vocab_size, hidden: global sizes; a vocabulary that does not divide is padded on the last ranks.
        name: engine module name.
        tied_to: module name whose training also trains this matrix (the output head), or None.
        copied: the last pipeline rank holds a copy of it for the tied head.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        *,
        build: LayerContext,
        name: str = "embed_tokens",
        tied_to: str | None = None,
        copied: bool = False,
    ) -> None:
        super().__init__()
        layout, plan = build.layout, build.plan
        tp = layout.tp
        spec = padded_split_spec((vocab_size, hidden), 0, rank=tp.rank, size=tp.size)
        if copied:
            spec = replace(spec, grad_reduce=("pp_ends",), replicated=("pp_ends",))
        trains = plan.trains(name) or (tied_to is not None and plan.trains(tied_to))
        weight = self.own(f"{name}.weight", build.empty(spec.local_shape), spec, trainable=trains)
        self.weight = weight
        self._leaves = [weight.parameter] if trains else []
        a = b = None
        settings = plan.adapter(name)
        if settings is not None:
            spec_a = padded_split_spec((settings.rank, vocab_size), 1, rank=tp.rank, size=tp.size)
            spec_b = replicated_spec((hidden, settings.rank), rank=tp.rank, size=tp.size, grad_reduce=("tp",))
            a = self.own(f"{name}.lora_A", build.factor(spec_a.local_shape), spec_a, trainable=True)
            b = self.own(f"{name}.lora_B", build.factor(spec_b.local_shape), spec_b, trainable=True)
            self._leaves += [a.parameter, b.parameter]
        self.operands = EmbeddingOperands(
            weight_VH=weight.parameter.data,
            first_id=spec.pieces[0].global_offset if spec.pieces else vocab_size,
            num_ids=spec.pieces[0].length if spec.pieces else 0,
            sink=weight.sink,
            a_RV=a.parameter.data if a is not None else None,
            b_HR=b.parameter.data if b is not None else None,
            scale=settings.scale if settings is not None else 0.0,
            sink_a=a.sink if a is not None else None,
            sink_b=b.sink if b is not None else None,
            axis=tp,
            sequence_parallel=layout.sequence_parallel,
            kernels=layout.kernels,
        )

    def forward(self, ids_T: Tensor, *, adapters: bool = True) -> Tensor:
        operands = self.operands if adapters else replace(self.operands, a_RV=None, b_HR=None)
        return embedding(ids_T, operands, tuple(self._leaves))


class TiedHeadWeight(ShardedModule):
    """The last pipeline rank's copy of the embedding matrix, for a tied head.

    Both copies start from the same numbers, sum their gradients and take the same updates. The first rank's is the one
    that is saved and counted in the norm.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        *,
        build: LayerContext,
    ) -> None:
        super().__init__()
        tp, plan = build.layout.tp, build.plan
        spec = padded_split_spec((vocab_size, hidden), 0, rank=tp.rank, size=tp.size)
        spec = replace(spec, grad_reduce=("pp_ends",), replicated=("pp_ends",), owner=False)
        trains = plan.trains("embed_tokens") or plan.trains("lm_head")
        storage = build.empty(spec.local_shape)
        self.weight = self.own("embed_tokens.weight", storage, spec, trainable=trains)
        if self.weight.sink is not None:
            self.weight.sink.uses = 0  # the head adds itself
