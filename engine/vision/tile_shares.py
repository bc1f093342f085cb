"""Which rank encodes which tiles of a micro-batch, and so which images it decodes. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import InputRank


@dataclass(frozen=True, slots=True)
class TileShare:
    """What one rank encodes of a micro-batch: ranges of its tiles, and of the patches of all tiles."""

    tiles: slice
    patches: slice


def share_of(place: InputRank, grids: Sequence[tuple[int, ...]]) -> TileShare:
    """Returns what a rank encodes of tiles with these grids."""
    return TileShare(slice(0, 0), slice(0, 0)) if place.rank is None else deal_out(grids, place.size)[place.rank]


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
