"""Writes the tokens of a conversation piece by piece, and remembers where features and targets are.

Text is split at the tokens that the tokenizer has as a whole ("<image>", "<|im_start|>"), and the text between two of
them is encoded by itself. This is how transformers' slow tokenizers do it, which the families here were trained with:
sentencepiece puts its space mark at the start of each piece.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol

from engine.data.extras import Span
from engine.errors import UserError
from engine.vision.data.family import EncodedChat


class TextEncoder(Protocol):
    """What of a tokenizer is needed here."""

    @property
    def added_tokens(self) -> Mapping[str, int]: ...

    def encode(self, text: str) -> list[int]: ...


class SplitText:
    """A tokenizer that encodes whole tokens as such, and the text between them piece by piece."""

    def __init__(self, tokenizer: TextEncoder) -> None:
        self._tokenizer = tokenizer
        self._added = dict(tokenizer.added_tokens)
        longest_first = sorted(self._added, key=len, reverse=True)
        self._pattern = re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")

    def token(self, text: str) -> int:
        """Returns the id of a whole token.

        Raises:
            UserError: the tokenizer has none of this name.
        """
        if text not in self._added:
            raise UserError(
                f"the tokenizer has no token {text}, which the model needs for images; give data.tokenizer the "
                "folder with the model's own tokenizer files."
            )
        return self._added[text]

    def has(self, text: str) -> bool:
        return text in self._added

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._pattern.split(text):
            if piece in self._added:
                ids.append(self._added[piece])
            elif piece:
                ids += self._tokenizer.encode(piece)
        return ids


class ChatWriter:
    """Collects the tokens of one conversation.

    Args:
        text: encodes text.
        num_images: of the conversation.
    """

    def __init__(self, text: SplitText, num_images: int) -> None:
        self._text = text
        self._waiting = ""
        self._ids: list[int] = []
        self._targets: list[bool] = []
        self._spans: list[list[Span]] = [[] for _ in range(num_images)]

    def write(self, text: str) -> None:
        """Appends text, which is encoded together with the text that follows up to `place` or `mark`."""
        self._waiting += text

    def write_ids(self, ids: list[int], *, target: bool = False) -> None:
        """Appends tokens."""
        self.mark()
        self._ids += ids
        self._targets += [target] * len(ids)

    def place(self, image: int, token: int, count: int) -> None:
        """Appends stand-ins for `count` features of an image."""
        start = self.mark()
        self._ids += [token] * count
        self._targets += [False] * count
        self._spans[image].append((start, start + count))

    def mark(self) -> int:
        """Encodes the text that waits, and returns the number of tokens so far."""
        if self._waiting:
            ids = self._text.encode(self._waiting)
            self._ids += ids
            self._targets += [False] * len(ids)
            self._waiting = ""
        return len(self._ids)

    def learn(self, start: int, end: int) -> None:
        """Makes tokens targets."""
        self._targets[start:end] = [True] * (end - start)

    def learn_all(self) -> None:
        """Makes every token a target but the stand-ins of features, which are never generated."""
        self.mark()
        self._targets = [True] * len(self._ids)
        for start, end in (span for spans in self._spans for span in spans):
            self._targets[start:end] = [False] * (end - start)

    def last(self, start: int, token: int) -> int:
        """Returns the place of the last token of this id from `start` on."""
        ids = self._ids[start : self.mark()]
        return len(self._ids) - 1 - ids[::-1].index(token)

    def done(self, *, after_turn: int | None = None) -> EncodedChat:
        """Returns the conversation.

        Args:
            after_turn: the last token of a turn of targets must predict this one, where context follows.
        """
        self.mark()
        targets = [False, *self._targets[1:]] if self._targets else []
        odd = {}
        if after_turn is not None:
            odd = {at: after_turn for at, (here, behind) in enumerate(pairwise(targets)) if here and not behind}
        return EncodedChat(self._ids, targets, self._spans, odd)
