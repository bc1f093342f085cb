"""Conversations and images of CogVLM (both generations) and CogAgent, as `build_conversation_input_ids` writes them.

A conversation has one image at most. It stands in front of all text, behind the begin token, wherever it was.
Its tokens are boi, the patches and eoi. All patches have one position, and all but eoi take the weights for images.

The history is part of the prompt's text, so that a document has one answer: a record gives one document for each of its
answers, with the turns before it as the history. (The originals' scripts draw one answer of a record at random.)
Prompt and answer are encoded by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.data.chat import Learn
from engine.data.extras import Span
from engine.errors import UserError
from engine.vision.data.family import Conversation, EncodedChat, Tiles, Turn, VisionFamily
from engine.vision.data.pixels import CLIP_MEAN, CLIP_STD, Grid, Normalisation, Size, resized
from engine.vision.data.writer import ChatWriter, SplitText, TextEncoder

if TYPE_CHECKING:
    from PIL.Image import Image

Rounds = Sequence[tuple[str, str]]
"""Questions and answers before the last question."""


def _questions(answer: str) -> Callable[[Rounds, str], str]:
    """Returns CogVLM's layout with these words before an answer."""

    def text(history: Rounds, query: str) -> str:
        rounds = "".join(f"Question: {old} {answer} {reply}\n" for old, reply in history)
        return f"{rounds}Question: {query} {answer}"

    return text


def _base(history: Rounds, query: str) -> str:
    return query


def _instructions(history: Rounds, query: str) -> str:
    rounds = "".join(f"{old} [/INST] {reply} [INST] " for old, reply in history)
    return f" [INST] {rounds}{query} [/INST] "


def _old_agent(history: Rounds, query: str) -> str:
    rounds = "".join(f"{old} Answer: {reply}\nQuestion: " for old, reply in history)
    return f"<EOI>Question: {rounds}{query} Answer:"


def _agent_vqa(history: Rounds, query: str) -> str:
    return f"<EOI>Question: {query} Short answer:"


_COGVLM = {"chat": _questions("Answer:"), "vqa": _questions("Short answer:"), "base": _base}
_COGAGENT = {"chat": _instructions, "chat_old": _old_agent, "vqa": _agent_vqa, "base": _base}
_CROSS_PATCH = 14
"""Pixels of a patch's side in CogAgent's second tower; not in its configuration."""


class CogVLM(VisionFamily):
    """The family.

    Args:
        config: config.json of the model.
        tokenizer: of the model.
        bos, eos: ids of the begin and end token.
        template: the layout of the text; None takes the configuration's template_version.
    """

    has_experts = True

    def __init__(
        self, config: Mapping[str, Any], tokenizer: TextEncoder, *, bos: int, eos: int, template: str | None = None
    ) -> None:
        vision = config["vision_config"]
        side, patch = int(vision["image_size"]), int(vision["patch_size"])
        self._norm = Normalisation(CLIP_MEAN, CLIP_STD, patch)
        self._size = (side, side)
        self.patch_features = self._norm.features
        self._is_agent = "cross_image_size" in config
        second = "num_multi_query_heads" in config
        rows = side // patch // (2 if second else 1)
        self._features = rows * rows + 2  # with boi and eoi
        self._cross_size: Size | None = None
        if self._is_agent:
            self._cross_size = (int(config["cross_image_size"]),) * 2
            self._cross_norm = Normalisation(CLIP_MEAN, CLIP_STD, _CROSS_PATCH)
            self.cross_patch_features = self._cross_norm.features
        padding = config.get("pad_token_id")
        self._padding = int(padding) if padding is not None else (128002 if second else 0)
        self._bos, self._eos = bos, eos
        self._text = SplitText(tokenizer)
        layouts = _COGAGENT if self._is_agent else _COGVLM
        self._template = template or str(config.get("template_version", "chat"))
        if self._template not in layouts:
            raise UserError(
                f"the chat template of the model is {self._template!r}, expected one of {', '.join(layouts)}; set "
                "template_version in its config.json."
            )
        self._layout = layouts[self._template]
        self._forgets = self._template == "base" or (self._is_agent and self._template == "vqa")

    def encode(self, chat: Conversation, sizes: Sequence[Size], *, learn: Learn) -> Iterator[EncodedChat]:
        rounds = list(_rounds(chat.turns))
        if not rounds or rounds[-1][1] is None:
            rounds = rounds[:-1]
        answered = [(query, answer or "") for query, answer in rounds]
        first = len(answered) - 1 if learn == "last" else 0
        for number in range(first, len(answered)):
            query, answer = answered[number]
            writer = self._prompt(chat, answered[:number], query, len(sizes))
            writer.write_ids([*self._text.encode(answer), self._eos], target=True)
            if learn == "all":
                writer.learn_all()
            yield writer.done()

    def prompt(self, chat: Conversation, sizes: Sequence[Size]) -> EncodedChat:
        *history, (query, answer) = _rounds(chat.turns)
        if answer is not None:
            raise UserError(
                "the conversation ends with an answer, but the last question is answered; remove the answer."
            )
        return self._prompt(chat, [(old, reply or "") for old, reply in history], query, len(sizes)).done()

    def grids(self, size: Size, *, is_only_image: bool = True) -> tuple[Grid, ...]:
        return (self._norm.grid(self._size),)

    def tiles(self, image: Image, *, is_only_image: bool = True) -> Tiles:
        tile = resized(image, self._size)
        return Tiles(self._norm.patches(tile), self.grids(image.size))

    def cross_grids(self, size: Size) -> tuple[Grid, ...]:
        return () if self._cross_size is None else (self._cross_norm.grid(self._cross_size),)

    def cross_tiles(self, image: Image) -> Tiles | None:
        if self._cross_size is None:
            return None
        tile = resized(image, self._cross_size)
        return Tiles(self._cross_norm.patches(tile), self.cross_grids(image.size))

    def positions(self, tokens: NDArray[Any], spans: Sequence[Span], sizes: Sequence[Size]) -> NDArray[np.int64]:
        steps = np.ones(len(tokens), dtype=np.int64)
        steps[:1] = 0
        for start, end in spans:  # boi advances, the first patch too, the other patches do not, eoi does
            steps[start + 2 : end - 1] = 0
        return np.cumsum(steps)

    def expert_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        return [(start, end - 1) for start, end in spans]

    def _prompt(self, chat: Conversation, history: Rounds, query: str, num_images: int) -> ChatWriter:
        if num_images > 1:
            raise UserError(f"the record has {num_images} images, but the model takes one; keep one of them.")
        if history and self._forgets:
            raise UserError(
                f"the layout {self._template!r} has room for one question, but the record has {len(history) + 1}; set "
                "template_version in the model's config.json to chat, or keep one question."
            )
        writer = ChatWriter(self._text, num_images)
        writer.write_ids([self._bos])
        if num_images:
            writer.place(0, self._padding, self._features)
        elif self._is_agent:
            raise UserError("the record has no image, but the model's layers attend to one; remove the record.")
        writer.write(self._layout(history, query))
        writer.mark()
        return writer


def _rounds(turns: Sequence[Turn]) -> Iterator[tuple[str, str | None]]:
    """Yields questions with their answers; the last may have none.

    Raises:
        UserError: the turns are not questions and answers in turn.
    """
    query: str | None = None
    for turn in turns:
        if turn.role == "system":
            raise UserError("the model has no system turn; put its text into the first turn of the user.")
        if (turn.role == "assistant") != (query is not None):
            raise UserError("two turns of one role follow each other, or the assistant's is first; correct the record.")
        if turn.role == "assistant":
            assert query is not None
            yield query, turn.text
            query = None
        else:
            query = turn.text.strip("\n") if turn.images else turn.text
    if query is not None:
        yield query, None
