"""Parallel options: how the model and the batch are divided over the ranks.

The data-parallel size is not an option: it follows from the world size (`engine.config.rules.data_parallel_size`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.choices import PipelineSchedule, ShardLevel
from engine.config.checks import require, require_at_least, require_choices, require_positive
from engine.config.option import IGNORED, option

ContextMethod = Literal["ring", "ulysses"]
LoraReduce = Literal["local", "joint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelOptions:
    """Parallel: how the model is divided; all ranks left over become data parallel.

    Args:
        tensor: Ranks that share each layer's matrices (tensor parallelism).
        sequence: Whether the tensor ranks also divide the tokens between the linears (sequence parallelism).
            null means true when parallel.tensor is above 1; with parallel.tensor 1 there is nothing to divide.
        pipeline: Ranks that share the layers (pipeline parallelism).
        virtual: Pipeline stages per rank; null takes the fewest that the schedule needs.
        schedule: Order of forwards and backwards over the pipeline. "auto" takes "lora" where the layers are frozen,
            else "interleaved" where parallel.virtual is above 1 and "1f1b" where it is not. "zb_h1" and "zb_v" put the
            weights' gradients into the gaps and are for training in full; zb_v holds two stages per rank.
        layers_per_stage: Layers of each stage, in order, as [8, 8, 8, 6]; null splits evenly, counting the head.
        context: Ranks that share each row of tokens (context parallelism).
        expert: Ranks over which the experts of a mixture are divided (expert parallelism). They are taken from the
            data, context and, where experts are whole, tensor parallel ranks; each sends its tokens to the ranks of
            their experts.
        expert_tensor: Tensor ranks that share each expert's inner features: 1, for whole experts, or parallel.tensor.
            null means 1 where parallel.expert is above 1, and else parallel.tensor.
        context_method: How attention reaches the tokens of other context ranks. "ring" sends keys and values while
            others are computed; "ulysses" exchanges heads for tokens, which needs enough heads.
        shard: Tensors that are spread over the ranks that train on different data (data and context parallel ones;
            ZeRO, arXiv 1910.02054). "none" keeps everything on each rank; "optimizer" spreads the fp32 weights and both
            moments; "gradients" spreads the summed gradients as well, and sends half as much; "parameters" spreads the
            weights too, frozen ones among them, and gathers each layer's twice per micro-batch. With one such rank
            nothing is spread. Checkpoints open at any setting.
        lora_reduce: Without sequence parallelism, how the gradient of a column-parallel linear's LoRA A is summed over
            the tensor ranks. "local" keeps each rank's partial sum and sums once per step; "joint" sends the low-rank
            gradient along with the input gradient, so that the gradient of A is complete at once.
        bucket_mb: Size in MiB of the buckets in which gradients are reduced over the data-parallel ranks.
    """

    tensor: int = option(1, IGNORED)
    sequence: bool | None = option(None, IGNORED)
    pipeline: int = option(1, IGNORED)
    virtual: int | None = option(None, IGNORED)
    schedule: Literal["auto", PipelineSchedule] = option("auto", IGNORED)
    layers_per_stage: tuple[int, ...] | None = option(None, IGNORED)
    context: int = option(1, IGNORED)
    context_method: ContextMethod = option("ring", IGNORED)
    expert: int = option(1, IGNORED)
    expert_tensor: int | None = option(None, IGNORED)
    shard: ShardLevel = option("none", IGNORED)
    lora_reduce: LoraReduce = option("local", IGNORED)
    bucket_mb: float = option(25.0, IGNORED)

    def __post_init__(self) -> None:
        require_choices("parallel", self)
        for name in ("tensor", "pipeline", "context", "expert"):
            require_at_least(f"parallel.{name}", getattr(self, name), 1, "use 1 to switch it off")
        require(
            self.expert_tensor in (None, 1, self.tensor),
            f"parallel.expert_tensor is {self.expert_tensor} and parallel.tensor is {self.tensor}, but experts are "
            f"whole or divided over all tensor ranks: use 1, {self.tensor}, or null.",
        )
        if self.virtual is not None:
            require_at_least("parallel.virtual", self.virtual, 1, "use null for the schedule's own number")
            require(
                self.virtual == 1 or self.pipeline > 1,
                f"parallel.virtual is {self.virtual} and parallel.pipeline is 1, so there is no pipeline to divide "
                "further: set parallel.virtual to null, or parallel.pipeline above 1.",
            )
        require(
            self.layers_per_stage is None or (self.pipeline > 1 and min(self.layers_per_stage, default=0) > 0),
            f"parallel.layers_per_stage is {self.layers_per_stage} and parallel.pipeline is {self.pipeline}, but one "
            "number of layers above 0 for each stage of a pipeline is expected: write for example [8, 8, 8, 6], or "
            "null.",
        )
        require_positive("parallel.bucket_mb", self.bucket_mb, "use for example 25")

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequence parallelism is on: by default on, where there is more than one tensor rank."""
        return self.tensor > 1 and self.sequence is not False

    @property
    def shards_experts(self) -> bool:
        """Whether tensor ranks share each expert's inner features, instead of each having its own tokens."""
        return self.expert == 1 if self.expert_tensor is None else self.expert_tensor == self.tensor

    @property
    def has_expert_mesh(self) -> bool:
        """Whether experts are spread over other ranks than the rest of the model."""
        return self.expert > 1 or (self.tensor > 1 and not self.shards_experts)

    @property
    def divides_tokens(self) -> bool:
        """Whether tensor ranks divide a micro-batch's tokens anywhere."""
        return self.sequence_parallel or (self.tensor > 1 and not self.shards_experts)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold one copy of the model."""
        return self.tensor * self.pipeline * self.context
