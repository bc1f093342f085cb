"""Rank arithmetic: which ranks share an axis of the mesh. Pure; no process groups, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "tp")
"""Mesh axes from the slowest-varying to the fastest: tensor-parallel neighbours are neighbouring ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGrid:
    """Sizes of the mesh axes: tensor, context, data and pipeline parallelism.

    Args:
        tp, cp, dp, pp: of the axes on which every rank has its own position.
        ep: ranks that hold different experts of a mixture, taken from those of a pipeline stage.
        shards_experts: tensor ranks share each expert's inner features, and `ep` is taken from dp x cp. Otherwise
            experts are whole, tensor ranks have tokens of their own before them, and `ep` is taken from dp x cp x tp.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    shards_experts: bool = True

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of AXES."""
        return (self.pp, self.dp, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the position of a global rank on every axis."""
        coordinates: dict[str, int] = {}
        for axis, size in reversed(list(zip(AXES, self.shape, strict=True))):
            coordinates[axis] = rank % size
            rank //= size
        return coordinates

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Returns the global rank at a position."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    @property
    def has_expert_mesh(self) -> bool:
        """Whether experts are spread over other ranks than the rest of the model."""
        return self.ep > 1 or (self.tp > 1 and not self.shards_experts)

    def expert_groups(self) -> dict[str, list[list[int]]]:
        """Returns the sets of ranks that hold different experts ("ep") and those that hold the same ("edp"), in rank
        order.

        Experts are folded into the ranks of a stage, neighbours first (MoE Parallel Folding, arXiv 2504.14960).
        """
        pools = self.groups("dp", "cp") if self.shards_experts else self.groups("dp", "cp", "tp")
        assert all(len(ranks) % self.ep == 0 for ranks in pools), self
        return {
            "ep": [ranks[start : start + self.ep] for ranks in pools for start in range(0, len(ranks), self.ep)],
            "edp": [ranks[place :: self.ep] for ranks in pools for place in range(self.ep)],
        }

    def groups(self, *axes: str) -> list[list[int]]:
        """Returns all sets of ranks that differ only along `axes`, each in rank order."""
        sets: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self.coordinates(rank)
            key = tuple(coordinates[axis] for axis in AXES if axis not in axes)
            sets.setdefault(key, []).append(rank)
        return list(sets.values())


def kv_replica_ranks(tensor_size: int, num_kv_heads: int) -> list[list[int]]:
    """Returns the tensor-parallel ranks that hold the same key/value heads, when there are fewer heads than ranks."""
    copies = max(1, tensor_size // num_kv_heads)
    starts = range(0, tensor_size, copies)  # sizes that do not divide are refused by the layers, in a sentence
    return [list(range(start, min(start + copies, tensor_size))) for start in starts]


SPELLED_RANKS = 8
"""Ranks that a text names one by one."""


def progression(ranks: Sequence[int]) -> range | None:
    """Returns the ranks as a range, as the groups of a mesh are; None where their distances differ."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step <= 0:
        return None
    whole = range(ranks[0], ranks[0] + step * len(ranks), step)
    return whole if tuple(whole) == tuple(ranks) else None


def spelled_ranks(ranks: Sequence[int]) -> str:
    """Names all ranks of a group, in few words where they are many, and different groups differently."""
    whole = progression(ranks) if len(ranks) > SPELLED_RANKS else None
    if whole is None:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"ranks {whole[0]} to {whole[-1]}" + (f" in steps of {whole.step}" if whole.step > 1 else "")
