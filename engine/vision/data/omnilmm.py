"""Conversations and images of OmniLMM-12B: Zephyr's layout with a system turn, images in place of `<image>`.

An image without a marker comes first, with a line break behind it. Each has its own features; in the original's model
two images of one conversation both get those of the last.

Images are resized to the tower's square. For training the original first cuts out a random part of at least 99.99 %
of the image, of its shape within 3:4 and 4:3; here the whole image is taken, as at inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.data.chat import Learn
from engine.vision.data.family import Conversation, EncodedChat, Tiles, Turn, VisionFamily, with_image_first
from engine.vision.data.pixels import CLIP_MEAN, CLIP_STD, Grid, Normalisation, Size, resized
from engine.vision.data.writer import ChatWriter, SplitText, TextEncoder

if TYPE_CHECKING:
    from PIL.Image import Image

SYSTEM = (
    "You are an artificial intelligence assistant, which gives helpful, detailed, and polite answers to the human's "
    "questions."
)
_PATCH = 14
"""Pixels of a patch's side of its tower; not in its configuration."""


class OmniLMM(VisionFamily):
    """The family.

    Args:
        config: config.json of the model.
        tokenizer: of the model.
        bos: id of the begin token.
    """

    def __init__(self, config: Mapping[str, Any], tokenizer: TextEncoder, *, bos: int) -> None:
        side = int(config.get("image_size", 448))
        self._norm = Normalisation(CLIP_MEAN, CLIP_STD, _PATCH)
        self._size = (side, side)
        self.patch_features = self._norm.features
        self._queries = int(config["num_query"])
        self._text = SplitText(tokenizer)
        self._patch = self._text.token("<im_patch>")
        for token in ("<im_start>", "<im_end>", "</s>"):
            self._text.token(token)
        self._bos = bos

    def encode(self, chat: Conversation, sizes: Sequence[Size], *, learn: Learn) -> Iterator[EncodedChat]:
        writer = self._write(chat, len(sizes), learn)
        if learn == "all":
            writer.learn_all()
        yield writer.done()

    def prompt(self, chat: Conversation, sizes: Sequence[Size]) -> EncodedChat:
        return self._write(chat, len(sizes), None).done()

    def grids(self, size: Size, *, is_only_image: bool = True) -> tuple[Grid, ...]:
        return (self._norm.grid(self._size),)

    def tiles(self, image: Image, *, is_only_image: bool = True) -> Tiles:
        return Tiles(self._norm.patches(resized(image, self._size)), self.grids(image.size))

    def _write(self, chat: Conversation, num_images: int, learn: Learn | None) -> ChatWriter:
        """Writes the layout; `learn` None writes the prompt."""
        writer = ChatWriter(self._text, num_images)
        writer.write_ids([self._bos])
        turns = list(with_image_first(chat, num_images).turns)
        if turns[0].role != "system":
            turns.insert(0, Turn("system", (SYSTEM,)))
        header = len(self._text.encode("\n<|assistant|>\n"))
        for number, turn in enumerate(turns):
            # what follows an end token is encoded with its line break, up to the next whole token
            start = writer.mark()
            writer.write(f"\n<|{turn.role}|>\n" if number else f"<|{turn.role}|>\n")
            for part in turn.parts:
                if isinstance(part, str):
                    writer.write(part)
                else:
                    self._place(writer, part)
            writer.write("</s>")
            if turn.role == "assistant" and learn is not None and (learn != "last" or turn is turns[-1]):
                writer.learn(start + header, writer.mark())
        if learn is None:
            writer.write("\n<|assistant|>\n")
        return writer

    def _place(self, writer: ChatWriter, image: int) -> None:
        writer.write("<im_start>")
        writer.place(image, self._patch, self._queries)
        writer.write("<im_end>")
