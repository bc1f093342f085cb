"""Images of clients for models that see them: in files while a command is executed, and as tokens among others.

A chunk with an image stands for all tokens from the first to the last of its features, as the model's own processor
has them; what is written around them is the client's, in chunks of text.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from engine.batch import Batch
from engine.errors import UserError
from engine.seams import resolve
from rankfold.serving.chunks import ChunkImage, Tokens

_MOST_PIXELS = 1 << 24
_OF_PROCESSORS = (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError)
"""What processors raise for images that they do not take."""


class ClientImages:
    """The images of the commands that are being executed, on this rank.

    Args:
        open_family: returns the vision family of the base (`engine.vision.data.family`); None where it sees no images.
    """

    def __init__(self, open_family: Callable[[], Any]) -> None:
        self._open_family = open_family
        self._number = 0

    @cached_property
    def family(self) -> Any:
        """The vision family of the base; None where it sees no images."""
        return self._open_family()

    @cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="images-of-clients-")

    def clear(self) -> None:
        """Deletes the files, after the commands that brought them."""
        if "_folder" in self.__dict__:
            for path in Path(self._folder.name).iterdir():
                path.unlink()

    def placed(self, where: str, chunks: Sequence[Tokens | ChunkImage]) -> tuple[Tokens, tuple[Any, ...]]:
        """See `rankfold.serving.chunks.PlacesImages`."""
        family = self.family
        if family is None:
            raise UserError(f"{where} has an image, but the model of this server sees none: send tokens.")
        given = [one for one in chunks if isinstance(one, ChunkImage)]
        names = [self._write(one) for one in given]
        try:
            sizes = [self._size(name, f"image {number} of {where}") for number, name in enumerate(names)]
            stand_ins = self._stand_ins(family, sizes)
            for number, name in enumerate(names):
                self._prove(name, sizes[number], f"image {number} of {where}", is_only=len(names) == 1)
        except UserError as error:
            raise UserError(str(error).replace(self._folder.name + os.sep, "")) from None
        except _OF_PROCESSORS as error:
            raise UserError(f"an image of {where} is none that this model's processor takes: {error!s:.200}.") from None
        parts, images, length = list[Tokens](), list[Any](), 0
        for chunk in chunks:
            if not isinstance(chunk, ChunkImage):
                parts.append(chunk)
                length += len(chunk)
                continue
            number = len(images)
            ids, spans = stand_ins[number]
            if chunk.expected is not None and chunk.expected != len(ids):
                raise UserError(
                    f"image {number} of {where} has expected_tokens {chunk.expected}, but {sizes[number][0]} x "
                    f"{sizes[number][1]} pixels are {len(ids)} tokens of this model: send that, or leave it out."
                )
            images.append(
                resolve("engine.vision.data.columns:PlacedImage")(
                    names[number],
                    self._folder.name,
                    f"image {number} of {where}",
                    sizes[number],
                    tuple((length + first, length + last) for first, last in spans),
                    len(given) == 1,
                )
            )
            parts.append(ids)
            length += len(ids)
        return np.concatenate([np.zeros(0, np.int64), *parts]), tuple(images)

    def with_images(self, batch: Batch, texts: Sequence[tuple[Tokens, tuple[Any, ...]]]) -> Batch:
        """Returns a micro-batch of one row with the images of its documents, which are decoded.

        Args:
            batch: of the documents; the last may be padding.
            texts: tokens and images of each document but padding.

        Raises:
            UserError: an image that cannot be read.
        """
        prompts, images = [tokens for tokens, _ in texts], [own for _, own in texts]
        if (more := batch.num_tokens - sum(map(len, prompts))) > 0:
            prompts, images = [*prompts, np.zeros(more, np.int64)], [*images, ()]
        try:
            found = resolve("engine.vision.inference:prompt_coordinates")(self.family, prompts, images)
        except UserError as error:
            raise UserError(str(error).replace(self._folder.name + os.sep, "")) from None
        return replace(batch, positions_BS=found.positions_T[None]).with_parts(*found.parts)

    def _write(self, image: ChunkImage) -> str:
        name, self._number = f"{self._number}.{image.format}", self._number + 1
        Path(self._folder.name, name).write_bytes(image.data)
        return name

    def _size(self, name: str, where: str) -> tuple[int, int]:
        path, upright = Path(self._folder.name, name), self.family.turns_upright
        width, height = resolve("engine.vision.data.files:image_size")(path, where, upright=upright)
        if width * height > _MOST_PIXELS:
            raise UserError(
                f"{where} has {width} x {height} pixels, but at most {_MOST_PIXELS} are read: make it smaller."
            )
        return width, height

    def _prove(self, name: str, size: tuple[int, int], where: str, *, is_only: bool) -> None:
        """Decodes an image, which does not fail later, where rows of others are computed with it.

        Raises:
            UserError: it cannot be read.
        """
        path, upright = Path(self._folder.name, name), self.family.turns_upright
        image = resolve("engine.vision.data.files:read_image")(path, size, where, upright=upright)
        tiles = self.family.tiles(image, is_only_image=is_only)
        if tiles.grids != self.family.grids(size, is_only_image=is_only):
            raise UserError(f"{where} has other patches than its size has: send another image.")

    @staticmethod
    def _stand_ins(family: Any, sizes: Sequence[tuple[int, int]]) -> list[tuple[Tokens, list[tuple[int, int]]]]:
        """Returns the tokens that stand for each image, and which of them its features replace."""
        turn = resolve("engine.vision.data.family:Turn")("user", tuple(range(len(sizes))))
        chat = family.prompt(resolve("engine.vision.data.family:Conversation")((turn,)), sizes)
        found = []
        for spans in chat.spans:
            first, last = spans[0][0], spans[-1][1]
            ids = np.asarray(chat.ids[first:last], np.int64)
            found.append((ids, [(start - first, end - first) for start, end in spans]))
        return found
