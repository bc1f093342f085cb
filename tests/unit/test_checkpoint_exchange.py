"""An exchange of pieces against slices of the tensor they were cut from."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.checkpoint.copying import exchange as module
from engine.checkpoint.copying.contents import FileRange
from engine.checkpoint.copying.direct_io import Scratch
from engine.checkpoint.copying.exchange import Exchange, StoredPiece
from engine.checkpoint.reshard import Box
from engine.checkpoint.safetensors_file import checksum
from engine.errors import UserError

DTYPES = (torch.bfloat16, torch.float32, torch.uint8)
Ranges = list[tuple[int, int]]


def _grid(data: st.DataObject, shape: tuple[int, ...]) -> list[Ranges]:
    """Boxes that cover a tensor: each dimension cut at some places."""
    boxes: list[Ranges] = [[]]
    for size in shape:
        cuts = data.draw(st.lists(st.integers(1, max(1, size - 1)), max_size=3, unique=True)) if size > 1 else []
        edges = [0, *sorted(cuts), size]
        boxes = [[*box, pair] for box in boxes for pair in pairwise(edges)]
    return boxes


def _box(ranges: Ranges, shape: tuple[int, ...]) -> Box:
    runs = [(dim, a, b - a) for dim, (a, b) in enumerate(ranges) if (a, b) != (0, shape[dim])]
    return Box(*runs[0], tuple(runs[1:])) if runs else Box()


def _slice(tensor: Tensor, ranges: Ranges) -> Tensor:
    return tensor[tuple(slice(a, b) for a, b in ranges)].contiguous()


def _store(folder: Path, tensor: Tensor, grid: list[Ranges], *, checked: bool = True) -> list[StoredPiece]:
    """Pieces one after another in one file, with a few bytes before each."""
    path, content, pieces = folder / "pieces", b"", []
    for ranges in grid:
        piece = _slice(tensor, ranges)
        content += b"\xff" * 16
        run = FileRange(path, len(content), piece.nbytes, checksum(piece) if checked else None)
        pieces.append(StoredPiece(box=_box(ranges, tuple(tensor.shape)), run=run))
        content += piece.reshape(-1).view(torch.uint8).numpy().tobytes()
    path.write_bytes(content)
    return pieces


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_parts_are_what_slicing_gives(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
    dtype = data.draw(st.sampled_from(DTYPES))
    tensor = torch.randint(0, 100, shape).to(dtype)
    stored, wanted = _grid(data, shape), _grid(data, shape)
    pieces = _store(tmp_path_factory.mktemp("pieces"), tensor, stored, checked=data.draw(st.booleans()))
    exchange = Exchange(shape, dtype, pieces, [_box(ranges, shape) for ranges in wanted])
    some = data.draw(st.lists(st.sampled_from(range(len(wanted))), unique=True, min_size=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", data.draw(st.sampled_from([1, 30, 1 << 20])))
        found = dict.fromkeys(some, b"")
        for part, block in exchange.blocks(some, Scratch()):
            found[part] += bytes(block)
        alone = b"".join(bytes(block) for block in exchange.part(some[0]).blocks(Scratch()))
    assert found == {part: _bytes(_slice(tensor, wanted[part])) for part in some}
    assert alone == found[some[0]]


def test_every_piece_that_is_touched_is_checked_and_no_other(tmp_path: Path) -> None:
    tensor = torch.arange(48.0).view(8, 6)
    columns = [[(0, 8), (0, 3)], [(0, 8), (3, 6)]]
    pieces = _store(tmp_path, tensor, columns)
    content = bytearray((tmp_path / "pieces").read_bytes())
    content[-1] ^= 1  # of the second piece
    (tmp_path / "pieces").write_bytes(content)
    exchange = Exchange((8, 6), torch.float32, pieces, [Box(0, 0, 2), Box(1, 0, 3), Box(1, 3, 3)])
    left = b"".join(bytes(block) for block in exchange.part(1).blocks(Scratch()))
    assert left == _bytes(tensor[:, :3].contiguous())
    for index in (0, 2):  # rows 0 and 1 of the damaged piece are sound, but it is not what was written
        with pytest.raises(UserError, match="is damaged: the piece at byte"):
            list(exchange.part(index).blocks(Scratch()))
