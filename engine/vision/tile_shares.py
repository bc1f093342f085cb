"""Which rank encodes which tiles of a micro-batch, and so which images it decodes. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TileShare:
    """What one rank encodes of a micro-batch: ranges of its tiles, and of the patches of all tiles."""

    tiles: slice
    patches: slice


@dataclass(frozen=True, slots=True)
class EncoderRank:
    """A rank's place among those that share the tiles of a micro-batch.

    Args:
        rank: its number; None encodes nothing.
        size: how many there are.
    """

    rank: int | None = 0
    size: int = 1

    @classmethod
    def at(cls, *, tensor: int, tensor_size: int, context: int, context_size: int, pipeline: int = 0) -> EncoderRank:
        """Returns the place of these ranks: tensor rank by tensor rank of each context rank, where the first pipeline
        stage is, which the first pipeline rank has."""
        return cls(None if pipeline else context * tensor_size + tensor, tensor_size * context_size)

    def share(self, grids: Sequence[tuple[int, ...]]) -> TileShare:
        """Returns what this rank encodes of tiles with these grids."""
        return TileShare(slice(0, 0), slice(0, 0)) if self.rank is None else deal_out(grids, self.size)[self.rank]


ENCODES_ALL = EncoderRank()


def deal_out(grids: Sequence[tuple[int, ...]], ranks: int) -> list[TileShare]:
    """Splits tiles into contiguous runs with about as many patches each, one for each rank; some may be empty.

    Args:
        grids: begin with (rows, columns) in patches.
    """
    patches = [grid[0] * grid[1] for grid in grids]
    total, shares = sum(patches), []
    tile = patch = 0
    for rank in range(ranks):
        first = (tile, patch)
        limit = total * (rank + 1) / ranks
        while tile < len(grids) and (rank == ranks - 1 or patch + patches[tile] / 2 <= limit):
            patch, tile = patch + patches[tile], tile + 1
        shares.append(TileShare(slice(first[0], tile), slice(first[1], patch)))
    return shares
