"""A small vision model with a feature for each row of patches, and images for it that depend on the row alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.batch import Batch
from engine.vision.batch_parts import CrossImages, GridPositions, Images
from engine.vision.layers.encoder import VisionConfig

FEATURES = 12
"""Numbers of a patch."""
Grids = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class ToyVisionConfig:
    hidden: int = 32
    width: int = 20
    num_blocks: int = 2

    @property
    def patch_features(self) -> int:
        return FEATURES

    @property
    def usual_tile(self) -> tuple[int, int]:
        return 4, 3

    def build(self) -> nn.Module:
        return _ToyVision(self)

    def num_features(self, grid: tuple[int, int]) -> int:
        return grid[0]

    def flops(self, grids: Grids) -> int:
        return 2 * sum(rows * columns for rows, columns in grids) * FEATURES * self.width


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up_proj, self.down_proj = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(torch.tanh(self.up_proj(self.norm(x))))


class _ToyVision(nn.Module):
    def __init__(self, config: ToyVisionConfig) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, config.width, 2, 2)
        self.scale = nn.Parameter(torch.ones(config.width))
        self.blocks = nn.ModuleList(_Block(config.width) for _ in range(config.num_blocks))
        self.resampler = nn.Linear(config.width, config.hidden)
        self.register_buffer("table", torch.linspace(0, 1, config.width), persistent=False)

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        x = linear(patches_PF, self.embed.weight.flatten(1), self.embed.bias) * self.scale + self.table
        for block in self.blocks:
            x = block(x)
        rows = [
            tile.view(*grid, -1).mean(dim=1)
            for tile, grid in zip(x.split([a * b for a, b in grids]), grids, strict=True)
        ]
        return self.resampler(torch.cat(rows))


def with_grid_positions(batch: Batch) -> Batch:
    """Gives tokens of images positions in height and width that depend on their column alone."""
    assert batch.part(Images) is not None
    if not batch.part(Images).grids:
        return batch
    positions = batch.positions_BS.expand(3, -1, -1).clone()
    places = batch.part(Images).places_K
    column = places % batch.row_length
    positions[1].view(-1)[places], positions[2].view(-1)[places] = column // 2, 2 + column % 3
    return batch.with_parts(GridPositions(positions_3BS=positions))


def toy_grid(slot: int, number: int) -> tuple[int, ...]:
    return 2 + (slot + number) % 3, 1 + (slot + 2 * number) % 4


def with_images(
    batch: Batch,
    slots: Sequence[int],
    *,
    seed: int,
    vision: VisionConfig | None = None,
    grid_of: Callable[[int, int], tuple[int, ...]] = toy_grid,
    kind: type[Images] = Images,
) -> Batch:
    """Gives rows none, one or two images, of several sizes, by their slots in the global batch."""
    vision = vision or ToyVisionConfig()
    width = vision.patch_features
    patches, grids, places, documents, indices = [], [], [], [], []
    ends = torch.tensor(batch.document_lengths).cumsum(0).tolist()
    for row, slot in enumerate(slots):
        place = row * batch.row_length + 1
        for number in range(slot % 3):
            generator = torch.Generator().manual_seed(100 * seed + 10 * slot + number)
            grid = grid_of(slot, number)
            count = vision.num_features(grid)
            patches.append(torch.randn(grid[0] * grid[1], width, generator=generator))
            grids.append(grid)
            places.extend(range(place, place + count))
            documents.append(sum(end <= place for end in ends))
            indices.append(100 * slot + number)
            place += count + 1
    images = kind(
        patches_PF=torch.cat(patches) if patches else torch.empty(0, width),
        grids=tuple(grids),
        documents=tuple(documents),
        places_K=torch.tensor([] if kind is CrossImages else places, dtype=torch.int64),
        tile_index_N=torch.tensor(indices, dtype=torch.int64),
    )
    return batch.with_parts(images)
