"""Turns conversations with pictures into documents, reading no more of a picture than its header."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.data.chat import Message
from engine.data.document import Document
from engine.data.record_files import Place
from engine.data.template import Learn
from engine.errors import UserError
from engine.vision.data.columns import Extras, PlacedPicture
from engine.vision.data.family import EncodedChat, VisionFamily
from engine.vision.data.files import picture_size
from engine.vision.data.pixels import Size
from engine.vision.data.records import MARKER, PictureRef, PictureSample, plain_conversation


class PictureReader:
    """Reads the conversations of a vision-language model.

    Args:
        family: of the model.
        folder: that paths of pictures are relative to; None for the folder of the records' file.
    """

    def __init__(self, family: VisionFamily, folder: str | Path | None = None) -> None:
        self.family = family
        self._folder = None if folder is None else Path(folder).expanduser()
        self._sizes: dict[Path, Size] = {}

    def documents(self, sample: PictureSample, learn: Learn) -> Iterator[Document]:
        """Yields what is trained on of a record.

        Raises:
            UserError: a picture that cannot be read, or a conversation that the family cannot express: names file,
                record and field.
        """
        placed = [self._placed(sample.place, ref) for ref in sample.pictures]
        try:
            for encoded in self.family.encode(sample.conversation, [picture.size for picture in placed], learn=learn):
                yield _document(sample.place, encoded, placed)
        except UserError as error:
            raise sample.place.error(str(error)) from error

    def text_documents(self, place: Place, messages: tuple[Message, ...], learn: Learn) -> Iterator[Document]:
        """Yields what is trained on of a conversation without pictures."""
        for message in messages:
            if MARKER in str(message.get("content")):
                raise place.error(
                    f"the conversation has {MARKER}, but the record names no picture; add the field image or images."
                )
        yield from self.documents(PictureSample(place, plain_conversation(messages), ()), learn)

    def prompt(self, sample: PictureSample) -> tuple[tuple[int, ...], tuple[PlacedPicture, ...]]:
        """Returns the tokens of a conversation up to where the assistant's next turn begins, and its pictures.

        Raises:
            UserError: as for `documents`.
        """
        if sample.conversation.turns[-1].role == "assistant":
            raise sample.place.error("the conversation ends with an answer, but a prompt ends before one; remove it.")
        placed = [self._placed(sample.place, ref) for ref in sample.pictures]
        try:
            encoded = self.family.prompt(sample.conversation, [picture.size for picture in placed])
        except UserError as error:
            raise sample.place.error(str(error)) from error
        return tuple(encoded.ids), _in_order(encoded, placed)

    def _placed(self, place: Place, ref: PictureRef) -> PlacedPicture:
        folder, where = self._folder or place.path.parent, ref.option or f"{place}: field '{ref.field}'"
        file = folder / ref.path
        if file not in self._sizes:
            self._sizes[file] = picture_size(file, where, upright=self.family.turns_upright)
        return PlacedPicture(ref.path, str(folder.resolve()), where, self._sizes[file], ())


def _document(place: Place, encoded: EncodedChat, pictures: list[PlacedPicture]) -> Document:
    return Document(
        place,
        np.array(encoded.ids, dtype=np.int32),
        np.array(encoded.targets, dtype=bool),
        Extras(_in_order(encoded, pictures), encoded.odd_labels),
    )


def _in_order(encoded: EncodedChat, pictures: list[PlacedPicture]) -> tuple[PlacedPicture, ...]:
    """Returns the pictures with their places, in the order of the tokens, in which a record need not name them."""
    placed = [
        replace(picture, spans=tuple(spans), alone=len(pictures) == 1)
        for picture, spans in zip(pictures, encoded.spans, strict=True)
    ]
    return tuple(sorted(placed, key=lambda picture: picture.spans[0]))
