"""Data sets of compared and of judged answers, read from files."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine.data.build import Paths, RecordReader, build_dataset
from engine.data.dataset import TokenDataset
from engine.data.tokenizer import Tokenizer
from engine.preferences.data.judged import JudgedReader
from engine.preferences.data.preference_pairs import PairReader


def build_records(
    kind: type[RecordReader[Any]], paths: Paths, *, tokenizer: Tokenizer, images: Any = None, **options: Any
) -> TokenDataset:
    """The rows of some records, read by `kind`."""
    return build_dataset(paths, kind(tokenizer, images=images), **options)


build_pairs = partial(build_records, PairReader)
build_judged = partial(build_records, JudgedReader)
