"""Tiles of many sizes through modules that take a batch of one length.

Sizes are known on the host, so that grouping costs no synchronisation. Tiles with equally many patches form a batch
whatever their shapes, because attention sees lengths alone; there is no padding, and nothing of a tile depends on the
others. Positions do depend on the shape, and are computed once for each.

Legend: P patches of all tiles, N tiles of one length, L patches of each, F = 3 * patch ** 2, Q feature rows of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.vision.towers.sizes import Grid, Grids


def run_kind(grid: Grid) -> tuple[int, ...]:
    """Returns what tiles of one batch have in common: the number of patches, and what the grid has behind its sides."""
    return grid[0] * grid[1], *grid[2:]


def run_by_length(patches_PF: Tensor, grids: Grids, run: Callable[[Tensor, Grids], Tensor], width: int) -> Tensor:
    """Returns the feature rows of all tiles, in the order of `grids`: [tiles * Q, width].

    Args:
        patches_PF: tile after tile, each row by row.
        run: [N, L, F] and the N grids to [N, Q, width]; called once for each kind.
        width: of a feature row; without tiles there is no other way to know it.
    """
    if not grids:
        return patches_PF.new_empty(0, width)
    kinds = [run_kind(grid) for grid in grids]
    tiles = patches_PF.split([kind[0] for kind in kinds])
    features = [patches_PF] * len(grids)
    for kind in sorted(set(kinds)):
        places = [place for place, other in enumerate(kinds) if other == kind]
        rows_NQ = run(torch.stack([tiles[place] for place in places]), tuple(grids[place] for place in places))
        for place, rows in zip(places, rows_NQ.unbind(), strict=True):
            features[place] = rows
    return torch.cat(features)


def positions_of(grids: Grids, table: Callable[[Grid], Tensor]) -> Tensor:
    """Returns what `table` has for the patches of each tile: [N, L, width], or [1, L, width] if all shapes are equal.

    Args:
        grids: of equally many patches each.
        table: a grid to [L, width]; called once for each shape.
    """
    tables = {grid: table(grid) for grid in grids}
    if len(tables) == 1:
        return tables[grids[0]].unsqueeze(0)
    return torch.stack([tables[grid] for grid in grids])


def encoder_flops(lengths: Sequence[int], *, width: int, mlp_width: int, depth: int) -> int:
    """Returns the FLOPs of a plain transformer encoder in forward, for sequences of these lengths; norms are left out.

    For each position and layer that is 2 * width * (4 * width + 2 * mlp_width) for linears and 4 * length * width for
    attention.
    """
    linears = 2 * width * (4 * width + 2 * mlp_width)
    return depth * sum(length * (linears + 4 * length * width) for length in lengths)
