"""Cuts an image into tiles as MiniCPM-V does, all versions.

The whole image is always the first tile, shrunk (or grown) to about `scale_resolution` squared pixels. An image of
more pixels is also cut into a grid of up to `max_slices` tiles of that size each, whose shape is closest to the
image's own. All sides are multiples of the patch size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.vision.data.pixels import Size, resized

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Slices:
    """The tiles of one image.

    Args:
        source: size of the whole image as a tile.
        columns, rows: the grid of further tiles; both 0 where there are none.
        refined: size to which the image is resized before it is cut into the grid.
    """

    source: Size
    columns: int = 0
    rows: int = 0
    refined: Size = (0, 0)

    @property
    def cell(self) -> Size:
        """Size of one tile of the grid."""
        return self.refined[0] // self.columns, self.refined[1] // self.rows

    def sizes(self) -> list[Size]:
        """Returns the sizes of all tiles, the whole image first."""
        return [self.source] + [self.cell] * (self.columns * self.rows) if self.columns else [self.source]

    def tiles(self, image: Image) -> Iterator[Image]:
        """Yields the tiles of the image: the whole, and then the grid row by row."""
        yield resized(image, self.source)
        if self.columns:
            refined, (width, height) = resized(image, self.refined), self.cell
            for row in range(self.rows):
                for column in range(self.columns):
                    left, top = column * width, row * height
                    yield refined.crop((left, top, left + width, top + height))


@dataclass(frozen=True, slots=True)
class SlicingRule:
    """How images are cut.

    Args:
        max_slices: tiles of the grid at most.
        scale_resolution: side of the square with the pixels of one tile.
        patch_size: what sides are multiples of.
    """

    max_slices: int = 9
    scale_resolution: int = 448
    patch_size: int = 14

    def slices(self, size: Size) -> Slices:
        """Returns the tiles of an image of this size."""
        width, height = size
        wanted = min(math.ceil(width * height / self.scale_resolution**2), self.max_slices)
        if wanted <= 1:
            return Slices(self._best_size(width, height, upscale=True))
        columns, rows = self._best_grid(size, wanted)
        cell = self._best_size(_multiple(width, columns) / columns, _multiple(height, rows) / rows, upscale=True)
        return Slices(
            self._best_size(width, height, upscale=False),
            columns=columns,
            rows=rows,
            refined=(cell[0] * columns, cell[1] * rows),
        )

    def _best_grid(self, size: Size, wanted: int) -> tuple[int, int]:
        """Returns columns and rows of the grid whose shape is closest; the first of equals."""
        shape = math.log(size[0] / size[1])
        counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= self.max_slices]
        grids = [(columns, n // columns) for n in counts for columns in range(1, n + 1) if n % columns == 0]
        return min(grids, key=lambda grid: abs(shape - math.log(grid[0] / grid[1])))

    def _best_size(self, width: float, height: float, *, upscale: bool) -> Size:
        if upscale or width * height > self.scale_resolution**2:
            ratio = width / height
            height = int(self.scale_resolution / math.sqrt(ratio))
            width = int(height * ratio)
        return _multiple(width, self.patch_size), _multiple(height, self.patch_size)


def _multiple(length: float, of: int) -> int:
    """Returns the multiple that is nearest, and at least one; halves go to the even one, as Python rounds."""
    return max(round(length / of) * of, of)
