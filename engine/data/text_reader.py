"""Reads records of text, conversations and tokens for language modeling."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.config.data import FORMATS, Packing
from engine.data.build import Paths, RecordReader, build_dataset
from engine.data.dataset import TokenDataset
from engine.data.formats import Sample, parse_records, read_samples
from engine.data.overlong import Fate, RecordKind
from engine.data.sources import Given, RecordSource
from engine.data.tokenize import ConversationReader
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
        tokenizer, images, encoding: as for `RecordReader`.
        data_format: one of `engine.config.data.FORMATS`.
    """

    kind = TEXT

    def __init__(self, tokenizer: Tokenizer, *, data_format: str, **encoding: Any) -> None:
        assert data_format in FORMATS, data_format
        super().__init__(tokenizer, **encoding)
        self._format = data_format

    def open(self, given: Given) -> Iterator[Sample]:
        if isinstance(given, Path):
            return read_samples(given, self._format)[1]
        return parse_records(given.records(), self._format)


def build_texts(
    paths: Paths | RecordSource,
    *,
    tokenizer: Tokenizer,
    data_format: str = "auto",
    seq_length: int,
    packing: Packing = False,
    mask_prompt: bool = True,
    images: ConversationReader | None = None,
    **options: Any,
) -> TokenDataset:
    """Reads and tokenises text, conversations or tokens.

    Args:
        tokenizer, data_format, images: as for `TextReader`.
        mask_prompt: train only on completions and assistant turns.
        paths, seq_length, packing, options: as for `engine.data.build.build_dataset`.

    Raises:
        UserError: a file or record that cannot be used, or nothing left to train on.
    """
    # concatenated in one piece: cuts would share a token with the next
    stream_length = sys.maxsize if packing == "concatenate" else seq_length
    encoding: dict[str, Any] = {"mask_prompt": mask_prompt, "stream_length": stream_length, "images": images}
    reader = TextReader(tokenizer, data_format=data_format, **encoding)
    return build_dataset(paths, reader, seq_length=seq_length, packing=packing, **options)
