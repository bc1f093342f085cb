"""What a client's text consists of: chunks of token ids, and of images. Needs no torch.

Images become tokens where a model reads them, so that who reads a request brings what places them.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import UserError
from rankfold.serving.protobuf import Message
from rankfold.serving.tensors import read_array

Tokens = NDArray[np.int64]
MOST_IMAGES = 64
"""Images of one text."""
_BEGINNINGS = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}


@dataclass(frozen=True, slots=True)
class ChunkImage:
    """An image of a text.

    Args:
        data: of a PNG or JPEG file.
        format: which of them.
        expected: tokens that the client takes it for; None where it does not say.
    """

    data: bytes
    format: str
    expected: int | None


class PlacesImages(Protocol):
    """Makes tokens of the images of a text."""

    def placed(self, where: str, chunks: Sequence[Tokens | ChunkImage]) -> tuple[Tokens, tuple[Any, ...]]:
        """Returns int64 [T] all tokens, and the images with the places of their features.

        Args:
            where: what a sentence calls the text.
            chunks: of it.

        Raises:
            UserError: the model sees no images, or one cannot be read.
        """
        ...


def read_chunks(where: str, chunks: Sequence[Message], images: PlacesImages | None) -> tuple[Tokens, tuple[Any, ...]]:
    """Returns int64 [T] the tokens of chunks in protobuf, and their images; as `PlacesImages.placed`.

    Raises:
        UserError: a chunk is none that is read here.
    """
    found: list[Tokens | ChunkImage] = []
    for chunk in chunks:
        if "dmel" in chunk:
            raise _foreign(where, "dmel")
        if "image" not in chunk:
            ids = read_array(f"tokens of {where}", chunk.get("encoded_text", {}).get("tokens", b""), "<i4")
            found.append(ids.astype(np.int64))
            continue
        image = chunk["image"]
        if "override_dimensions" in image:
            raise UserError(f"an image of {where} has override_dimensions, which are not read here: leave them out.")
        found.append(_checked(where, image.get("data", b""), image.get("format", ""), image.get("expected_tokens")))
    return _placed(where, found, images)


def read_json_chunks(
    where: str, chunks: Sequence[object], images: PlacesImages | None
) -> tuple[Tokens, tuple[Any, ...]]:
    """Returns what `read_chunks` does, of chunks in JSON.

    Raises:
        UserError: a chunk is none that is read here.
    """
    found: list[Tokens | ChunkImage] = []
    for chunk in chunks:
        one: Mapping[str, Any] = chunk if isinstance(chunk, dict) else {}
        kind, tokens = one.get("type", "encoded_text" if one else None), one.get("tokens")
        if kind == "encoded_text" and isinstance(tokens, list):
            if not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
                raise UserError(f"{where} has something else than token ids in a chunk: send whole numbers from 0.")
            found.append(np.asarray(tokens, np.int64))
        elif kind == "image" and isinstance(one.get("data"), str):
            try:
                data = b64decode(one["data"], validate=True)
            except (binascii.Error, ValueError):
                raise UserError(f"an image of {where} is not in base64: send it so.") from None
            found.append(_checked(where, data, one.get("format"), one.get("expected_tokens")))
        else:
            raise _foreign(where, kind)
    return _placed(where, found, images)


def _placed(
    where: str, chunks: Sequence[Tokens | ChunkImage], images: PlacesImages | None
) -> tuple[Tokens, tuple[Any, ...]]:
    count = sum(isinstance(one, ChunkImage) for one in chunks)
    if count > MOST_IMAGES:
        raise UserError(f"{where} has {count} images, but at most {MOST_IMAGES} are read: send fewer.")
    if count and images is not None:
        return images.placed(where, chunks)
    if count:
        raise UserError(f"{where} has a chunk of image, but only text is read here: send tokens.")
    texts = [one for one in chunks if not isinstance(one, ChunkImage)]
    return np.concatenate([np.zeros(0, np.int64), *texts]), ()


def _checked(where: str, data: bytes, kind: object, expected: object) -> ChunkImage:
    if kind not in _BEGINNINGS or not data.startswith(_BEGINNINGS[str(kind)]):
        raise UserError(
            f"an image of {where} has format {str(kind)[:20]!r}, but png and jpeg are read, and its bytes have to "
            "begin like a file of its format: send such a one."
        )
    if expected is not None and (type(expected) is not int or expected < 1):
        raise UserError(f"an image of {where} has expected_tokens {expected!r:.40}: send a whole number of 1 or more.")
    return ChunkImage(data, str(kind), expected)


def _foreign(where: str, kind: object) -> UserError:
    return UserError(
        f"{where} has a chunk of {str(kind)[:40]}, but tokens are read here, and images in the request itself as png "
        "or jpeg: send these."
    )
