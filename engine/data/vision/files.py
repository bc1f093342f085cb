"""Reads picture files: the size from the header alone, and later the pixels.

What a picture is, its file decides: of several frames the first is taken, and what the camera noted on how it was held
counts where the model's own code follows it. What cannot be read is an error; no other picture takes its place.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.data.vision.pixels import Size
from engine.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 89_478_485
"""Pixels of the largest picture that is read: Pillow's own limit, above which a small file may fill the memory."""


def picture_size(path: Path, where: str, *, upright: bool = False) -> Size:
    """Returns a picture's width and height from its header.

    Args:
        path: of the file.
        where: record and field that name it, for messages.
        upright: the size once it is turned as its EXIF orientation says.

    Raises:
        UserError: the file is not there, is no picture, or is too large.
    """
    from PIL.Image import DecompressionBombWarning

    with warnings.catch_warnings():  # not in threads: filters belong to the process
        warnings.simplefilter("ignore", DecompressionBombWarning)
        with _readable(path, where) as image:
            return _checked_size(image, path, where, upright)


def read_picture(path: Path, expected: Size, where: str, *, upright: bool = False) -> Image:
    """Returns the pixels of a picture as RGB.

    Args:
        path, where, upright: as for `picture_size`.
        expected: the size that its header had when the records were read.

    Raises:
        UserError: the file cannot be read to its end, or has changed.
    """
    from PIL.ImageOps import exif_transpose

    with _readable(path, where) as image:
        if (size := _checked_size(image, path, where, upright)) != expected:
            raise UserError(
                f"{where} names {path}, which was {_words(expected)} when the records were read and is "
                f"{_words(size)} now; do not change pictures during a run."
            )
        if upright and _orientation(image) != 1:
            exif_transpose(image, in_place=True)
        return image.convert("RGB")


@contextmanager
def _readable(path: Path, where: str) -> Iterator[Image]:
    """Opens a picture; what Pillow says against it while it is open becomes one sentence."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            yield opened
    except FileNotFoundError:
        raise UserError(f"{where} names {path}, which does not exist; correct the path or data.image_folder.") from None
    except UnidentifiedImageError:
        raise UserError(f"{where} names {path}, which is no picture that Pillow can read; replace the file.") from None
    except Image.DecompressionBombError:
        raise UserError(f"{where} names {path}, {_TOO_LARGE}.") from None
    # Pillow's decoders have no error of their own: these are what a broken file makes of them
    except (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, *_DECODING) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{where} names {path}, which cannot be read ({reason}); replace the file.") from error


_DECODING = (EOFError, AttributeError, struct.error, zlib.error)
_TOO_LARGE = f"which has more than {MOST_PIXELS:,} pixels; make it smaller"


def _orientation(image: Image) -> int:
    """Returns the EXIF orientation in the header; 1 where the picture is upright."""
    from PIL import Image as images

    if image.format == "TIFF":
        return 1  # Pillow turns these itself
    # PNG's own method would decode the picture to look for a note behind its pixels
    found = images.Image.getexif(image).get(_ORIENTATION, 1)
    return found if found in range(1, 9) else 1


_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)


def _checked_size(image: Image, path: Path, where: str, upright: bool) -> Size:
    width, height = image.size
    if upright and _orientation(image) in _SIDEWAYS:
        width, height = height, width
    if width * height > MOST_PIXELS:
        raise UserError(f"{where} names {path}, {_TOO_LARGE}.")
    if width < 1 or height < 1:
        raise UserError(f"{where} names {path}, which has no pixels; replace the file.")
    return width, height


def _words(size: Size) -> str:
    return f"{size[0]} x {size[1]}"
