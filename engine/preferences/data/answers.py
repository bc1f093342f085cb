"""The common part of data sets of compared and of judged answers: how their records are read and become documents.

A record is parsed into an object with `samples`, as many as a record of its kind has documents, each a question with an
answer. Only the last answer of a sample is trained on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from engine.data.build import RecordReader
from engine.data.chat import Message
from engine.data.document import Document
from engine.data.formats import ChatSample, CompletionSample
from engine.data.record_files import Place, Record
from engine.data.sources import Given, open_records
from engine.data.tokenize import ConversationReader
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.preferences.data.answer_columns import Judgement
from engine.vision.data.records import ImageSample

AnswerSample = CompletionSample | ChatSample | ImageSample


class Parsed(Protocol):
    """A record that has been parsed."""

    @property
    def samples(self) -> tuple[AnswerSample, ...]: ...


ParsedRecord = TypeVar("ParsedRecord", bound=Parsed)


class AnswerReader(RecordReader[ParsedRecord]):
    """Reads records of answers; arguments as for `RecordReader`."""

    def __init__(self, tokenizer: Tokenizer, *, images: ConversationReader | None = None) -> None:
        super().__init__(tokenizer, images=images, mask_prompt=True, stream_length=2, last_answer=True)

    def open(self, given: Given) -> Iterator[ParsedRecord]:
        if isinstance(given, Path) and given.suffix.lower() == ".txt":
            raise UserError(f"{given} is a text file, but answers to compare are records; give a JSON or JSONL file.")
        records = open_records(given)
        return (self.parse(place, record) for place, record in records)

    def documents(self, records: Sequence[ParsedRecord]) -> Iterator[Document]:
        found = super().documents([sample for record in records for sample in record.samples])
        of_records = zip(*[iter(found)] * self.kind.width, strict=True)
        for record, own in zip(records, of_records, strict=True):
            yield from self.judge(record, own)

    @abstractmethod
    def parse(self, place: Place, record: Record) -> ParsedRecord:
        """Returns a record as samples.

        Raises:
            UserError: a malformed record: names file, record and field.
        """

    @abstractmethod
    def judge(self, record: ParsedRecord, documents: tuple[Document, ...]) -> Sequence[Document]:
        """Returns the documents of a record, each with its judgement."""


def ends_with_answer(place: Place, turns: Sequence[Message], field: str) -> None:
    """Refuses a conversation whose last turn is not the assistant's.

    Raises:
        UserError: the last turn is another's; names file, record and field.
    """
    if turns[-1]["role"] != "assistant":
        raise place.error(
            f"field '{field}' ends with a turn of {turns[-1]['role']}, but an answer of the assistant is compared; "
            "correct the record."
        )


def judged(document: Document, sign: int) -> Document:
    """Returns a document with its judgement; see `Judgement`."""
    return replace(document, extras=(Judgement(sign), *document.extras))
