"""The file that Pillow reads an image from, which ends what would take more memory or time than an image does.

Pillow limits the pixels of an image, but not what else a file may consist of: millions of empty chunks, comments of
one byte each, tables that are longer than the image, scans that go over the same pixels again and again. A file of a
few kilobytes can take minutes in this way, and one of some megabytes gigabytes.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

from engine.errors import UserError

MOST_BYTES = 256 << 20
"""Size limit of a file: the largest image that is read has about as many bytes uncompressed."""
_MOST_READS = 1 << 19
"""Pillow reads a chunk, a comment or a strip in a few reads, and pixels in blocks of 64 KiB."""
_MOST_HEADER_BYTES = 8 << 20
"""Limit of what precedes the pixels: profiles, thumbnails and notes, which Pillow turns into objects."""
_MOST_REPEATS = 100
_REPEATED = {"JPEG": (b"\xff\xda", "scans"), "PNG": (b"iCCP", "color profiles")}
"""Parts that take long however few bytes they have, with the bytes that mark them: a scan of a JPEG file goes over all
pixels (progressive files have about ten), a profile of a PNG file inflates to a megabyte (files have one)."""
_MOST_VALUES = 1 << 16
"""Length limit of a TIFF file's tables: one value for each row of an image of that height."""
_WITHOUT_HEADER = ("TIFF", "WEBP")
"""Formats whose files Pillow reads as a whole, or in any order, to know the size of the image."""
_TIFF_BYTES = (1, 2, 7)
"""Types of a TIFF file's tables that stay bytes when they are read."""


class ExcessError(UserError):
    """Raised where a file exceeds what an image consists of; its words say how."""


class LimitedFile:
    """A file for `PIL.Image.open`: reads of a regular file, up to the limits.

    Args:
        file: opened; belongs to the caller.
        kind: Pillow's name for its format.

    Raises:
        ExcessError: while Pillow reads, a limit is passed.
    """

    def __init__(self, file: BinaryIO, kind: str) -> None:
        self._file, self._kind = file, kind
        self._reads = self._bytes = self._repeats = 0
        self._in_header = kind not in _WITHOUT_HEADER

    def end_header(self) -> None:
        """Lifts the limit of the header, because from now on pixels are read."""
        self._in_header = False

    def read(self, size: int = -1) -> bytes:
        """Returns the next bytes."""
        data = self._file.read(size)
        self._reads += 1
        self._bytes += len(data)
        if self._reads > _MOST_READS:
            raise ExcessError(f"has more than {_MOST_READS:,} pieces")
        if self._in_header and self._bytes > _MOST_HEADER_BYTES:
            raise ExcessError(f"has more than {_MOST_HEADER_BYTES >> 20} MiB in front of its pixels")
        if self._kind in _REPEATED:
            mark, name = _REPEATED[self._kind]
            self._repeats += data.count(mark)
            if self._repeats > _MOST_REPEATS:
                raise ExcessError(f"has more than {_MOST_REPEATS} {name}")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves to a place and returns it."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Returns the place of the next byte."""
        return self._file.tell()

    def fileno(self) -> int:
        """Returns the descriptor, which libtiff reads from."""
        return self._file.fileno()


def check_tiff_tables(file: BinaryIO) -> None:
    """Checks the lengths of the tables of a TIFF file's first image, which Pillow turns into objects as it opens it.

    Raises:
        ExcessError: a table is longer than an image needs.
        struct.error: the file breaks off.
    """
    file.seek(0)
    head = file.read(16)
    order = ">" if head.startswith(b"MM") else "<"
    is_big = 43 in head[2:4]
    file.seek(struct.unpack_from(order + ("Q" if is_big else "L"), head, 8 if is_big else 4)[0])
    (count,) = struct.unpack(order + ("Q" if is_big else "H"), file.read(8 if is_big else 2))
    for _ in range(min(count, 1 << 16)):
        entry = file.read(20 if is_big else 12)
        _, kind, values = struct.unpack_from(order + ("HHQ" if is_big else "HHL"), entry)
        if kind not in _TIFF_BYTES and values > _MOST_VALUES:
            raise ExcessError(f"has a table of {values:,} values, more than {_MOST_VALUES:,}")
