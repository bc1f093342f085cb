"""Images of records that are in memory, written to files of a temporary folder, from which a run reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.data.record_files import Place
from engine.errors import UserError

_MODES = ("1", "L", "LA", "I", "P", "RGB", "RGBA")
"""Pillow's modes that PNG keeps as they are."""


class KeptImages:
    """Writes images to a folder. Equal images share a file, whose name is a hash of its content."""

    def __init__(self) -> None:
        self._folder: TemporaryDirectory[str] | None = None

    def keep(self, place: Place, field: str, image: Any) -> str:
        """Returns the path of a file with an image.

        Args:
            place, field: of the image, for messages.
            image: of Pillow, which is written as PNG, without loss; or a mapping with the bytes of a file.

        Raises:
            UserError: it cannot be read or written.
        """
        try:
            content = image["bytes"] if isinstance(image, Mapping) else _png(image)
        except (OSError, ValueError) as error:
            raise place.error(f"field '{field}' has an image that cannot be read ({error}); replace it.") from error
        try:
            if self._folder is None:
                self._folder = TemporaryDirectory(prefix="rankfold-images-")
            file = Path(self._folder.name) / hashlib.blake2b(content, digest_size=16).hexdigest()
            if not file.exists():
                file.write_bytes(content)
        except OSError as error:
            raise UserError(
                f"{place}: field '{field}' has an image that cannot be written to a temporary folder "
                f"({error.strerror}): set TMPDIR to a folder with more room."
            ) from error
        return str(file)

    def close(self) -> None:
        """Deletes the folder."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _png(image: Any) -> bytes:
    written = BytesIO()
    kept = image if image.mode in _MODES else image.convert("RGB")
    # the orientation, which families read as of a file; no color profile, which the file's reader ignores too
    kept.save(written, format="PNG", exif=image.info.get("exif", b""), icc_profile=None, compress_level=1)
    return written.getvalue()
