"""Pixels of an image as the rows of numbers that a vision tower reads.

An image is resized by Pillow's bicubic filter, as the originals do it, and cut into square patches. A patch is a row,
flattened as (channel, y, x), so that a convolution whose stride is its kernel is a matrix product with these rows.

Legend: P patches, F = 3 * patch_size ** 2 numbers of a patch, H and W height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
"""(width, height) in pixels, as Pillow has it."""
Grid = tuple[int, ...]
"""(rows, columns) in patches, and behind that what else a family's tower has to know of a tile."""

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Normalisation:
    """What becomes of a byte of a channel: byte / 255, minus the mean, divided by the deviation, in float32.

    Args:
        mean, std: of red, green and blue.
        patch_size: pixels of a patch's side.
    """

    mean: Sequence[float]
    std: Sequence[float]
    patch_size: int

    @cached_property
    def _table(self) -> NDArray[np.float32]:
        """float32 [3 * 256]: the number for each byte of each channel."""
        byte = np.arange(256, dtype=np.float32) / np.float32(255)
        mean, std = np.asarray(self.mean, dtype=np.float32), np.asarray(self.std, dtype=np.float32)
        table: NDArray[np.float32] = (byte - mean[:, None]) / std[:, None]
        return table.ravel()

    @property
    def features(self) -> int:
        """F, numbers of one patch."""
        return 3 * self.patch_size**2

    def patches(self, tile: Image) -> NDArray[np.float32]:
        """Returns float32 [P, F], the patches of an RGB image whose sides are multiples of the patch size."""
        pixels_HWC = np.asarray(tile)
        rows_PF = rearrange(pixels_HWC, "(h p) (w q) c -> (h w) (c p q)", p=self.patch_size, q=self.patch_size).astype(
            np.int16
        )
        rows_PF += np.repeat(np.arange(3, dtype=np.int16) * 256, self.patch_size**2)
        return np.take(self._table, rows_PF)

    def grid(self, size: Size) -> Grid:
        """Returns the patches of a tile of this size."""
        width, height = size
        return height // self.patch_size, width // self.patch_size


def resized(image: Image, size: Size) -> Image:
    """Returns an image of another size, by the bicubic filter."""
    from PIL.Image import Resampling

    return image.resize(size, Resampling.BICUBIC)
