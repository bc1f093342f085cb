"""Levels of sharding training memory over the ranks that train on different data (ZeRO, arXiv 1910.02054).

| level      | a rank keeps its part alone of     | gradients are    | weights, once its own part is updated          |
|------------|------------------------------------|------------------|------------------------------------------------|
| none       | nothing                            | all-reduced      | (each rank updates all of them)                |
| optimizer  | fp32 masters, both moments         | all-reduced      | all-gathered before the next forward           |
| gradients  | these, and the summed gradient     | reduce-scattered | all-gathered before the next forward           |
| parameters | these, and the weights, frozen     | reduce-scattered | sent to the rank that keeps them; all-gathered |
|            |   ones among them                  |                  |   only while their layer computes              |
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.choices import ShardLevel
from engine.distributed.mesh import Axis
from engine.layers.storage import WeightPlacement


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """The level of sharding, and its ranks.

    Args:
        level: see this module's table.
        axis: ranks that hold copies of the same parameters and sum their gradients (the mesh's dp_cp). Where it is of
            size 1 there is nothing to shard.
        bucket_elements: elements of a bucket, at least; each bucket is divided evenly over the ranks.
        weights: of the model. At level "parameters" they are sharded over the same ranks; at the levels below, each
            layer waits for its updated weights. None gathers them all at once.
    """

    level: ShardLevel = "none"
    axis: Axis = field(default_factory=lambda: Axis("dp_cp"))
    bucket_elements: int = 1
    weights: WeightPlacement | None = None

    def __post_init__(self) -> None:
        shards_weights = self.weights is not None and self.weights.is_sharded
        assert shards_weights == (self.level == "parameters" and self.axis.size > 1), self.level

    @property
    def size(self) -> int:
        """The number of parts that masters and moments are cut into."""
        return 1 if self.level == "none" else self.axis.size

    @property
    def rank(self) -> int:
        """The number of this rank's part."""
        return self.axis.rank if self.size > 1 else 0

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps its own part alone of the summed gradient."""
        return self.size > 1 and self.level in ("gradients", "parameters")

    def sentence(self) -> str | None:
        """Returns the line for the log; None where nothing is sharded by choice."""
        if self.level == "none":
            return None
        if self.size == 1:
            return f"sharding: nothing, since one rank sees all the data (parallel.shard is {self.level})"
        return f"sharding: {self.level}, over {self.size} ranks"
