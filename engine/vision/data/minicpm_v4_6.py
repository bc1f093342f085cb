"""Conversations and images of MiniCPM-V 4.6 and 4.7, as transformers' processor writes them.

An image is a whole and, where it is large, the cells of a grid, row by row; each is a tile with its features between
markers. 4.7 places them on a canvas: positions in height and width are those of the grid's cells, the whole is
stretched over all of them, and markers stand at corners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray

from engine.data.extras import Span
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.files.documents import read_json
from engine.vision.data.family import Tiles
from engine.vision.data.pixels import Grid, Size
from engine.vision.data.processors import ProcessorFamily, StandIn
from engine.vision.tower_defaults import merging_tower

if TYPE_CHECKING:
    from PIL.Image import Image

_MARKERS = {
    "image_start_token": "<image>", "image_end_token": "</image>", "slice_start_token": "<slice>",
    "slice_end_token": "</slice>", "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}  # fmt: skip
"""By the tokenizer's names for them: what released models have."""
_NAMED_TOKENS = ("model_specific_special_tokens", "extra_special_tokens")
"""Tables of tokenizer_config.json that may hold such names."""


class _Cut(NamedTuple):
    """How an image becomes tiles.

    Args:
        whole: the grid of the whole image, in patches.
        rows, columns: of cells; both 0 where there are none.
        cell: the grid of each, in patches.
    """

    whole: Grid
    rows: int = 0
    columns: int = 0
    cell: Grid = (0, 0)

    @property
    def grids(self) -> tuple[Grid, ...]:
        return (self.whole, *(self.cell,) * (self.rows * self.columns))


class MiniCPMV46(ProcessorFamily):
    """MiniCPM-V 4.6."""

    def __init__(self, config: Mapping[str, Any], folder: Path, tokenizer: Tokenizer) -> None:
        number = config.get("image_token_id")
        feature = next((text for text, token in tokenizer.added_tokens.items() if token == number), None)
        if feature is None:
            raise UserError(
                f"config.json has image_token_id {number!r}, which is no added token of the tokenizer; give "
                "data.tokenizer the folder with the model's own files."
            )
        self.stand_in = StandIn(feature, feature)
        self._markers = _markers(folder)
        super().__init__(config, folder, tokenizer)

    def grids(self, size: Size, *, is_only_image: bool = True) -> tuple[Grid, ...]:
        return self._cut(size).grids

    def tiles(self, image: Image, *, is_only_image: bool = True) -> Tiles:
        found = self._processed([image])
        grids = tuple((int(rows), int(columns)) for rows, columns in found["target_sizes"])
        pixels = np.asarray(found["pixel_values"], dtype=np.float32)[0]
        return Tiles(rearrange(pixels, "c y (l x) -> l (c y x)", x=self._patch), grids)

    def _num_features(self, grids: tuple[Grid, ...]) -> int:
        return sum(self._runs(grids))

    def _runs(self, grids: tuple[Grid, ...]) -> tuple[int, ...]:
        return tuple(rows * columns // self._factor**2 for rows, columns in grids)

    def _stand_in_text(self, place: int, size: Size, *, is_only_image: bool) -> str:
        named, cut = self._markers, self._cut(size)
        whole, *cells = (self.stand_in.feature * count for count in self._runs(cut.grids))
        number = f"{named['image_id_start_token']}{place}{named['image_id_end_token']}"
        start, end = named["slice_start_token"], named["slice_end_token"]
        rows = (cells[row * cut.columns : (row + 1) * cut.columns] for row in range(cut.rows))
        return (
            (number if self._processor.use_image_id else "")
            + f"{named['image_start_token']}{whole}{named['image_end_token']}"
            + "\n".join("".join(f"{start}{cell}{end}" for cell in row) for row in rows)
        )

    def _cut(self, size: Size) -> _Cut:
        processor, (width, height) = self._processor, size
        given = {
            "scale_resolution": processor.scale_resolution,
            "patch_size": self._patch,
            "downsample_mode": processor.downsample_mode,
        }
        grid = None
        if processor.slice_mode:
            grid = processor.get_sliced_grid((height, width), processor.max_slice_nums, processor.scale_resolution)
        whole = self._patches_of(processor.find_best_resize((height, width), **given, allow_upscale=grid is None))
        if grid is None:
            return _Cut(whole)
        refined = processor.get_refine_size((height, width), grid, **given, allow_upscale=True)
        rows, columns = grid
        return _Cut(whole, rows, columns, self._patches_of((refined[0] // rows, refined[1] // columns)))

    def _patches_of(self, size: tuple[int, int]) -> Grid:
        """Returns the grid of a tile of this height and width."""
        return size[0] // self._patch, size[1] // self._patch

    def _check_sizes(self) -> None:
        """Refuses patches, or numbers of features, of other sizes than the tower's."""
        tower, processor = merging_tower(self._config), self._processor
        assert tower is not None
        self._factor = 2 if tower.window_behind is None else 4
        mode = f"{self._factor**2}x"
        made = (processor.patch_size, processor.downsample_mode)
        if made != (self._patch, mode) or not processor.do_resize:
            raise UserError(
                f"{self._file} has patch_size and downsample_mode {made} and do_resize {processor.do_resize}, but "
                f"config.json has a tower for {(self._patch, mode)} and images that are resized; copy both files of "
                "one model."
            )
        for key, most in (("max_slice_nums", _MOST_SLICES), ("scale_resolution", _MOST_PIXELS)):
            value = getattr(processor, key)
            if type(value) is not int or not 1 <= value <= most:
                raise UserError(f"{self._file} has {key} {value!r}, but a whole number from 1 to {most:,} is expected.")


_MOST_SLICES, _MOST_PIXELS = 256, 1 << 12


class MiniCPMV47(MiniCPMV46):
    """MiniCPM-V 4.7, whose positions are of three kinds."""

    rotates_by_grid = True
    _ids: ClassVar[tuple[str, ...]] = ("slice_start_id", "slice_end_id", "image_start_id", "image_end_id", "newline_id")

    def __init__(self, config: Mapping[str, Any], folder: Path, tokenizer: Tokenizer) -> None:
        if (lacks := next((key for key in self._ids if type(config.get(key)) is not int), None)) is not None:
            raise UserError(
                f"config.json has {lacks} {config.get(lacks)!r}, but the id of the token that stands there is needed "
                "for images; copy it again."
            )
        self._marker_ids = frozenset(config[key] for key in self._ids)
        super().__init__(config, folder, tokenizer)

    def positions(self, tokens: NDArray[Any], spans: Sequence[Span], sizes: Sequence[Size]) -> NDArray[np.int64]:
        positions = np.empty((3, len(tokens)), dtype=np.int64)
        rest = list(spans)
        at = after = 0
        for size in sizes:
            cut = self._cut(size)
            count = 1 + cut.rows * cut.columns
            own, rest = rest[:count], rest[count:]
            start, end = own[0][0] - 1, own[-1][1]
            while end < len(tokens) and int(tokens[end]) in self._marker_ids:
                end += 1
            if start > at:  # text, unless it is a marker behind the image before
                positions[:, at:start] = after + np.arange(start - at)
                after += start - at
            frame, side = self._frame(own, cut, start, end)
            positions[:, start:end] = after + frame
            if not after:
                positions[1:, start] = 0  # there is nothing before it
            at, after = end, after + side + 1
        positions[:, at:] = after + np.arange(len(tokens) - at)
        return positions

    def _frame(self, spans: Sequence[Span], cut: _Cut, start: int, end: int) -> tuple[NDArray[np.int64], int]:
        """Returns the positions of an image's tokens [start, end) on its canvas, and the canvas's longer side."""
        found = np.zeros((3, end - start), dtype=np.int64)
        cell_rows, cell_columns = (side // self._factor for side in cut.cell)
        whole = tuple(side // self._factor for side in cut.whole)
        height, width = (cut.rows * cell_rows, cut.columns * cell_columns) if cut.rows else whole
        (first, behind), *cells = ((begin - start, stop - start) for begin, stop in spans)
        found[1:, 0] = -1
        if behind < end - start:
            found[1:, behind] = height, width
        down, across = _spread(whole[0], height), _spread(whole[1], width)
        found[1:, first:behind] = _grid(down, across)
        inside = _grid(np.arange(cell_rows), np.arange(cell_columns))
        for number, (begin, stop) in enumerate(cells):
            row, column = divmod(number, cut.columns)
            corner = np.array([row * cell_rows, column * cell_columns])
            found[1:, begin - 1] = corner
            found[1:, begin:stop] = corner[:, None] + inside
            if stop < end - start:
                found[1:, stop] = corner + [cell_rows - 1, cell_columns - 1]
            if column == cut.columns - 1 and row < cut.rows - 1:  # the line break behind a row of cells
                found[1:, stop + 1 : cells[number + 1][0] - 1] = [[(row + 1) * cell_rows - 1], [width]]
        return found, max(height, width)


def _spread(count: int, length: int) -> NDArray[np.int64]:
    """Returns `count` places that are spread over `length` from end to end."""
    places: NDArray[np.int64] = torch.linspace(0, length - 1, count).round().long().numpy()
    return places


def _grid(down: NDArray[np.int64], across: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the two coordinates of all places of a grid, row by row: [2, places]."""
    return np.stack(np.meshgrid(down, across, indexing="ij")).reshape(2, -1)


def _markers(folder: Path) -> dict[str, str]:
    """Returns the markers that the tokenizer in a model's folder names."""
    file = folder / "tokenizer_config.json"
    given = read_json(file, "copy it again") if file.is_file() else {}
    tables = [given, *(table for key in _NAMED_TOKENS if isinstance(table := given.get(key), Mapping))]
    found = dict(_MARKERS)
    for name in found:
        for table in tables:
            token = table.get(name)
            text = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(text, str) and text:
                found[name] = text
    return found


MINICPM_FAMILIES: Mapping[str, type[ProcessorFamily]] = {"minicpmv4_6": MiniCPMV46, "minicpmv4_7": MiniCPMV47}
"""By model_type."""
