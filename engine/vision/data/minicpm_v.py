"""Conversations and images of MiniCPM-V 2.0, 2.5 and 2.6, as their finetune script and their `chat` write them.

What is trained on follows the script (2.0 that of 2024-05, the others that of 2025-09), with what is odd about it:

- An image without a marker comes first, with a line break behind it.
- Numbered markers (`<image_00>`) split the text, and its pieces are joined by line breaks, which adds blank lines.
- 2.6 numbers (`<image_id>`) only the images that are cut into tiles; `chat` numbers all.
- 2.0 has no begin token, and encodes the header of each turn, and each turn, by itself, so that sentencepiece's space
  mark opens each. Only the last turn has an end token.
- The last token of an answer that is not the end of the text must predict the end token: for 2.0 this is where the
  answers that have no end token learn one, for the others it is a second one.

`chat` joins the parts of a turn by line breaks, and encodes the text as a whole. Images that are parts of a list
are joined in this way for training too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.data.chat import Learn
from engine.errors import UserError
from engine.vision.data.family import (
    Conversation,
    EncodedChat,
    Placing,
    Tiles,
    Turn,
    VisionFamily,
    with_image_first,
)
from engine.vision.data.pixels import Grid, Normalisation, Size
from engine.vision.data.slicing import Slices, SlicingRule
from engine.vision.data.writer import ChatWriter, SplitText, TextEncoder
from engine.vision.minicpm_versions import minicpm_v_version, pads_tiles

if TYPE_CHECKING:
    from PIL.Image import Image

SYSTEM = "You are a helpful assistant."
_HALF = (0.5, 0.5, 0.5)
_PADDING = (
    "tiles are padded to the longest of their conversation, as in the original's chat and its training with one sample "
    "a device; with several it pads over these"
)


def _count(given: Mapping[str, Any], key: str, default: int) -> int:
    """Returns a whole number above 0.

    Raises:
        UserError: it is something else.
    """
    value = given.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(
            f"config.json or preprocessor_config.json has {key} {value!r}, but a whole number above 0 is expected: "
            "correct it or copy it again."
        )
    return value


class MiniCPMV(VisionFamily):
    """The family, for all versions.

    Args:
        config: config.json of the model.
        processor: its preprocessor_config.json; empty where it has none.
        tokenizer: of the model.
        learn_header: train on the line break between the header of an answer and the answer, as the script of 2.6 did
            before 2025-09.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        processor: Mapping[str, Any],
        tokenizer: TextEncoder,
        *,
        learn_header: bool = False,
    ) -> None:
        self.version, self._pads_tiles = minicpm_v_version(config), pads_tiles(config)
        self.remark = _PADDING if self._pads_tiles else None
        given = {**config, **(config.get("slice_config") or {}), **processor}
        if given.get("slice_mode") is False:
            raise UserError("config.json has slice_mode false, but images are always cut into tiles; set it to true.")
        self.rule = SlicingRule(
            max_slices=_count(given, "max_slice_nums", 9),
            scale_resolution=_count(given, "scale_resolution", 448),
            patch_size=_count(given, "patch_size", 14),
        )
        self._norm = Normalisation(given.get("norm_mean", _HALF), given.get("norm_std", _HALF), self.rule.patch_size)
        self.patch_features = self._norm.features
        self._queries = int(config["query_num"])
        self._text = SplitText(tokenizer)
        self._unknown = self._text.token("<unk>")
        self._learn_header = learn_header
        layouts: dict[str, tuple[Callable[..., EncodedChat], str]] = {
            "2.0": (self._write_plain, "</s>"),
            "2.5": (self._write_turns, "<|eot_id|>"),
            "2.6": (self._write_turns, "<|im_end|>"),
        }
        self._layout, self._end = layouts[self.version]
        for token in ("<image>", "</image>", "<slice>", "</slice>", self._end):
            self._text.token(token)

    def encode(self, chat: Conversation, sizes: Sequence[Size], *, learn: Learn) -> Iterator[EncodedChat]:
        slices = [self.rule.slices(size) for size in sizes]
        yield self._layout(with_image_first(chat, len(sizes)), slices, learn)

    def prompt(self, chat: Conversation, sizes: Sequence[Size]) -> EncodedChat:
        slices = [self.rule.slices(size) for size in sizes]
        return self._layout(with_image_first(chat, len(sizes)), slices, None)

    def grids(self, size: Size, *, is_only_image: bool = True) -> tuple[Grid, ...]:
        return tuple(self._norm.grid(tile) for tile in self.rule.slices(size).sizes())

    def grids_together(self, grids: Sequence[Grid], documents: Sequence[int]) -> tuple[Grid, ...]:
        if not self._pads_tiles:
            return tuple(grids)
        longest: dict[int, int] = {}
        for document, (rows, columns) in zip(documents, grids, strict=True):
            longest[document] = max(longest.get(document, 0), rows * columns)
        return tuple((*grid, longest[document]) for document, grid in zip(documents, grids, strict=True))

    def tiles(self, image: Image, *, is_only_image: bool = True) -> Tiles:
        slices = self.rule.slices(image.size)
        patches = [self._norm.patches(tile) for tile in slices.tiles(image)]
        return Tiles(np.concatenate(patches), self.grids(image.size))

    def _write_plain(self, chat: Conversation, slices: Sequence[Slices], learn: Learn | None) -> EncodedChat:
        """Writes 2.0's layout; `learn` None writes the prompt of `chat`."""
        writer, last = ChatWriter(self._text, len(slices)), len(chat.turns) - 1
        if learn is None:
            writer.write("<s>")
        for number, turn in enumerate(chat.turns):
            if turn.role == "system":
                raise UserError("MiniCPM-V 2.0 has no system turn; put its text into the first turn of the user.")
            writer.write("<用户>" if turn.role == "user" else "<AI>")
            if learn is not None:
                writer.mark()
            start = writer.mark() if learn is not None else 0
            self._write_parts(writer, turn, chat, slices, training=learn is not None)
            if learn is None:
                continue
            if number == last:
                writer.write("</s>")
            end = writer.mark()
            if _is_target(chat.turns, number, learn):
                writer.learn(start, end)
        if learn is None:
            writer.write("<AI>")
        return self._done(writer, learn)

    def _write_turns(self, chat: Conversation, slices: Sequence[Slices], learn: Learn | None) -> EncodedChat:
        """Writes 2.5's layout, Llama's, or 2.6's, ChatML; `learn` None writes the prompt of `chat`."""
        writer, newer = ChatWriter(self._text, len(slices)), self.version == "2.6"
        before, behind, end = (
            ("<|im_start|>", "\n", "\n") if newer else ("<|start_header_id|>", "<|end_header_id|>\n\n", "")
        )
        if not newer:
            writer.write("<|begin_of_text|>")
        elif chat.turns[0].role != "system":
            writer.write(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n")
        answer = f"{before}assistant{behind}"
        header = len(self._text.encode(answer.rstrip("\n") if newer and self._learn_header else answer))
        for number, turn in enumerate(chat.turns):
            start = writer.mark()
            writer.write(f"{before}{turn.role}{behind}")
            self._write_parts(writer, turn, chat, slices, training=learn is not None, strip=not newer)
            writer.write(f"{self._end}{end}")
            if learn is not None and _is_target(chat.turns, number, learn):
                writer.learn(start + header, writer.last(start, self._text.token(self._end)) + 1)
        if learn is None:
            writer.write(answer)
        return self._done(writer, learn)

    def _done(self, writer: ChatWriter, learn: Learn | None) -> EncodedChat:
        if learn == "all":
            writer.learn_all()
        return writer.done(after_turn=self._text.token(self._end))

    def _write_parts(
        self,
        writer: ChatWriter,
        turn: Turn,
        chat: Conversation,
        slices: Sequence[Slices],
        *,
        training: bool,
        strip: bool = False,
    ) -> None:
        """Writes a turn's content; with `strip` without white space around it, as Llama's template does."""
        parts = _laid_out(turn, chat.placing, training=training)
        for part in _stripped(parts) if strip else parts:
            if isinstance(part, str):
                writer.write(part)
            else:
                self._write_image(writer, part, slices, training=training)

    def _write_image(self, writer: ChatWriter, number: int, slices: Sequence[Slices], *, training: bool) -> None:
        """Writes the stand-ins of an image: the whole, and then its tiles row by row."""
        tiles = slices[number]
        newer = self.version == "2.6"
        if newer:
            if not training:
                writer.write(f"<image_id>{number}</image_id>")
            elif tiles.columns:  # counted without the images that are not cut
                count = sum(bool(one.columns) for one in slices[:number])
                writer.write(f"<image_id>{count}</image_id>")
        self._write_tile(writer, number, "image")
        if not tiles.columns:
            return
        if not newer:
            writer.write("<slice>")
        for row in range(tiles.rows):
            writer.write("\n" if row else "")
            for _ in range(tiles.columns):
                self._write_tile(writer, number, "slice" if newer else "image")
        if not newer:
            writer.write("</slice>")

    def _write_tile(self, writer: ChatWriter, number: int, name: str) -> None:
        writer.write(f"<{name}>")
        writer.place(number, self._unknown, self._queries)
        writer.write(f"</{name}>")


def _laid_out(turn: Turn, placing: Placing, *, training: bool) -> list[str | int]:
    """Returns a turn's parts with what is written between them."""
    parts = list(turn.parts)
    if training and placing == "in_place":
        return parts
    if not training and turn.images and placing != "parts":
        # `chat` takes a list of images and texts, not a text with markers on lines of their own
        parts = [part.strip("\n") if isinstance(part, str) else part for part in parts]
    if placing == "parts" or not training:
        parts = [part for part in parts if part != ""]
    between: list[list[str | int]] = [["\n", part] for part in parts]
    return [piece for pair in between for piece in pair][1:]


def _stripped(parts: Sequence[str | int]) -> list[str | int]:
    stripped = list(parts)
    if stripped and isinstance(stripped[0], str):
        stripped[0] = stripped[0].lstrip()
    if stripped and isinstance(stripped[-1], str):
        stripped[-1] = stripped[-1].rstrip()
    return stripped


def _is_target(turns: Sequence[Turn], number: int, learn: Learn) -> bool:
    """Returns whether a turn's tokens are targets."""
    return turns[number].role == "assistant" and (learn != "last" or number == len(turns) - 1)
