"""The common part of data sets of compared and of judged answers: how their records are read and become documents.

A record is parsed into what has `samples`, as many as `AnswerCollector.width`, each a question with an answer. Only the
last answer of a sample is trained on. The collectors decide what to do with the documents, in
`engine.preferences.data.preference_pairs` and `engine.preferences.data.judged`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from engine.data.chat import Message
from engine.data.dataset import CHUNK, TokenDataset
from engine.data.document import Document
from engine.data.formats import ChatSample, CompletionSample
from engine.data.record_files import Place, Record, expand_paths, read_records
from engine.data.tokenize import tokenize_samples
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.sentences import listed
from engine.vision.data.reader import ImageReader
from engine.vision.data.records import ImageSample

AnswerSample = CompletionSample | ChatSample | ImageSample


class Parsed(Protocol):
    """A record that has been parsed."""

    @property
    def samples(self) -> tuple[AnswerSample, ...]: ...


ParsedRecord = TypeVar("ParsedRecord", bound=Parsed)


class AnswerCollector(ABC, Generic[ParsedRecord]):
    """Collects answers into a data set, and counts those that are truncated or dropped.

    Args:
        seq_length: maximum tokens of one answer with its question.
        overlong: what happens to a longer one, as in `TokenDataset.build`; there is no "cut".
        images: as for `engine.data.tokenize.tokenize_samples`.
    """

    width: ClassVar[int]
    """Samples, and so documents, per record."""

    def __init__(self, seq_length: int, overlong: str, images: ImageReader | None = None) -> None:
        self._seq_length, self._overlong, self._images = seq_length, overlong, images
        self._records = 0

    def collect(
        self,
        paths: str | Path | list[str] | tuple[str, ...],
        parse: Callable[[Place, Record], ParsedRecord],
        *,
        tokenizer: Tokenizer,
        packing: bool,
        progress: Callable[[int, int], None] | None,
    ) -> TokenDataset:
        """Reads, parses and tokenises all records of some files.

        Raises:
            UserError: a file or record that cannot be used, or nothing left to train on.
        """
        started = time.monotonic()
        files = _record_files(paths)
        sources = [read_records(path) for path in files]
        total = sum(count for count, _ in sources)
        for _, records in sources:
            parsed = (parse(place, record) for place, record in records)
            while chunk := list(islice(parsed, CHUNK // self.width)):
                self._add_all(chunk, tokenizer)
                if progress is not None:
                    progress(self._records, total)
        names = listed(files)
        if not self._records:
            raise UserError(f"{names} has no records; give a file that has some.")
        dataset = self._dataset(names, packing=packing)
        dataset.report = replace(dataset.report, seconds=time.monotonic() - started)
        dataset.read_with(None if self._images is None else self._images.family)
        return dataset

    def _add_all(self, chunk: Sequence[ParsedRecord], tokenizer: Tokenizer) -> None:
        samples = [sample for record in chunk for sample in record.samples]
        documents = tokenize_samples(
            samples, tokenizer, mask_prompt=True, stream_length=2, last_answer=True, images=self._images
        )
        of_records = zip(*[iter(documents)] * self.width, strict=True)
        for record, own in zip(chunk, of_records, strict=True):
            self._records += 1
            self._add(record, own)

    @abstractmethod
    def _add(self, record: ParsedRecord, documents: tuple[Document, ...]) -> None:
        """Adds the documents of the record's samples, or counts why they are dropped."""

    @abstractmethod
    def _dataset(self, names: str, *, packing: bool) -> TokenDataset:
        """Returns the data set of all added documents; `names` are the files, for the error where there are too
        few.
        """


def ends_with_answer(place: Place, turns: Sequence[Message], field: str) -> None:
    """Refuses a conversation whose last turn is not the assistant's.

    Raises:
        UserError: it does; names file, record and field.
    """
    if turns[-1]["role"] != "assistant":
        raise place.error(
            f"field '{field}' ends with a turn of {turns[-1]['role']}, but an answer of the assistant is compared; "
            "correct the record."
        )


def _record_files(paths: str | Path | list[str] | tuple[str, ...]) -> list[Path]:
    """Returns the files that the paths or patterns name."""
    files = expand_paths(paths)
    for path in files:
        if path.suffix.lower() == ".txt":
            raise UserError(f"{path} is a text file, but answers to compare are records; give a JSON or JSONL file.")
    return files
