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
        expert_axis: the same of experts that are spread over other ranks than the rest (the mesh's edp).
        bucket_elements: elements of a bucket, at least; each bucket is divided evenly over the ranks.
        weights: of the model. At level "parameters" they are sharded over the same ranks; at the levels below, each
            layer waits for its updated weights. None gathers them all at once.
    """

    level: ShardLevel = "none"
    axis: Axis = field(default_factory=lambda: Axis("dp_cp"))
    expert_axis: Axis = field(default_factory=lambda: Axis("edp"))
    bucket_elements: int = 1
    weights: WeightPlacement | None = None

    def __post_init__(self) -> None:
        shards_weights = self.weights is not None and self.weights.is_sharded
        assert shards_weights == (self.level == "parameters" and self.is_sharded), self.level

    @property
    def axes(self) -> dict[str, Axis]:
        """The axes by name."""
        return {axis.name: axis for axis in (self.axis, self.expert_axis)}

    @property
    def num_parts(self) -> dict[str, int]:
        """The number of parts that masters and moments are cut into, by the axis that their gradients are summed
        over."""
        return {name: 1 if self.level == "none" else axis.size for name, axis in self.axes.items()}

    @property
    def is_sharded(self) -> bool:
        """Whether anything is."""
        return max(self.num_parts.values()) > 1

    def rank(self, data: str) -> int:
        """Returns the number of this rank's part of the sum over the axis called `data`."""
        return self.axes[data].rank

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps its own part alone of the summed gradient."""
        return self.is_sharded and self.level in ("gradients", "parameters")

    def sentence(self) -> str | None:
        """Returns the line for the log; None where nothing is sharded by choice."""
        if self.level == "none":
            return None
        if not self.is_sharded:
            return f"sharding: nothing, since one rank sees all the data (parallel.shard is {self.level})"
        experts = f", of experts over {self.expert_axis.size}" if self.expert_axis.size > 1 else ""
        return f"sharding: {self.level}, over {self.axis.size} ranks{experts}"
