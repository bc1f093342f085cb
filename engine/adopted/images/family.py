"""Conversations with images of a model that transformers has, by its own processor.

The model's chat template writes a mark for each image, and the processor says what stands in its place: one token for
each row of features, and what is around them. How many there are depends on sizes alone, so that blank images of the
same sizes are processed where tokens are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engine.adopted.images.arguments import image_token
from engine.adopted.images.processor import image_settings, open_processor
from engine.adopted.structure import FAULTS, first_line, quiet, read_config
from engine.data.chat import Learn
from engine.data.extras import Span
from engine.data.placeholders import Placeholders
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.vision.data.family import Conversation, EncodedChat, Tiles, VisionFamily, with_image_first
from engine.vision.data.pixels import Grid, Size
from engine.vision.data.processors import image_order, template_messages

_TRIED: tuple[Size, Size] = ((64, 96), (100, 60))
"""Widths and heights of the images of the conversation that is tried."""


class AdoptedImages(VisionFamily):
    """The images of an adopted model.

    Args:
        config: config.json of the model.
        folder: of the model, where its processor's files are.
        tokenizer: of the model.

    Raises:
        UserError: the folder has no processor that can be opened, or its text is not what the engine's would be.
    """

    collector: ClassVar[str] = "engine.adopted.images.collect:collect_images"
    prompt_collector: ClassVar[str] = "engine.adopted.images.collect:DocumentImages"
    patch_features = 0
    turns_upright = True

    def __init__(self, config: Mapping[str, Any], folder: Path, tokenizer: Tokenizer) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._feature = image_token(read_config(dict(config)))
        self.processor = open_processor(folder, str(config.get("model_type")))
        self._mark = self._found_mark()
        self._texts = lru_cache(maxsize=1 << 12)(self._texts_of)
        self._check()

    def encode(self, chat: Conversation, sizes: Sequence[Size], *, learn: Learn) -> Iterator[EncodedChat]:
        chat = with_image_first(chat, len(sizes))
        ids, targets = self._tokenizer.apply_chat(
            template_messages(chat), learn=learn, images=self._placeholders(chat, sizes)
        )
        bos = self._bos(ids)
        yield self._placed(chat, bos + ids, [False] * len(bos) + targets, sizes)

    def prompt(self, chat: Conversation, sizes: Sequence[Size]) -> EncodedChat:
        chat = with_image_first(chat, len(sizes))
        ids = self._tokenizer.chat_prompt(template_messages(chat), images=self._placeholders(chat, sizes))
        ids = self._bos(ids) + ids
        return self._placed(chat, ids, [False] * len(ids), sizes)

    def grids(self, size: Size, *, is_only_image: bool = True) -> tuple[Grid, ...]:
        raise NotImplementedError("transformers' processor makes tiles")

    def tiles(self, image: Image.Image, *, is_only_image: bool = True) -> Tiles:
        raise NotImplementedError("transformers' processor makes tiles")

    def inputs(self, documents: Sequence[Sequence[Image.Image]]) -> dict[str, NDArray[Any]]:
        """Returns what the model's forward takes, for the images of some documents, each of which has one or more.

        Raises:
            UserError: the processor does not take them.
        """
        found = self._processed([list(images) for images in documents])
        unused = set(self.processor.unused_input_names)
        return {name: np.asarray(value) for name, value in found.items() if name not in unused}

    def _found_mark(self) -> str:
        """Returns what the chat template writes for an image."""
        marks = [
            str(value)
            for name in ("image_token", "boi_token", "fake_image_token")
            if (value := getattr(self.processor, name, None)) is not None
        ]
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
        for mark in marks:
            try:
                self._tokenizer.chat_prompt(chat, images=Placeholders(mark, ("",)))
            except UserError:
                continue
            return mark
        raise UserError(
            f"the chat template of {self._folder} writes none of {', '.join(marks) or 'any mark'} for an image: give "
            "data.tokenizer the folder with the model's own files, or data.chat_template its template."
        )

    def _texts_of(self, sizes: tuple[Size, ...]) -> tuple[str, ...]:
        """Returns what stands in a conversation for its images of these sizes."""
        blank = [Image.new("RGB", size) for size in sizes]
        found = self._processed([blank])
        with quiet():
            return tuple(self.processor.replace_image_token(found, image_idx=at) for at in range(len(sizes)))

    def _processed(self, documents: list[list[Image.Image]]) -> Any:
        """Returns what the image processor makes of images, as the processor of images and text asks it."""
        try:
            with quiet():
                return self.processor.image_processor(documents, **image_settings(self.processor))
        except FAULTS as error:
            sizes = ", ".join(f"{one.width} x {one.height}" for images in documents for one in images)
            raise UserError(
                f"the image processor in {self._folder} does not take images of {sizes} pixels: {first_line(error)}; "
                "leave them out."
            ) from None

    def _placeholders(self, chat: Conversation, sizes: Sequence[Size]) -> Placeholders:
        ordered = tuple(sizes[number] for number in image_order(chat))
        return Placeholders(self._mark, self._texts(ordered) if ordered else ())

    def _bos(self, ids: list[int]) -> list[int]:
        bos = self._tokenizer.bos_id
        return [bos] if bos is not None and self._tokenizer.adds_bos and ids[:1] != [bos] else []

    def _placed(self, chat: Conversation, ids: list[int], targets: list[bool], sizes: Sequence[Size]) -> EncodedChat:
        """Returns the tokens with the places of features, which are no targets."""
        order = image_order(chat)
        texts = self._texts(tuple(sizes[number] for number in order)) if order else ()
        runs = _runs(ids, self._feature)
        spans: list[list[Span]] = [[] for _ in sizes]
        for number, text in zip(order, texts, strict=True):
            wanted = self._counts(text)
            found = [runs.pop(0) for _ in wanted if runs]
            if [stop - start for start, stop in found] != list(wanted):
                raise self._stray()
            spans[number] = found
        if runs:
            raise self._stray()
        stand_ins = {at for own in spans for start, stop in own for at in range(start, stop)}
        targets = [target and at > 0 and at not in stand_ins for at, target in enumerate(targets)]
        return EncodedChat(ids, targets, spans)

    def _stray(self) -> UserError:
        token = self.processor.tokenizer.convert_ids_to_tokens(self._feature)
        return UserError(
            f"the conversation has other tokens {token} than its images have features; remove the token from the text."
        )

    @lru_cache(maxsize=1 << 12)  # noqa: B019
    def _counts(self, text: str) -> tuple[int, ...]:
        """Returns the lengths of the runs of features in what stands for an image."""
        ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(stop - start for start, stop in _runs(ids, self._feature))

    def _check(self) -> None:
        """Compares a conversation with two images with what transformers' processor makes of it."""
        images, text = [Image.new("RGB", size) for size in _TRIED], f"a {self._mark} b {self._mark} c"
        name = type(self.processor).__name__
        try:
            texts = self._texts(_TRIED)
            with quiet():
                theirs = self.processor(text=[text], images=[images], add_special_tokens=False)["input_ids"][0]
        except UserError:
            raise
        except FAULTS as error:
            raise UserError(
                f"the {name} in {self._folder} does not make text of images: {first_line(error)}; copy the model's own "
                "files, or leave images out of the records."
            ) from None
        ours, _ = Placeholders(self._mark, texts).put_into(text)
        if list(theirs) != self._tokenizer.encode(ours) or not all(map(self._counts, texts)):
            raise UserError(
                f"the {name} in {self._folder} makes other text of images than it says of each, which is not "
                "supported: leave images out of the records."
            )


def _runs(ids: Sequence[int], token: int) -> list[Span]:
    """Returns where runs of a token begin and end."""
    text = "".join("x" if one == token else " " for one in ids)
    return [found.span() for found in re.finditer("x+", text)]
