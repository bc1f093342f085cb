"""Images of any size as LLaVA-NeXT and LLaVA-OneVision cut them: the whole in one tile, and a grid of tiles that it
is padded to.

Of the features of the grid those of padding are left out; each row of what is left ends with one that marks its end.
All of that follows from the image's size. OneVision scales down what is still too much, and an image that is not
alone in its conversation is one tile there, and one mark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from engine.errors import UserError
from engine.vision.data.pixels import Grid, Size


def most_tiles(aspect_ratio: object) -> int:
    """Returns how many tiles' features an image may have, of a `vision_aspect_ratio` such as "anyres_max_9".

    Raises:
        UserError: it is something else.
    """
    if (match := re.fullmatch(r"anyres_max_(\d+)", str(aspect_ratio))) is None or int(match[1]) == 0:
        raise UserError(
            f"config.json has vision_aspect_ratio {aspect_ratio!r}, but anyres_max_ and a number is expected: correct "
            "it or copy it again."
        )
    return int(match[1])


def anyres_grid(size: Size, pinpoints: Sequence[tuple[int, int]], *, tile: int, side: int, most: int | None) -> Grid:
    """Returns the grid of an image.

    Args:
        size: of the image.
        pinpoints: heights and widths in pixels that it may be padded to.
        tile: pixels on a side of a tile.
        side: patches on a side of a tile.
        most: see `most_tiles`; None where features are not scaled.

    Returns:
        (rows, columns) of patches, all tiles one below the other; (rows, columns) of tiles; (rows, columns) of features
        without padding, and (rows, columns) that these are scaled to.
    """
    from transformers.image_processing_utils import select_best_resolution

    width, height = size
    best = select_best_resolution((height, width), list(pinpoints))
    tiles_down, tiles_across = best[0] // tile, best[1] // tile
    rows, columns = _without_padding(height, width, tiles_down * side, tiles_across * side)
    ratio = 0.0 if most is None else math.sqrt(rows * columns / (most * side**2))
    scaled = (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)
    if ratio > 1.1 and min(scaled) < 1:
        raise UserError(f"an image of {width} x {height} is so long and thin that no features of it are left; cut it.")
    return ((1 + tiles_down * tiles_across) * side, side, tiles_down, tiles_across, rows, columns, *scaled)


def _without_padding(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Returns the rows and columns of features that are not of padding; as many are cut on either side."""
    if width / height > columns / rows:
        return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2


def num_features(grid: Grid) -> int:
    """Returns the features of an image with the grid of `anyres_grid`, or with that of one tile."""
    if len(grid) == 2:
        return grid[0] * grid[1] + 1
    return grid[1] ** 2 + grid[6] * (grid[7] + 1)
