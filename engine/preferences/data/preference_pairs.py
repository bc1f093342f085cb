"""Preference pairs: records of a preferred and a rejected answer, and data sets of such pairs.

| fields of a record                              | the question                | an answer                          |
|-------------------------------------------------|-----------------------------|------------------------------------|
| prompt, chosen, rejected: texts                 | prompt                      | text                               |
| instruction, (input,) chosen, rejected: texts   | the Alpaca template         | text                               |
| chosen, rejected: texts                         | what both begin with        | the rest                           |
| prompt, chosen, rejected: lists of turns        | turns                       | turns that follow                  |
| chosen, rejected: lists of turns                | their common beginning      | the whole conversation             |
| conversations or messages, chosen, rejected     | turns                       | one turn                           |

The assistant's last turn of a conversation is compared; both sides share the turns before it. A pair
is two documents side by side in one row, the preferred one first, so that attention, packing and every layout treat
pairs as they treat any other documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from engine.data.chat import Message
from engine.data.data_report import DatasetReport, DroppedPlaces
from engine.data.dataset import TokenDataset
from engine.data.document import Document
from engine.data.formats import (
    ALPACA_PROMPT,
    ALPACA_PROMPT_WITH_INPUT,
    ALPACA_RESPONSE,
    CompletionSample,
    conversation_sample,
    conversation_turns,
    refuse_images,
    refuse_unusable,
    string_field,
)
from engine.data.record_files import Place, Record
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.preferences.data.answers import AnswerCollector, AnswerSample, ends_with_answer
from engine.sentences import listed
from engine.vision.data.columns import vision_columns
from engine.vision.data.reader import ImageReader

ANSWERS = ("chosen", "rejected")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one question."""

    place: Place
    chosen: AnswerSample
    rejected: AnswerSample

    @property
    def samples(self) -> tuple[AnswerSample, ...]:
        return (self.chosen, self.rejected)


def parse_pair(place: Place, record: Record) -> Pair:
    """Parses one record of any form in the table above.

    Raises:
        UserError: a malformed record: names file, record and field.
    """
    for answer in ANSWERS:
        if answer not in record:
            found = listed(record) or "none"
            other = "kto" if "label" in record or "kto_tag" in record else "language_modeling"
            raise place.error(
                f"the record has the fields {found}, expected chosen and rejected, two answers to one question: add "
                f"'{answer}', or set objective.name to {other}."
            )
    refuse_unusable(place, record)
    sides: list[AnswerSample]
    if isinstance(record["chosen"], str):
        refuse_images(place, record, "answers that are texts")
        prompt, answers = _texts(place, record)
        sides = [CompletionSample(place, prompt, answer) for answer in answers]
    else:
        sides = [conversation_sample(place, record, turns) for turns in _conversations(place, record)]
    return Pair(place, *sides)


def _texts(place: Place, record: Record) -> tuple[str, list[str]]:
    """Returns the question, and the answer of each side."""
    answers = [string_field(place, record, name, "preference") for name in ANSWERS]
    if record.get("system"):
        raise place.error(
            "field 'system' does not go with answers that are texts; give lists of turns, or put it into the prompt."
        )
    if "instruction" in record:
        instruction = string_field(place, record, "instruction", "preference")
        given = string_field(place, record, "input", "preference") if record.get("input") else ""
        prompt = ALPACA_PROMPT_WITH_INPUT if given else ALPACA_PROMPT
        return prompt.format(instruction=instruction, input=given) + ALPACA_RESPONSE, answers
    if "prompt" in record:
        return string_field(place, record, "prompt", "preference"), answers
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False))
    # the space before the first word that differs is part of the answers' first token
    common = "".join(character for character, _ in same).removesuffix(" ")
    return common, [answer[len(common) :] for answer in answers]


def _conversations(place: Place, record: Record) -> list[tuple[Message, ...]]:
    """Returns the whole conversation of each side."""
    before: tuple[Message, ...] = ()
    if record.get("system"):
        before = ({"role": "system", "content": string_field(place, record, "system", "preference")},)
    for field in ("prompt", "conversations", "messages"):
        if field in record:
            before += conversation_turns(place, record, field)
            break
    sides = []
    for name in ANSWERS:
        answer: Any = record[name]
        if isinstance(answer, dict):
            record = {**record, name: [answer]}
        turns = before + conversation_turns(place, record, name)
        ends_with_answer(place, turns, name)
        sides.append(turns)
    if sides[0][:-1] != sides[1][:-1]:
        raise place.error(
            "fields 'chosen' and 'rejected' differ before their last turn, so that they answer different questions; "
            "correct the record."
        )
    return sides


def build_pairs(
    paths: str | Path | list[str] | tuple[str, ...],
    *,
    tokenizer: Tokenizer,
    seq_length: int,
    packing: bool = False,
    overlong: str = "truncate",
    progress: Callable[[int, int], None] | None = None,
    images: ImageReader | None = None,
) -> TokenDataset:
    """Reads and tokenises files of pairs.

    Args:
        paths: one file, several, or patterns with *; JSON or JSON lines.
        tokenizer: encodes the text.
        seq_length: maximum tokens of one answer with its question; a row has room for twice that.
        packing: put several pairs into a row.
        overlong: as in `TokenDataset.build`, for each side; a pair is dropped when one of its sides is.
        progress: called with (records done, records in all) now and then.
        images: as for `engine.data.tokenize.tokenize_samples`.

    Raises:
        UserError: a file or record that cannot be used, or nothing left to compare.
    """
    collector = _Pairs(seq_length, overlong, images)
    return collector.collect(paths, parse_pair, tokenizer=tokenizer, packing=packing, progress=progress)


class _Pairs(AnswerCollector[Pair]):
    """Collects pairs: the preferred answer and then the rejected one, in one row."""

    width = 2

    def __init__(self, seq_length: int, overlong: str, images: ImageReader | None) -> None:
        super().__init__(seq_length, overlong, images)
        self._kept: list[Document] = []
        self._longest = self._truncated = self._lost = 0
        self._in_image = DroppedPlaces()
        self._overlong_pairs = self._prompt_only = self._without_target = self._alike = 0

    def _add(self, record: Pair, documents: tuple[Document, ...]) -> None:
        limit = self._seq_length
        documents = _with_same_question(documents)
        longest = max(len(side.tokens) for side in documents)
        self._longest = max(self._longest, longest)
        if longest > limit and self._overlong == "error":
            raise record.place.error(
                f"an answer with its question has {longest} tokens, more than data.seq_length {limit}; raise it, or "
                "set data.overlong to truncate or drop."
            )
        if longest > limit and self._overlong == "drop":
            self._overlong_pairs += 1
            return
        sides = [side for document in documents if (side := document.beginning(limit)) is not None]
        if len(sides) < self.width:
            self._in_image.add(record.place)
            return
        if not all(side.targets.any() for side in documents):
            self._without_target += 1
        elif not all(side.targets.any() for side in sides):
            self._prompt_only += 1
        elif np.array_equal(sides[0].tokens, sides[1].tokens):
            self._alike += 1
        else:
            self._truncated += longest > limit
            self._lost += sum(max(0, len(side.tokens) - limit) for side in documents)
            self._kept += sides

    def _dataset(self, names: str, *, packing: bool) -> TokenDataset:
        report = DatasetReport(
            unit="pair",
            limit=self._seq_length,
            records=self._records,
            documents=len(self._kept) // 2,
            longest=self._longest,
            truncated=self._truncated,
            lost_tokens=self._lost,
            dropped_overlong=self._overlong_pairs,
            dropped_prompt_only=self._prompt_only,
            dropped_without_target=self._without_target,
            dropped_alike=self._alike,
        )
        report = self._in_image.told(report)
        if not self._kept:
            raise UserError(report.nothing_left(names, "nothing to compare"))
        lengths = [len(document.tokens) for document in self._kept]
        return TokenDataset(
            np.concatenate([document.tokens for document in self._kept]),
            np.concatenate([document.targets for document in self._kept]),
            np.cumsum([0, *lengths], dtype=np.int64),
            seq_length=2 * self._seq_length,
            packing=packing,
            group=2,
            signs=np.tile(np.array([1.0, -1.0], dtype=np.float32), len(self._kept) // 2),
            vision=vision_columns([document.extras for document in self._kept]),
            report=report,
        )


def _with_same_question(sides: tuple[Document, ...]) -> tuple[Document, ...]:
    """Gives both sides the same question: the shorter one, where a token joins its end to an answer's beginning."""
    starts = [int(side.targets.argmax()) for side in sides if side.targets.any()]
    if len(starts) < len(sides) or min(starts) == max(starts):
        return sides
    return tuple(replace(side, targets=np.arange(len(side.targets)) >= min(starts)) for side in sides)
