"""Turns conversations with pictures into documents, reading no more of a picture than its header."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.data.chat import Message
from engine.data.document import Document
from engine.data.record_files import Place
from engine.data.template import Learn
from engine.data.vision.columns import Extras, PlacedPicture
from engine.data.vision.family import Conversation, EncodedChat, VisionFamily
from engine.data.vision.files import picture_size
from engine.data.vision.pixels import Size
from engine.data.vision.records import MARKER, PictureRef, PictureSample, plain_conversation
from engine.errors import UserError


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

    def prompt(self, conversation: Conversation, files: list[Path]) -> tuple[EncodedChat, list[PlacedPicture]]:
        """Returns the tokens of a prompt, and its pictures.

        Args:
            conversation: its turns' pictures are numbers into `files`.
            files: of the pictures.
        """
        sizes = [picture_size(file, "the prompt") for file in files]
        encoded = self.family.prompt(conversation, sizes)
        return encoded, [
            PlacedPicture(str(file.resolve()), "", "the prompt", size, tuple(spans))
            for file, size, spans in zip(files, sizes, encoded.spans, strict=True)
        ]

    def _placed(self, place: Place, ref: PictureRef) -> PlacedPicture:
        folder, where = self._folder or place.path.parent, f"{place}: field '{ref.field}'"
        file = folder / ref.path
        if file not in self._sizes:
            self._sizes[file] = picture_size(file, where)
        return PlacedPicture(ref.path, str(folder.resolve()), where, self._sizes[file], ())


def _document(place: Place, encoded: EncodedChat, pictures: list[PlacedPicture]) -> Document:
    placed = [
        PlacedPicture(picture.path, picture.folder, picture.where, picture.size, tuple(spans))
        for picture, spans in zip(pictures, encoded.spans, strict=True)
    ]
    # features come in the order of the tokens, which a record need not name its pictures in
    placed.sort(key=lambda picture: picture.spans[0])
    return Document(
        place,
        np.array(encoded.ids, dtype=np.int32),
        np.array(encoded.targets, dtype=bool),
        Extras(tuple(placed), encoded.odd_labels),
    )
