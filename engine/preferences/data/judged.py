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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.data.chat import Message
from engine.data.data_report import DatasetReport, DroppedPlaces
from engine.data.dataset import TokenDataset
from engine.data.document import Document
from engine.data.formats import (
    ChatSample,
    CompletionSample,
    conversation_sample,
    conversation_turns,
    parse_record,
    refuse_unusable,
)
from engine.data.record_files import Place, Record
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.preferences.data.answers import AnswerCollector, AnswerSample, ends_with_answer
from engine.sentences import listed
from engine.telemetry.format import counted
from engine.vision.data.columns import Extras, VisionColumns, vision_columns
from engine.vision.data.reader import ImageReader
from engine.vision.data.records import ImageSample

LABELS = ("label", "kto_tag")
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


def build_judged(
    paths: str | Path | list[str] | tuple[str, ...],
    *,
    tokenizer: Tokenizer,
    seq_length: int,
    packing: bool = False,
    overlong: str = "truncate",
    progress: Callable[[int, int], None] | None = None,
    images: ImageReader | None = None,
) -> TokenDataset:
    """Reads and tokenises files of judged answers; arguments as for
    `engine.preferences.data.preference_pairs.build_pairs`, but a row has room for `seq_length` tokens.

    Raises:
        UserError: a file or record that cannot be used, or fewer than two answers, which leaves none to mismatch.
    """
    collector = _Answers(seq_length, overlong, images)
    return collector.collect(paths, parse_judged, tokenizer=tokenizer, packing=packing, progress=progress)


class _Answers(AnswerCollector[Judged]):
    """Collects answers with their labels; truncates them last, because mismatched answers are made of whole ones."""

    width = 1

    def __init__(self, seq_length: int, overlong: str, images: ImageReader | None) -> None:
        super().__init__(seq_length, overlong, images)
        self._whole: list[Document] = []
        self._in_image = DroppedPlaces()
        self._liked: list[bool] = []
        self._longest = self._truncated = self._lost = self._too_long = self._prompt_only = self._without_target = 0

    def _add(self, record: Judged, documents: tuple[Document, ...]) -> None:
        (document,) = documents
        limit, length = self._seq_length, len(document.tokens)
        self._longest = max(self._longest, length)
        if length > limit and self._overlong == "error":
            raise document.place.error(
                f"the answer with its question has {length} tokens, more than data.seq_length {limit}; raise it, or "
                "set data.overlong to truncate or drop."
            )
        if length > limit and self._overlong == "drop":
            self._too_long += 1
        elif not document.targets.any():
            self._without_target += 1
        elif not document.targets[:limit].any():
            self._prompt_only += 1
        elif document.beginning(limit) is None:
            self._in_image.add(document.place)
        else:
            self._truncated += length > limit
            self._lost += max(0, length - limit)
            self._whole.append(document)
            self._liked.append(record.liked)

    def _dataset(self, names: str, *, packing: bool) -> TokenDataset:
        report = DatasetReport(
            unit="answer",
            limit=self._seq_length,
            records=self._records,
            documents=len(self._whole),
            longest=self._longest,
            truncated=self._truncated,
            lost_tokens=self._lost,
            dropped_overlong=self._too_long,
            dropped_prompt_only=self._prompt_only,
            dropped_without_target=self._without_target,
        )
        report = self._in_image.told(report)
        if len(self._whole) < 2:
            kept = counted(len(self._whole), "answer")
            raise UserError(report.nothing_left(names, f"{kept} to train on, and at least 2 are expected"))
        before = [self._whole[-1], *self._whole[:-1]]
        answers = [self._cut(document) for document in self._whole]
        mismatched = [self._cut(_mismatched(own, other)) for own, other in zip(self._whole, before, strict=True)]
        sizes = np.array(
            [max(len(own.tokens), len(other.tokens)) for own, other in zip(answers, mismatched, strict=True)]
        )
        signs = np.where(self._liked, 1.0, -1.0).astype(np.float32)
        common = {"seq_length": self._seq_length, "packing": packing, "signs": signs, "sizes": sizes.astype(np.int64)}
        beside = TokenDataset(*_arrays(mismatched), **common, vision=_columns(mismatched))
        return TokenDataset(*_arrays(answers), **common, mismatched=beside, vision=_columns(answers), report=report)

    def _cut(self, document: Document) -> Document:
        kept = document.beginning(self._seq_length)
        assert kept is not None, "images are in questions, which are never cut"
        return kept


def _mismatched(own: Document, other: Document) -> Document:
    """Returns the question of one document, with all its images, as answers have none, and the answer of another."""
    question, answer = int(own.targets.argmax()), int(other.targets.argmax())
    mine, theirs = own.extras or Extras(), other.extras or Extras()
    # the last position of a question predicts the answer's first token
    odd = {at: label for at, label in (mine.odd_labels or {}).items() if at < question - 1}
    odd |= {at + question - answer: label for at, label in (theirs.odd_labels or {}).items() if at >= answer - 1}
    return Document(
        own.place,
        np.concatenate((own.tokens[:question], other.tokens[answer:])),
        np.concatenate((np.zeros(question, dtype=bool), other.targets[answer:])),
        Extras(mine.images, odd) if mine.images or odd else None,
    )


def _columns(documents: Sequence[Document]) -> VisionColumns | None:
    return vision_columns([document.extras for document in documents])


def _arrays(documents: Sequence[Document]) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
    tokens, targets = ([getattr(one, name) for one in documents] for name in ("tokens", "targets"))
    ends = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
    return np.concatenate(tokens), np.concatenate(targets), ends
