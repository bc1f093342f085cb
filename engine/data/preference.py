"""Answers that were compared: records of a preferred and a rejected one, and data sets of such pairs.

| fields of a record                              | the question                | an answer                          |
|-------------------------------------------------|-----------------------------|------------------------------------|
| prompt, chosen, rejected: texts                 | prompt                      | text                               |
| instruction, (input,) chosen, rejected: texts   | the Alpaca template         | text                               |
| chosen, rejected: texts                         | what both begin with        | the rest                           |
| prompt, chosen, rejected: lists of turns        | turns                       | turns that follow                  |
| chosen, rejected: lists of turns                | their common beginning      | the whole conversation             |
| conversations or messages, chosen, rejected     | turns                       | one turn                           |

Of a conversation the last turn of the assistant is compared; both sides have what stands before it in common. A pair
is two documents side by side in one row, the preferred one first, so that attention, packing and every layout treat
pairs as they treat any other documents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from engine.data.chat import Message
from engine.data.dataset import CHUNK, DatasetReport, TokenDataset
from engine.data.files import Place, Record, expand_paths, read_records
from engine.data.formats import (
    ALPACA_PROMPT,
    ALPACA_PROMPT_WITH_INPUT,
    ALPACA_RESPONSE,
    ChatSample,
    CompletionSample,
    conversation_turns,
    refuse_unusable,
    string_field,
)
from engine.data.tokenize import Document, tokenize_samples
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError

ANSWERS = ("chosen", "rejected")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one question."""

    place: Place
    chosen: CompletionSample | ChatSample
    rejected: CompletionSample | ChatSample


def parse_pair(place: Place, record: Record) -> Pair:
    """One record of any form in the table above.

    Raises:
        UserError: a malformed record: names file, record and field.
    """
    for answer in ANSWERS:
        if answer not in record:
            found = ", ".join(record) or "none"
            other = "kto" if "label" in record or "kto_tag" in record else "language_modeling"
            raise place.error(
                f"the record has the fields {found}, expected chosen and rejected, two answers to one question: add "
                f"'{answer}', or set objective.name to {other}."
            )
    refuse_unusable(place, record)
    if isinstance(record["chosen"], str):
        prompt, answers = _texts(place, record)
        sides = [CompletionSample(place, prompt, answer) for answer in answers]
    else:
        sides = [ChatSample(place, turns) for turns in _conversations(place, record)]
    return Pair(place, *sides)


def _texts(place: Place, record: Record) -> tuple[str, list[str]]:
    """The question, and what follows it on each side."""
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
    """The whole conversation of each side."""
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


def ends_with_answer(place: Place, turns: Sequence[Message], field: str) -> None:
    """Refuses a conversation that ends with somebody else than the assistant.

    Raises:
        UserError: it does; names file, record and field.
    """
    if turns[-1]["role"] != "assistant":
        raise place.error(
            f"field '{field}' ends with a turn of {turns[-1]['role']}, but an answer of the assistant is compared; "
            "correct the record."
        )


def answer_files(paths: str | Path | list[str] | tuple[str, ...]) -> list[Path]:
    """The files of records that the paths or patterns name.

    Raises:
        UserError: there is none, or one is plain text.
    """
    files = expand_paths(paths)
    for path in files:
        if path.suffix.lower() == ".txt":
            raise UserError(f"{path} is a text file, but answers to compare are records; give a JSON or JSONL file.")
    return files


def build_pairs(
    paths: str | Path | list[str] | tuple[str, ...],
    *,
    tokenizer: Tokenizer,
    seq_length: int,
    packing: bool = False,
    overlong: str = "truncate",
    progress: Callable[[int, int], None] | None = None,
) -> TokenDataset:
    """Reads and tokenises files of pairs.

    Args:
        paths: one file, several, or patterns with *; JSON or JSON lines.
        tokenizer: encodes the text.
        seq_length: tokens of one answer with its question, at most; a row has room for twice that.
        packing: put several pairs into a row.
        overlong: as in `TokenDataset.build`, for each side; a pair goes when one of its sides goes.
        progress: called with (records done, records in all) now and then.

    Raises:
        UserError: a file or record that cannot be used, or nothing left to compare.
    """
    started = time.monotonic()
    files = answer_files(paths)
    sources = [read_records(path) for path in files]
    collected = _Pairs(seq_length, overlong)
    total = sum(count for count, _ in sources)
    for _, records in sources:
        pairs = (parse_pair(place, record) for place, record in records)
        while chunk := list(islice(pairs, CHUNK // 2)):
            for chosen, rejected in _documents(chunk, tokenizer):
                collected.add(chosen, rejected)
            if progress is not None:
                progress(collected.records, total)
    dataset = collected.dataset(", ".join(map(str, files)), packing=packing)
    dataset.report = replace(dataset.report, seconds=time.monotonic() - started)
    return dataset


def _documents(pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[tuple[Document, Document]]:
    samples = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    documents = map(last_answer, tokenize_samples(samples, tokenizer, mask_prompt=True, stream_length=2))
    return zip(documents, documents, strict=True)


def last_answer(document: Document) -> Document:
    """The document with the last run of its targets as its only ones."""
    targets = document.targets
    ends = np.flatnonzero(np.diff(targets.astype(np.int8), prepend=0) == 1)
    if len(ends) > 1:
        targets = targets.copy()
        targets[: ends[-1]] = False
    return replace(document, targets=targets)


class _Pairs:
    """Pairs as they come, and what happened to them."""

    def __init__(self, seq_length: int, overlong: str) -> None:
        self._seq_length, self._overlong = seq_length, overlong
        self.records = 0
        self._kept: list[Document] = []
        self._truncated = self._overlong_pairs = self._without_target = self._alike = 0

    def add(self, chosen: Document, rejected: Document) -> None:
        self.records += 1
        limit = self._seq_length
        longest = max(len(chosen.tokens), len(rejected.tokens))
        if longest > limit and self._overlong == "error":
            raise chosen.place.error(
                f"an answer with its question has {longest} tokens, more than data.seq_length {limit}; raise it, or "
                "set data.overlong to truncate or drop."
            )
        if longest > limit and self._overlong == "drop":
            self._overlong_pairs += 1
            return
        sides = [replace(side, tokens=side.tokens[:limit], targets=side.targets[:limit]) for side in (chosen, rejected)]
        if not all(side.targets.any() for side in sides):
            self._without_target += 1
        elif np.array_equal(sides[0].tokens, sides[1].tokens):
            self._alike += 1
        else:
            self._truncated += longest > limit
            self._kept += sides

    def dataset(self, names: str, *, packing: bool) -> TokenDataset:
        if not self.records:
            raise UserError(f"{names} has no records; give a file that has some.")
        if not self._kept:
            raise UserError(
                f"{names} leaves nothing to compare: of {self.records} pairs {self._overlong_pairs} are longer than "
                f"data.seq_length {self._seq_length}, {self._without_target} have no answer within it and "
                f"{self._alike} have two equal answers; raise data.seq_length."
            )
        lengths = [len(document.tokens) for document in self._kept]
        return TokenDataset(
            np.concatenate([document.tokens for document in self._kept]),
            np.concatenate([document.targets for document in self._kept]),
            np.cumsum([0, *lengths], dtype=np.int64),
            seq_length=2 * self._seq_length,
            packing=packing,
            group=2,
            signs=np.tile(np.array([1.0, -1.0], dtype=np.float32), len(self._kept) // 2),
            report=DatasetReport(
                records=self.records,
                truncated=self._truncated,
                dropped_overlong=self._overlong_pairs,
                dropped_without_target=self._without_target,
                dropped_alike=self._alike,
            ),
        )
