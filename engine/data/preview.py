"""Shows samples as they will be trained on, to be looked at before a long run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path

import numpy as np

from engine.data.document import Document
from engine.data.extras import Span
from engine.data.formats import Sample, parse_records
from engine.data.sources import RecordSource
from engine.data.tokenize import ConversationReader, tokenize_samples
from engine.data.tokenizer import Tokenizer
from engine.data.work_units import plan_units, unit_samples
from engine.errors import UserError

MOST_TOKENS = 2000
"""Maximum tokens of one sample that are shown."""

_TARGET, _GIVEN, _PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


def first_documents(
    files: Sequence[Path | RecordSource],
    count: int,
    tokenizer: Tokenizer,
    *,
    data_format: str,
    mask_prompt: bool,
    images: ConversationReader | None = None,
) -> Iterator[Document]:
    """Yields the first documents of some files or other sources, reading no more of these than necessary.

    Raises:
        UserError: a file or record that cannot be used.
    """
    samples = islice(_samples(files, data_format), count)
    documents = (
        document
        for sample in samples
        for document in tokenize_samples(
            [sample], tokenizer, mask_prompt=mask_prompt, stream_length=MOST_TOKENS, images=images
        )
    )
    yield from islice(documents, count)


def _samples(files: Sequence[Path | RecordSource], data_format: str) -> Iterator[Sample]:
    for file in files:
        if isinstance(file, RecordSource):
            yield from parse_records(file.records(), data_format)
            continue
        for unit in plan_units([file]):
            for item in unit_samples(unit, data_format):
                if isinstance(item, UserError):
                    raise item
                yield item


def preview(
    tokens: Sequence[int] | np.ndarray,
    targets: Sequence[bool] | np.ndarray,
    tokenizer: Tokenizer,
    *,
    colour: bool,
    images: Sequence[Span] = (),
) -> str:
    """Returns a document's text, with target tokens in colour or in ⟦brackets⟧; line breaks show as ↵ too.

    Args:
        tokens: of the document.
        targets: whether each is a target.
        tokenizer: decodes them, control tokens too.
        colour: for a terminal.
        images: the tokens that features of images replace, which are counted instead of shown.
    """
    mark, given, plain = (_TARGET, _GIVEN, _PLAIN) if colour else ("⟦", "", "")
    text, ids, before = "", list[int](), ""
    kinds = np.asarray(targets[:MOST_TOKENS]).astype(np.int64)
    for number, (start, end) in enumerate(images):
        kinds[start:end] = -1 - number  # tiles side by side are shown apart
    for kind, run in groupby(
        zip(np.asarray(tokens[:MOST_TOKENS]).tolist(), kinds.tolist(), strict=True), itemgetter(1)
    ):
        part = [token for token, _ in run]
        if kind < 0:
            text += f"{given}⟨{len(part)} features⟩{plain}"
            ids, before = [], ""
            continue
        ids += part
        whole = tokenizer.show(ids)  # a space may begin a run, but no text
        piece = _printable(whole[len(before) :] if whole.startswith(before) else tokenizer.show(part))
        before = whole
        text += f"{mark}{piece}{plain or '⟧'}" if kind else f"{given}{piece}{plain}"
    left = len(tokens) - MOST_TOKENS
    return text + (f" ... {left:,} more tokens" if left > 0 else "")


def _printable(text: str) -> str:
    shown = (
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1] for character in text
    )
    return "".join(shown).replace("\n", "↵\n")
