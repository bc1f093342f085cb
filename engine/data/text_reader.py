"""Reads records of text, conversations and tokens for language modeling."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.config.data import FORMATS, Packing
from engine.data.build import Advance, Paths, RecordReader, build_dataset
from engine.data.dataset import TokenDataset
from engine.data.document import Document
from engine.data.formats import Sample, read_samples
from engine.data.overlong import Fate, RecordKind
from engine.data.tokenize import ConversationReader, tokenize_samples
from engine.data.tokenizer import Tokenizer

TEXT = RecordKind(
    unit="document",
    subject="the record has",
    ways=("truncate", "cut", "drop"),
    fates=(Fate.WITHOUT_TARGET, Fate.UNCUTTABLE, Fate.OVERLONG, Fate.IN_IMAGE, Fate.PROMPT_ONLY),
)


class TextReader(RecordReader[Sample]):
    """Reads records of the formats in `engine.data.formats`; one is one document, but a .txt file is several.

    Args:
        tokenizer: encodes the text.
        data_format: one of `engine.config.data.FORMATS`.
        stream_length: tokens of a document of a .txt stream.
        mask_prompt: train only on completions and assistant turns.
        images: as for `engine.data.tokenize.tokenize_samples`.
    """

    kind = TEXT

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        data_format: str = "auto",
        stream_length: int,
        mask_prompt: bool = True,
        images: ConversationReader | None = None,
    ) -> None:
        assert data_format in FORMATS, data_format
        self._tokenizer, self._format, self._images = tokenizer, data_format, images
        self._stream_length, self._mask_prompt = stream_length, mask_prompt
        self.family = None if images is None else images.family

    def open(self, path: Path) -> tuple[int, Iterator[Sample]]:
        return read_samples(path, self._format)

    def documents(self, records: Sequence[Sample]) -> Iterator[Document]:
        return tokenize_samples(
            records,
            self._tokenizer,
            mask_prompt=self._mask_prompt,
            stream_length=self._stream_length,
            images=self._images,
        )


def build_texts(
    paths: Paths,
    *,
    tokenizer: Tokenizer,
    data_format: str = "auto",
    seq_length: int,
    packing: Packing = False,
    overlong: str = "truncate",
    mask_prompt: bool = True,
    progress: Advance | None = None,
    images: ConversationReader | None = None,
) -> TokenDataset:
    """Reads and tokenises files of text, conversations or tokens; arguments as for `TextReader` and `build_dataset`.

    Raises:
        UserError: a file or record that cannot be used, or nothing left to train on.
    """
    reader = TextReader(
        tokenizer,
        data_format=data_format,
        # concatenated in one piece: cuts would share a token with the next
        stream_length=sys.maxsize if packing == "concatenate" else seq_length,
        mask_prompt=mask_prompt,
        images=images,
    )
    return build_dataset(paths, reader, seq_length=seq_length, packing=packing, overlong=overlong, progress=progress)
