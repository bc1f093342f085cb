"""Who has last read and written each byte of a memory, and which accesses depend on an order that nothing enforces.

A code says who: the block, the block's barriers so far (its epoch), and the warp. Two accesses to a byte, one of them a
write, are in no order where they are of two blocks, or of two warps of a block in one epoch.
"""

from __future__ import annotations

import numpy as np

from tests.ptx.numbers import Array

_WARP_BITS, _EPOCH_BITS, _BLOCK_BITS = 6, 12, 13
_BLOCK_SHIFT = _WARP_BITS + _EPOCH_BITS
_WARPS = (1 << _WARP_BITS) - 1
"""In the place of a warp: several of them."""
_COPIES = _WARPS - 1
"""In the place of a warp: several of them, by one access."""
_BLOCKS = np.int32(-1)
"""In the place of a code: several blocks."""


def codes(blocks: Array, epochs: Array, warps: Array) -> Array:
    """Returns int32 codes, none of them 0.

    Numbers of blocks and of epochs wrap around, so that of thousands a few pass for each other.
    """
    numbered = blocks % ((1 << _BLOCK_BITS) - 2) + 1
    fields: Array = numbered << _BLOCK_SHIFT | (epochs % (1 << _EPOCH_BITS)) << _WARP_BITS | warps
    return fields.astype(np.int32)


def _unordered(known: Array, code: Array) -> Array:
    difference = known ^ code
    apart = (difference >> _BLOCK_SHIFT != 0) | (difference >> _WARP_BITS == 0)
    unordered: Array = (known != 0) & (difference != 0) & apart
    return unordered


class AccessLog:
    """The accesses to `num_bytes` bytes, in rows of an access's size that begin at its multiples.

    Args:
        num_bytes: how many.
        copies: whether a place that several warps have read by one access may be written by one of them. Where a tile
            has fewer elements than threads, each element has copies in several warps, of which one is stored. What the
            others have loaded meanwhile is used for nothing.

    Methods return None, or the number of a row whose access is in no order with another, and what is wrong.
    """

    def __init__(self, num_bytes: int, *, copies: bool = False) -> None:
        self._copies = copies
        self._writers = np.zeros(num_bytes, np.int32)
        self._readers = np.zeros(num_bytes, np.int32)

    def read(self, rows: Array, size: int, code: Array) -> tuple[int, str] | None:
        """Notes that threads read; rows, code [K] of each."""
        code = code[:, None]
        written = self._writers.reshape(-1, size)[rows]
        if (found := _first(written, code)) is not None:
            return found[0], f"reads what {found[1]} writes"
        self._note_readers(rows, size, code)
        return None

    def _note_readers(self, rows: Array, size: int, code: Array) -> None:
        readers = self._readers.reshape(-1, size)
        now = _together(readers[rows], code)
        readers[rows] = now
        kept = readers[rows]
        row, byte = np.nonzero(kept != now)  # several threads of this access read the byte, and the last one is noted
        if row.size:
            place, both = rows[row] * size + byte, _together(kept[row, byte], now[row, byte], _COPIES)
            self._readers[place] = both
            self._readers[place[both == _BLOCKS]] = _BLOCKS

    def write(self, rows: Array, size: int, code: Array, memory: Array, data: Array) -> tuple[int, str] | None:
        """Writes `data` [K, size] into `memory`, and notes that threads do; rows, code [K] of each.

        Warps of a block may write the same bytes: each that holds a copy of a value does.
        """
        code = code[:, None]
        writers, held = self._writers.reshape(-1, size), memory.reshape(-1, size)
        readers = self._readers.reshape(-1, size)[rows]
        if self._copies:
            of_block = (readers ^ code) >> _BLOCK_SHIFT == 0
            readers = np.where(of_block & (readers & _WARPS == _COPIES), 0, readers)
        found = _first(readers, code)
        wrong = None if found is None else (found[0], f"writes what {found[1]} reads")
        found = _first(writers[rows], code, held[rows] == data)
        wrong = wrong if found is None else (found[0], f"writes what {found[1]} writes")
        held[rows], writers[rows] = data, code
        found = _first(writers[rows], code, held[rows] == data)
        return wrong if found is None else (found[0], f"writes what {found[1]} writes at the same time")


def _first(known: Array, code: Array, same: Array | None = None) -> tuple[int, str] | None:
    """Returns the first row with an access that is in no order with a known one, and whose that was.

    Args:
        same: whether both write the same, which only another block may not.
    """
    unordered = _unordered(known, code)
    other_block = (known ^ code) >> _BLOCK_SHIFT != 0
    if same is not None:
        unordered &= other_block | ~same
    if not unordered.any():
        return None
    row, byte = np.argwhere(unordered)[0]
    return int(row), "another block" if other_block[row, byte] else "another warp, with no barrier between them,"


def _together(known: Array, code: Array, several: int = _WARPS) -> Array:
    """Returns a code for readers of before and now; `several` stands for warps of one epoch."""
    difference = known ^ code
    field = np.where((known & _WARPS == _WARPS) | (code & _WARPS == _WARPS), _WARPS, several)
    same_epoch = np.where((difference >> _WARP_BITS == 0) & (difference != 0), code & ~np.int32(_WARPS) | field, code)
    return np.where((known != 0) & (difference >> _BLOCK_SHIFT != 0), _BLOCKS, same_epoch).astype(np.int32)
