"""Turns conversations with images into documents, reading no more of an image than its header."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.data.chat import Learn, Message
from engine.data.document import Document
from engine.data.record_files import Place
from engine.errors import UserError
from engine.vision.data.columns import Extras, PlacedImage
from engine.vision.data.family import EncodedChat, VisionFamily
from engine.vision.data.files import image_size
from engine.vision.data.pixels import Size
from engine.vision.data.records import MARKER, ImageRef, ImageSample, plain_conversation, prompt_sample


class ImageReader:
    """Reads the conversations of a vision-language model.

    Args:
        family: of the model.
        folder: that paths of images are relative to; None for the folder of the records' file.
        say: prints a line, once, where records have videos.
    """

    def __init__(
        self, family: VisionFamily, folder: str | Path | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self.family, self._say = family, say
        self._folder = None if folder is None else Path(folder).expanduser()
        self._sizes: dict[Path, Size] = {}

    def documents(self, sample: ImageSample, learn: Learn) -> Iterator[Document]:
        """Yields what is trained on of a record.

        Raises:
            UserError: an image that cannot be read, or a conversation that the family cannot express: names file,
                record and field.
        """
        placed = self._all_placed(sample)
        try:
            for encoded in self.family.encode(sample.conversation, [image.size for image in placed], learn=learn):
                yield _document(sample.place, encoded, placed)
        except UserError as error:
            raise sample.place.error(str(error)) from error

    def text_documents(self, place: Place, messages: tuple[Message, ...], learn: Learn) -> Iterator[Document]:
        """Yields what is trained on of a conversation without images."""
        for message in messages:
            if MARKER in str(message.get("content")):
                raise place.error(
                    f"the conversation has {MARKER}, but the record names no image; add the field image or images."
                )
        yield from self.documents(ImageSample(place, plain_conversation(messages), ()), learn)

    def prompt(self, sample: ImageSample) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
        """Returns the tokens of a conversation up to where the assistant's next turn begins, and its images.

        Raises:
            UserError: as for `documents`.
        """
        if sample.conversation.turns[-1].role == "assistant":
            raise sample.place.error("the conversation ends with an answer, but a prompt ends before one; remove it.")
        placed = self._all_placed(sample)
        try:
            encoded = self.family.prompt(sample.conversation, [image.size for image in placed])
        except UserError as error:
            raise sample.place.error(str(error)) from error
        return tuple(encoded.ids), _in_order(encoded, placed)

    def _all_placed(self, sample: ImageSample) -> list[PlacedImage]:
        """Returns the images of a record, with their sizes."""
        if sample.has_videos and self._say is not None:
            self._say(f"{sample.place} has a video: frames of videos are read as images, each by itself")
            self._say = None
        return [self._placed(sample.place, ref) for ref in sample.images]

    def _placed(self, place: Place, ref: ImageRef) -> PlacedImage:
        folder, where = self._folder or place.image_folder, ref.option or f"{place}: field '{ref.field}'"
        file = folder / ref.path
        if file not in self._sizes:
            self._sizes[file] = image_size(file, where, upright=self.family.turns_upright)
        return PlacedImage(ref.path, str(folder.resolve()), where, self._sizes[file], ())


def _document(place: Place, encoded: EncodedChat, images: list[PlacedImage]) -> Document:
    return Document(
        place,
        np.array(encoded.ids, dtype=np.int32),
        np.array(encoded.targets, dtype=bool),
        (Extras(_in_order(encoded, images), encoded.odd_labels),),
    )


def _in_order(encoded: EncodedChat, images: list[PlacedImage]) -> tuple[PlacedImage, ...]:
    """Returns the images with their places, in the order of the tokens, in which a record need not name them."""
    placed = [
        replace(image, spans=tuple(spans), is_only_image=len(images) == 1)
        for image, spans in zip(images, encoded.spans, strict=True)
    ]
    return tuple(sorted(placed, key=lambda image: image.spans[0]))


def sample_conversation(
    family: VisionFamily, folder: str | None, text: str, image: str, number: int
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Returns the tokens of one of train.sample_prompts, as the model's family writes a user's message, and its images.

    Args:
        folder: data.image_folder.
        image: path of its image; empty without one.
        number: of the prompt.

    Raises:
        UserError: the image cannot be read, or the model needs one.
    """
    place, messages = Place(Path("train.sample_prompts"), "number", number), [{"role": "user", "content": text}]
    sample = ImageSample(place, plain_conversation(messages), ())
    if image:
        sample = prompt_sample(place, {"images": [image]}, messages)
        named = tuple(replace(image, option="train.sample_images") for image in sample.images)
        sample = replace(sample, images=named)
    ids, images = ImageReader(family, folder).prompt(sample)
    return list(ids), images
