"""Preference pairs: records of a preferred and a rejected answer, and data sets of such pairs.

| fields of a record                              | the question                | an answer                          |
|-------------------------------------------------|-----------------------------|------------------------------------|
| prompt, chosen, rejected: texts                 | prompt                      | text                               |
| instruction, (input,) chosen, rejected: texts   | the Alpaca template         | text                               |
| chosen, rejected: texts                         | the common beginning        | the rest                           |
| prompt, chosen, rejected: lists of turns        | turns                       | turns that follow                  |
| chosen, rejected: lists of turns                | their common beginning      | the whole conversation             |
| conversations or messages, chosen, rejected     | turns                       | one turn                           |

The assistant's last turn of a conversation is compared; both sides share the turns before it. A pair
is two documents side by side in one row, the preferred one first, so that attention, packing and every layout treat
pairs as they treat any other documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from engine.data.chat import Message
from engine.data.document import Document
from engine.data.formats import (
    LABELLED,
    LABELS,
    CompletionSample,
    alpaca_prompt,
    conversation_sample,
    conversation_turns,
    refuse_images,
    refuse_unusable,
    string_field,
)
from engine.data.overlong import Fate, RecordKind
from engine.data.record_files import Place, Record
from engine.preferences.data.answers import AnswerReader, AnswerSample, ends_with_answer, judged
from engine.sentences import listed

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
            other = LABELLED if any(label in record for label in LABELS) else "language_modeling"
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
        return alpaca_prompt(instruction, given), answers
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


class PairReader(AnswerReader[Pair]):
    """Reads pairs: the preferred answer and then the rejected one, in one row."""

    kind = RecordKind(
        unit="pair",
        subject="an answer with its question has",
        width=2,
        fates=(Fate.OVERLONG, Fate.IN_IMAGE, Fate.WITHOUT_TARGET, Fate.PROMPT_ONLY, Fate.ALIKE),
    )
    expects = "nothing to compare"

    def parse(self, place: Place, record: Record) -> Pair:
        return parse_pair(place, record)

    def judge(self, record: Pair, documents: tuple[Document, ...]) -> Sequence[Document]:
        chosen, rejected = _with_same_question(documents)
        return judged(chosen, 1), judged(rejected, -1)


def _with_same_question(sides: tuple[Document, ...]) -> tuple[Document, ...]:
    """Gives both sides the same question: the shorter one, where a token joins its end to an answer's beginning."""
    starts = [int(side.targets.argmax()) for side in sides if side.targets.any()]
    if len(starts) < len(sides) or min(starts) == max(starts):
        return sides
    return tuple(replace(side, targets=np.arange(len(side.targets)) >= min(starts)) for side in sides)
