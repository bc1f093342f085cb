"""Reads image files: the size from the header alone, and later the pixels.

What an image is, its file decides: of several frames the first is taken, and what the camera noted on how it was held
counts where the model's own code follows it. What cannot be read is an error; no other image takes its place.
"""

from __future__ import annotations

import math
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from engine.errors import UserError
from engine.files import platforms
from engine.vision.data.limited_file import MOST_BYTES, ExcessError, LimitedFile, check_tiff_tables
from engine.vision.data.pixels import Size

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 89_478_485
"""Pixels of the largest image that is read: Pillow's own limit, above which a small file may fill the memory."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names for what is read. Of its other formats, EPS starts a program, AVIF and JPEG 2000 take as much memory
as the compressed pixels ask for, whatever the header says, PPM is decoded number by number, and the rest is rare."""
_FOREIGN = {"PDF": (0, b"%PDF"), "HEIC": (4, b"ftyphe"), "HEIF": (4, b"ftypmif1")}
"""Formats that Pillow has no reader for: how their files begin, and where."""


def image_size(path: Path, where: str, *, upright: bool = False) -> Size:
    """Returns an image's width and height from its header.

    Args:
        path: of the file.
        where: record and field that name it, for messages.
        upright: the size once it is turned as its EXIF orientation says.

    Raises:
        UserError: the file is not there, is no image, or is too large.
    """
    from PIL.Image import DecompressionBombWarning

    with warnings.catch_warnings():  # not in threads: filters belong to the process
        warnings.simplefilter("ignore", DecompressionBombWarning)
        with _readable(path, where) as image:
            return _checked_size(image, path, where, upright)


def read_image(path: Path, expected: Size, where: str, *, upright: bool = False) -> Image:
    """Returns the pixels of an image as RGB.

    Args:
        path, where, upright: as for `image_size`.
        expected: the size that its header had when the records were read.

    Raises:
        UserError: the file cannot be read to its end, or has changed.
    """
    from PIL.ImageOps import exif_transpose

    with _readable(path, where) as image:
        if (size := _checked_size(image, path, where, upright)) != expected:
            raise UserError(
                f"{where} names {path}, which was {_words(expected)} when the records were read and is "
                f"{_words(size)} now; do not change images during a run."
            )
        if upright and _orientation(image) != 1:
            exif_transpose(image, in_place=True)
        if image.format == "TIFF":
            _forget_directories(image)
        return image.convert("RGB")


@contextmanager
def _readable(path: Path, where: str) -> Iterator[Image]:
    """Opens an image; what Pillow says against it while it is open becomes one sentence."""
    from PIL import Image

    names = f"{where} names {path}"
    try:
        with _regular_file(path, names) as file:
            kind = _kind(file, names)
            if kind == "TIFF":
                check_tiff_tables(file)
            limited = LimitedFile(file, kind)
            with Image.open(limited, formats=(kind,)) as opened:  # type: ignore[arg-type]  # it has what is called
                limited.end_header()
                yield opened
    except ExcessError as excess:
        raise UserError(f"{names}, which {excess}, so it is not read; save the image again.") from None
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{names}, which does not exist; correct the path or data.image_folder.") from None
    except Image.UnidentifiedImageError:  # its words name an object of Python
        raise UserError(f"{names}, whose header is broken; replace the file.") from None
    except Image.DecompressionBombError:
        raise UserError(f"{names}, {_TOO_LARGE}.") from None
    except Exception as error:  # decoders have no error of their own: a broken file makes any of Python's
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{names}, which cannot be read ({reason}); replace the file.") from error


@contextmanager
def _regular_file(path: Path, names: str) -> Iterator[BinaryIO]:
    """Opens a file without waiting for what is none: opening a pipe waits for a writer."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | platforms.NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{names}, which is not a regular file; give an image in a file.")
        if found.st_size > MOST_BYTES:
            raise UserError(f"{names}, which has {found.st_size:,} bytes, more than {MOST_BYTES:,}; make it smaller.")
        yield file


def _kind(file: BinaryIO, names: str) -> str:
    """Returns the format of a file, by its first bytes.

    Raises:
        UserError: none of `FORMATS`; the sentence names it if it is known.
    """
    from PIL import Image

    Image.init()
    prefix = file.read(16).ljust(16, b"\0")  # Pillow's own tests of prefixes expect so many
    accepts = {name: accept for name, (_, accept) in Image.OPEN.items() if accept is not None}
    # a text in place of True says that this build of Pillow cannot read it
    kind = next((name for name in (*FORMATS, *accepts) if name in accepts and accepts[name](prefix)), None)
    if kind is None:
        kind = next((name for name, (place, start) in _FOREIGN.items() if prefix.startswith(start, place)), None)
    if kind is None:
        raise UserError(f"{names}, which is no image that Pillow can read; replace the file.")
    if kind not in FORMATS:
        known = f"{', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
        raise UserError(f"{names}, whose format is {kind}, but {known} are read; convert it to PNG or JPEG.")
    return kind


_TOO_LARGE = f"which has more than {MOST_PIXELS:,} pixels; make it smaller"


def _orientation(image: Image) -> int:
    """Returns the EXIF orientation in the header; 1 where the image is upright."""
    from PIL import Image as images

    if image.format == "TIFF":
        return 1  # Pillow turns these itself
    if (size := len(image.info.get("exif", b""))) > _MOST_EXIF:
        raise ExcessError(f"has {size:,} bytes of EXIF, more than {_MOST_EXIF:,}")
    # PNG's own method would decode the image to look for a note behind its pixels
    found = images.Image.getexif(image).get(_ORIENTATION, 1)
    return found if found in range(1, 9) else 1


def _forget_directories(image: Image) -> None:
    """Removes the references to a TIFF file's further directories, which Pillow would turn into objects with the
    pixels: their tables may be of any length, and nothing here needs them."""
    from PIL.TiffTags import TAGS_V2_GROUPS

    exif = image.getexif()
    for tag in TAGS_V2_GROUPS:
        if tag in exif:
            del exif[tag]


_ORIENTATION = 0x0112
_MOST_EXIF = 1 << 20
"""Size limit of EXIF, of which a JPEG file has 64 KiB at most: Pillow makes objects of its tables."""
_SIDEWAYS = (5, 6, 7, 8)
_TILE_SIDES = (322, 323)
"""TIFF's tags for the width and height of tiles, which libtiff decodes as a whole, whatever the image's size."""


def _checked_size(image: Image, path: Path, where: str, upright: bool) -> Size:
    width, height = image.size
    if upright and _orientation(image) in _SIDEWAYS:
        width, height = height, width
    if image.format == "TIFF":
        tile = [image.tag_v2.get(tag, 1) for tag in _TILE_SIDES]  # type: ignore[attr-defined]  # a TIFF's own
        if not all(isinstance(side, int) for side in tile) or math.prod(tile) > MOST_PIXELS:
            raise ExcessError(f"has tiles of {' x '.join(map(str, tile))} pixels")
    if width * height > MOST_PIXELS:
        raise UserError(f"{where} names {path}, {_TOO_LARGE}.")
    if width < 1 or height < 1:
        raise UserError(f"{where} names {path}, which has no pixels; replace the file.")
    return width, height


def _words(size: Size) -> str:
    return f"{size[0]} x {size[1]}"
