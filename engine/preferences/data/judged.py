"""Judged answers: records of single answers with a label, and data sets of such answers.

| fields of a record                                 | the question         | the answer                          |
|----------------------------------------------------|----------------------|-------------------------------------|
| prompt, completion, label: texts                   | prompt               | completion                          |
| instruction, (input,) output, label: texts         | the Alpaca template  | output                              |
| prompt, completion, label: lists of turns          | turns                | turns that follow                   |
| messages or conversations, label: turns            | the turns before     | the last turn, of the assistant     |

`label` is true where the answer was liked and false where it was not; `kto_tag` is read as the same. Turns may have
images, questions that are texts may not. Each answer comes with a mismatched one: its question with the answer of the
previous kept record (the first takes the last). Mismatched answers are in rows of their own, in the same order as the
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.config.data import Packing
from engine.data.chat import Message
from engine.data.columns import Columns
from engine.data.data_report import DatasetReport
from engine.data.dataset import TokenDataset
from engine.data.document import Document
from engine.data.extras import extra_of
from engine.data.formats import (
    LABELS,
    ChatSample,
    CompletionSample,
    conversation_sample,
    conversation_turns,
    parse_record,
    refuse_unusable,
)
from engine.data.overlong import Fate, RecordKind
from engine.data.record_files import Place, Record
from engine.preferences.data.answers import AnswerReader, AnswerSample, ends_with_answer, judged
from engine.sentences import listed
from engine.vision.data.columns import Extras
from engine.vision.data.records import ImageSample

MISMATCHED = "engine.preferences.batch_parts:Mismatched"
"""The part that holds mismatched answers: the companion of judged ones."""
_FORMATS = {"messages": "messages", "conversations": "sharegpt", "instruction": "alpaca", "prompt": "completion"}


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer to a question, and whether it was liked."""

    sample: AnswerSample
    liked: bool

    @property
    def samples(self) -> tuple[AnswerSample, ...]:
        return (self.sample,)


def parse_judged(place: Place, record: Record) -> Judged:
    """Parses one record of any form in the table above.

    Raises:
        UserError: a malformed record: names file, record and field.
    """
    found = listed(record) or "none"
    if "chosen" in record or "rejected" in record:
        raise place.error(
            f"the record has the fields {found}, a pair of answers, but objective.name kto learns from single answers "
            "with a label: set objective.name to dpo."
        )
    label = next((name for name in LABELS if name in record), None)
    if label is None:
        raise place.error(
            f"the record has the fields {found}, expected 'label' beside a question and its answer: add label, true or "
            "false, or set objective.name to language_modeling."
        )
    if not isinstance(record[label], bool):
        raise place.error(f"field '{label}' is {record[label]!r}, expected true or false; correct the record.")
    refuse_unusable(place, record)
    return Judged(_sample(place, record, found), record[label])


def _sample(place: Place, record: Record, found: str) -> AnswerSample:
    data_format = next((name for field, name in _FORMATS.items() if field in record), None)
    if data_format is None:
        raise place.error(
            f"the record has the fields {found}, expected a question and its answer: prompt and completion, "
            "instruction and output, messages, or conversations; rename them."
        )
    if data_format == "completion" and isinstance(record["prompt"], list):
        turns = conversation_turns(place, record, "prompt") + conversation_turns(place, record, "completion")
        ends_with_answer(place, turns, "completion")
        return conversation_sample(place, record, turns)
    sample = parse_record(place, record, data_format)
    assert isinstance(sample, AnswerSample), data_format
    if not isinstance(sample, CompletionSample):
        turns = sample.messages if isinstance(sample, ChatSample) else _roles(sample)
        ends_with_answer(place, turns, "messages" if data_format == "messages" else "conversations")
    return sample


def _roles(sample: ImageSample) -> tuple[Message, ...]:
    return tuple({"role": turn.role, "content": turn.text} for turn in sample.conversation.turns)


class JudgedReader(AnswerReader[Judged]):
    """Reads single answers with their labels; truncates them last, because mismatched answers are made of whole ones.

    At least two must be kept: with one there is none to mismatch.
    """

    kind = RecordKind(
        unit="answer",
        subject="the answer with its question has",
        fates=(Fate.OVERLONG, Fate.WITHOUT_TARGET, Fate.PROMPT_ONLY, Fate.IN_IMAGE),
        cuts_later=True,
    )
    expects = "{kept} to train on, and at least 2 are expected"
    least = 2

    def parse(self, place: Place, record: Record) -> Judged:
        return parse_judged(place, record)

    def judge(self, record: Judged, documents: tuple[Document, ...]) -> Sequence[Document]:
        (document,) = documents
        return (judged(document, 1 if record.liked else -1),)

    def gather(self, documents: list[Document]) -> list[Document]:
        return documents

    def arrange(
        self, gathered: Sequence[list[Document]], *, seq_length: int, packing: Packing, report: DatasetReport
    ) -> TokenDataset:
        assert packing != "concatenate", "which would tear answers apart"
        documents = [document for part in gathered for document in part]
        before = [documents[-1], *documents[:-1]]
        swapped = [_mismatched(own, other) for own, other in zip(documents, before, strict=True)]
        answers, mismatched = (Columns.of_documents(_truncated(side, seq_length)) for side in (documents, swapped))
        rows = answers.rows(seq_length, packing=packing, sizes=np.maximum(answers.lengths, mismatched.lengths))
        shape: dict[str, Any] = {"seq_length": seq_length, "packing": packing}
        others = TokenDataset(mismatched, rows, **shape)
        return TokenDataset(answers, rows, **shape, companions={MISMATCHED: others}, report=report)


def _truncated(documents: Sequence[Document], length: int) -> list[Document]:
    kept = [document.beginning(length) for document in documents]
    assert None not in kept, "images are in questions, which are never cut"
    return [document for document in kept if document is not None]


def _mismatched(own: Document, other: Document) -> Document:
    """Returns the question of one document, with all its images, as answers have none, and the answer of another."""
    question, answer = int(own.targets.argmax()), int(other.targets.argmax())
    mine, theirs = (extra_of(one.extras, Extras) or Extras() for one in (own, other))
    judgement = tuple(extra for extra in own.extras if not isinstance(extra, Extras))
    # the last position of a question predicts the answer's first token
    odd = {at: label for at, label in (mine.odd_labels or {}).items() if at < question - 1}
    odd |= {at + question - answer: label for at, label in (theirs.odd_labels or {}).items() if at >= answer - 1}
    return Document(
        own.place,
        np.concatenate((own.tokens[:question], other.tokens[answer:])),
        np.concatenate((np.zeros(question, dtype=bool), other.targets[answer:])),
        (*judgement, Extras(mine.images, odd)) if mine.images or odd else judgement,
    )
