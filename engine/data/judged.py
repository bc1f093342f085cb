"""Judged answers: records of single answers with a label, and data sets of such answers.

| fields of a record                                 | the question         | the answer                          |
|----------------------------------------------------|----------------------|-------------------------------------|
| prompt, completion, label: texts                   | prompt               | completion                          |
| instruction, (input,) output, label: texts         | the Alpaca template  | output                              |
| prompt, completion, label: lists of turns          | turns                | turns that follow                   |
| messages or conversations, label: turns            | the turns before     | the last turn, of the assistant     |

`label` is true where the answer was liked and false where it was not; `kto_tag` is read as the same. Each answer comes
with a mismatched one: its question with the answer of the previous kept record (the first takes the last).
Mismatched answers are in rows of their own, in the same order as the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.data.answers import AnswerCollector, AnswerSample, ends_with_answer
from engine.data.data_report import DatasetReport
from engine.data.dataset import TokenDataset
from engine.data.document import Document
from engine.data.formats import (
    ChatSample,
    CompletionSample,
    conversation_turns,
    parse_record,
    refuse_pictures,
    refuse_unusable,
)
from engine.data.record_files import Place, Record
from engine.data.tokenizer import Tokenizer
from engine.data.vision.reader import PictureReader
from engine.data.vision.records import PictureSample, has_pictures
from engine.errors import UserError
from engine.telemetry.format import counted

LABELS = ("label", "kto_tag")
_FORMATS = {"messages": "messages", "conversations": "sharegpt", "instruction": "alpaca", "prompt": "completion"}


_PARTS = "a turn is a list of parts, but objective.name kto takes text; give one string for each turn."


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
    found = ", ".join(record) or "none"
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
    refuse_pictures(place, record, "objective.name kto")
    sample = _sample(place, record, found)
    if isinstance(sample, ChatSample) and has_pictures(record, sample.messages):
        raise place.error(_PARTS)
    return Judged(sample, record[label])


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
        return ChatSample(place, turns)
    sample = parse_record(place, record, data_format)
    if isinstance(sample, PictureSample):
        raise place.error(_PARTS)
    assert isinstance(sample, CompletionSample | ChatSample), data_format
    if isinstance(sample, ChatSample):
        ends_with_answer(place, sample.messages, "messages" if data_format == "messages" else "conversations")
    return sample


def build_judged(
    paths: str | Path | list[str] | tuple[str, ...],
    *,
    tokenizer: Tokenizer,
    seq_length: int,
    packing: bool = False,
    overlong: str = "truncate",
    progress: Callable[[int, int], None] | None = None,
    pictures: PictureReader | None = None,
) -> TokenDataset:
    """Reads and tokenises files of judged answers; arguments as for `engine.data.preference_pairs.build_pairs`, but a
    row has room for `seq_length` tokens.

    Raises:
        UserError: a file or record that cannot be used, or fewer than two answers, which leaves none to mismatch.
    """
    collector = _Answers(seq_length, overlong, pictures)
    return collector.collect(paths, parse_judged, tokenizer=tokenizer, packing=packing, progress=progress)


class _Answers(AnswerCollector[Judged]):
    """Collects answers with their labels; truncates them last, because mismatched answers are made of whole ones."""

    width = 1

    def __init__(self, seq_length: int, overlong: str, pictures: PictureReader | None) -> None:
        super().__init__(seq_length, overlong, pictures)
        self._whole: list[Document] = []
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
        if len(self._whole) < 2:
            kept = counted(len(self._whole), "answer")
            raise UserError(report.nothing_left(names, f"{kept} to train on, and at least 2 are expected"))
        answers = [self._cut(document.tokens, document.targets) for document in self._whole]
        before = [self._whole[-1], *self._whole[:-1]]
        mismatched = [self._mismatched(own, other) for own, other in zip(self._whole, before, strict=True)]
        sizes = np.array([max(len(own[0]), len(other[0])) for own, other in zip(answers, mismatched, strict=True)])
        signs = np.where(self._liked, 1.0, -1.0).astype(np.float32)
        common = {"seq_length": self._seq_length, "packing": packing, "signs": signs, "sizes": sizes.astype(np.int64)}
        return TokenDataset(
            *_arrays(answers), **common, mismatched=TokenDataset(*_arrays(mismatched), **common), report=report
        )

    def _cut(self, tokens: NDArray[np.int32], targets: NDArray[np.bool_]) -> _Cut:
        return tokens[: self._seq_length], targets[: self._seq_length]

    def _mismatched(self, own: Document, other: Document) -> _Cut:
        """Returns the question of one document with the answer of another."""
        question, answer = int(own.targets.argmax()), int(other.targets.argmax())
        targets = np.concatenate((np.zeros(question, dtype=bool), other.targets[answer:]))
        return self._cut(np.concatenate((own.tokens[:question], other.tokens[answer:])), targets)


_Cut = tuple[NDArray[np.int32], NDArray[np.bool_]]


def _arrays(documents: Sequence[_Cut]) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
    lengths = [len(tokens) for tokens, _ in documents]
    tokens, targets = zip(*documents, strict=True)
    return np.concatenate(tokens), np.concatenate(targets), np.cumsum([0, *lengths], dtype=np.int64)
