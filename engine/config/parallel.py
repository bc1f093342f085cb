"""How the model and the batch are divided over the ranks.

The data-parallel size is not an option: it follows from the world size (`engine.config.rules.data_parallel_size`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config.checks import require, require_at_least, require_choice, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelOptions:
    """Parallel: how the model is divided; all ranks left over become data parallel.

    Args:
        tensor: Ranks that share each layer's matrices (tensor parallelism).
        sequence: Whether the tensor ranks also divide the tokens between the linears (sequence parallelism).
            null means true when parallel.tensor is above 1; with parallel.tensor 1 there is nothing to divide.
        pipeline: Ranks that share the layers (pipeline parallelism); only 1 for now.
        context: Ranks that share each sequence's attention (context parallelism); only 1 for now.
        lora_reduce: How a column linear's low-rank input gradient crosses the tensor ranks without sequence
            parallelism. "local" keeps each rank's partial sum and adds up the gradient of A once a step; "joint" sends
            it along with the input gradient, so that the gradient of A is complete at once.
        bucket_mb: Size in MiB of the buckets in which gradients are reduced over the data-parallel ranks.
    """

    tensor: int = 1
    sequence: bool | None = None
    pipeline: int = 1
    context: int = 1
    lora_reduce: Literal["local", "joint"] = "local"
    bucket_mb: float = 25.0

    def __post_init__(self) -> None:
        for name, value in (("tensor", self.tensor), ("pipeline", self.pipeline), ("context", self.context)):
            require_at_least(f"parallel.{name}", value, 1, "use 1 to switch it off")
        for name, value in (("pipeline", self.pipeline), ("context", self.context)):
            require(
                value == 1,
                f"parallel.{name} is {value}, but {name} parallelism is not built yet: set parallel.{name} to 1 and "
                "use parallel.tensor or more data-parallel ranks.",
            )
        require_choice("parallel.lora_reduce", self.lora_reduce, ("local", "joint"))
        require_positive("parallel.bucket_mb", self.bucket_mb, "use for example 25")

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequence parallelism is on: parallel.sequence, by default on, where there is more than one rank."""
        return self.tensor > 1 and self.sequence is not False

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold one copy of the model."""
        return self.tensor * self.pipeline * self.context
