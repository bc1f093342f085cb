"""Tokenises samples into documents: token ids, and which of them are targets.

A document is what attention may see together: one record, or one cut of a .txt stream. Its first token is never
a target, because there is nothing to predict it from.

The begin token opens a document where the tokenizer adds one, the end token closes it; a document that was cut off
has none. Prompt and completion are tokenised separately and then joined, so that the prompt's tokens are the ones that
generation will start from, whatever the completion begins with. (Tokenised as one string, the last letters of the
prompt may fuse with the first of the completion into a token that no prompt contains.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.data.chat import Learn, Message
from engine.data.document import Document
from engine.data.formats import ChatSample, CompletionSample, FamilySample, Sample, TextSample, TokenSample
from engine.data.record_files import Place
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError

CHUNK = 1024
"""Samples that are tokenised together."""
SEGMENT_CHARACTERS = 1 << 22
"""A stream is encoded in pieces of about this many characters, cut after a line end, to bound the memory."""


class ConversationReader(Protocol):
    """Reads the conversations of a model that has its own layout for them, with images and without."""

    @property
    def family(self) -> Any:
        """The family of the model, which reads the images of rows."""
        ...

    def documents(self, sample: Any, learn: Learn) -> Iterator[Document]:
        """Yields the documents of a `FamilySample`.

        Raises:
            UserError: an image that cannot be read, or a conversation that the family cannot express.
        """
        ...

    def text_documents(self, place: Place, messages: tuple[Message, ...], learn: Learn) -> Iterator[Document]:
        """Yields the documents of a conversation without images.

        Raises:
            UserError: as for `documents`.
        """
        ...


def tokenize_samples(
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    *,
    mask_prompt: bool,
    stream_length: int,
    last_answer: bool = False,
    images: ConversationReader | None = None,
) -> Iterator[Document]:
    """Yields the documents of some samples, in order; one each, but several for a stream, and for a conversation
    whose layout has room for one answer only.

    Args:
        samples: of any kind; their texts are encoded together, so give many at once.
        tokenizer: encodes them.
        mask_prompt: train only on completions and assistant turns; otherwise on every token but the first.
        stream_length: tokens of one cut of a stream.
        last_answer: train on the last answer of a conversation only.
        images: reads conversations, with images and without, where the model has its own layout for them; None
            where it reads none.

    Raises:
        UserError: a conversation that the chat template cannot render, or completions without an end token.
    """
    texts = [text for sample in samples for text in _texts(sample)]
    encoded = iter(tokenizer.encode_many(texts))
    begin = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    end = [tokenizer.eos_id] if tokenizer.eos_id is not None else []
    learn: Learn = "last" if last_answer else "answers" if mask_prompt else "all"
    conversations = [one.messages for one in samples if isinstance(one, ChatSample)] if images is None else []
    chats = iter(tokenizer.apply_chats(conversations, learn=learn) if conversations else ())
    for sample in samples:
        if isinstance(sample, TokenSample):
            yield _document(sample.place, sample.ids, sample.answers, mask_prompt)
        elif isinstance(sample, ChatSample) and images is not None:
            yield from images.text_documents(sample.place, sample.messages, learn)
        elif isinstance(sample, ChatSample):
            if isinstance(chat := next(chats), UserError):
                raise sample.place.error(str(chat)) from chat
            yield _document(sample.place, *chat, mask_prompt)
        elif isinstance(sample, CompletionSample):
            if not end:
                raise UserError(
                    f"the tokenizer has no end token, so a model trained on the completions of {sample.place.path} "
                    "would never stop; name eos_token in its tokenizer_config.json."
                )
            prompt, completion = begin + next(encoded), next(encoded) + end
            ids = np.array(prompt + completion, dtype=np.int32)
            yield _document(sample.place, ids, np.arange(len(ids)) >= len(prompt), mask_prompt)
        elif isinstance(sample, FamilySample):
            yield from _reader(sample, images).documents(sample, learn)
        else:
            text = _encode_stream(sample.text, tokenizer) if sample.is_stream else next(encoded)
            ids = np.array([*begin, *text, *end], dtype=np.int32)
            whole = Document(sample.place, ids, np.arange(len(ids)) > 0)
            yield from whole.cut(stream_length) if sample.is_stream else (whole,)


def _document(place: Place, ids: NDArray[np.int32], answers: NDArray[np.bool_], mask_prompt: bool) -> Document:
    """Returns a document of ids [T] whose targets are the answers, bool [T], or everything, less the first token."""
    targets = answers.copy() if mask_prompt else np.ones(len(ids), dtype=bool)
    targets[:1] = False
    return Document(place, ids, targets)


def _reader(sample: FamilySample, images: ConversationReader | None) -> ConversationReader:
    if images is None:
        raise sample.place.error(sample.refusal())
    return images


def _texts(sample: Sample) -> tuple[str, ...]:
    if isinstance(sample, CompletionSample):
        return (sample.prompt, sample.completion)
    return (sample.text,) if isinstance(sample, TextSample) and not sample.is_stream else ()


def _encode_stream(text: str, tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = []
    first = 0
    while first < len(text):
        cut = text.rfind("\n", first, first + SEGMENT_CHARACTERS) + 1
        last = len(text) if first + SEGMENT_CHARACTERS >= len(text) else cut or first + SEGMENT_CHARACTERS
        ids += tokenizer.encode(text[first:last])
        first = last
    return ids
