"""Records whose target tokens come with a teacher's most likely tokens and their log-probabilities.

The text is of any format of `engine.data.formats`; the teacher's tokens are in one of these fields:

| fields                                | an entry, of one token                            | written by       |
|---------------------------------------|---------------------------------------------------|------------------|
| target_token_ids and target_logprobs  | ids; log-probabilities of the same                | rankfold distill |
| target_token_ids and logprobs         | the same                                          | data for axolotl |
| prompt_logprobs                       | {id: {logprob: number}}; null for the first token | vLLM             |
| logprobs                              | [{token: "token_id:ID", logprob: number}]         | data for axolotl |

Entry i belongs to token i of the text as it is tokenised here: it is the distribution of this token given those before
it. There is an entry for each token, for each but the first, or for each target token alone; where others have one, it
is not read and may be null or empty. Log-probabilities are natural logarithms at temperature 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch import IGNORE_LABEL
from engine.data.build import RecordReader
from engine.data.document import Document
from engine.data.formats import Sample, detect_format, parse_record
from engine.data.overlong import Fate, RecordKind
from engine.data.record_files import Place, Record
from engine.data.sources import Given, open_records
from engine.data.tokenize import ConversationReader
from engine.data.tokenizer import Tokenizer
from engine.distillation.top_tokens import NO_TOKEN, TopTokens
from engine.errors import UserError
from engine.foreign.fields import is_integer
from engine.sentences import listed

_MOST_ID = (1 << 31) - 1
_ABOVE_ONE = 1e-3
"""How far the log-probabilities of a token may add up above 1 in another program's precision."""

Likely = list[tuple[int, float]]
"""Ids of tokens with their log-probabilities."""


@dataclass(frozen=True, slots=True)
class TaughtSample:
    """A text, and what its record has of a teacher's tokens.

    Args:
        sample: the text.
        place: of the record.
        field: that has the entries.
        entries: of tokens, not checked yet.
    """

    sample: Sample
    place: Place
    field: str
    entries: Sequence[Any]


def parse_taught(place: Place, record: Record) -> TaughtSample:
    """Parses one record.

    Raises:
        UserError: a malformed record: names file, record and field.
    """
    field, entries = _entries(place, record)
    bare = {name: value for name, value in record.items() if name not in (field, "logprobs")}
    return TaughtSample(parse_record(place, bare, detect_format(place, bare)), place, field, entries)


def _entries(place: Place, record: Record) -> tuple[str, list[Any]]:
    forms = [name for name in ("target_token_ids", "prompt_logprobs") if name in record]
    if len(forms) > 1 or {"target_logprobs", "logprobs"} <= record.keys():
        raise place.error(
            f"the record has a teacher's tokens in several forms, in the fields {listed(record)}: keep one of them."
        )
    if "target_token_ids" in record:
        logps = "target_logprobs" if "target_logprobs" in record else "logprobs"
        ids, numbers = (_list_in(place, record, field) for field in ("target_token_ids", logps))
        if len(ids) != len(numbers):
            raise place.error(
                f"field 'target_token_ids' has {len(ids)} entries and field '{logps}' {len(numbers)}, expected one of "
                "each for a token; correct the record."
            )
        return "target_token_ids", list(zip(ids, numbers, strict=True))
    field = next((name for name in ("prompt_logprobs", "logprobs") if name in record), None)
    if field is None:
        raise place.error(
            f"the record has the fields {listed(record) or 'none'}, expected beside a text those of a teacher's "
            "tokens: target_token_ids and target_logprobs, prompt_logprobs, or logprobs; write them with rankfold "
            "distill, or name a teacher in distillation.teachers."
        )
    return field, _list_in(place, record, field)


def _list_in(place: Place, record: Record, field: str) -> list[Any]:
    value = record.get(field)
    if not isinstance(value, list):
        raise place.error(f"field '{field}' is missing or no list, expected an entry for each token; correct it.")
    return value


class TaughtReader(RecordReader[TaughtSample]):
    """Reads texts with a teacher's tokens."""

    kind = RecordKind(
        unit="document", subject="the text has", fates=(Fate.OVERLONG, Fate.WITHOUT_TARGET, Fate.PROMPT_ONLY)
    )

    def __init__(self, tokenizer: Tokenizer, *, images: ConversationReader | None = None) -> None:
        super().__init__(tokenizer, images=images, mask_prompt=True, stream_length=2)

    def open(self, given: Given) -> Iterator[TaughtSample]:
        if isinstance(given, Path) and given.suffix.lower() == ".txt":
            raise UserError(
                f"{given} is a text file, which has no teacher's tokens; give a JSON or JSONL file, or name a teacher "
                "in distillation.teachers."
            )
        return (parse_taught(place, record) for place, record in open_records(given))

    def documents(self, records: Sequence[TaughtSample]) -> Iterator[Document]:
        found = super().documents([record.sample for record in records])
        for record, document in zip(records, found, strict=True):
            yield replace(document, extras=(*document.extras, top_tokens(record, document)))


def top_tokens(record: TaughtSample, document: Document) -> TopTokens:
    """Returns the teacher's tokens of a document's targets.

    Raises:
        UserError: there are not as many entries as tokens, or one of them is malformed.
    """
    places = np.flatnonzero(document.targets).astype(np.int64)
    entries, place, length = record.entries, record.place, len(document.tokens)
    skipped = {length: 0, length - 1: 1}.get(len(entries))
    if skipped is None and len(entries) != len(places):
        raise place.error(
            f"field '{record.field}' has {len(entries)} entries, but the text has {length} tokens here, {len(places)} "
            "of them targets: expected an entry for each token, for each but the first, or for each target; give "
            "input_ids and labels, so that tokens are the teacher's."
        )
    found = [
        _likely(place, f"{record.field}[{number}]", entries[number])
        for number in (range(len(places)) if skipped is None else (places - skipped).tolist())
    ]
    width = max(map(len, found), default=1)
    ids = np.full((len(places), width), NO_TOKEN, dtype=np.int32)
    logps = np.full((len(places), width), -np.inf, dtype=np.float32)
    for row, likely in enumerate(found):
        ids[row, : len(likely)], logps[row, : len(likely)] = zip(*likely, strict=True)
    return TopTokens(places, ids, logps)


def _likely(place: Place, field: str, entry: Any) -> Likely:
    """Returns the tokens of an entry, at least one."""
    try:
        found = _pairs(entry)
    except (ValueError, TypeError, KeyError, AttributeError):
        found = []
    ids = [token for token, _ in found]
    problem = None
    if not found:
        problem = "has no tokens, each with a log-probability"
    elif not all(is_integer(token) and 0 <= token <= _MOST_ID for token in ids):
        problem = "has token ids that are no integers from 0"
    elif len(set(ids)) < len(ids):
        problem = "has a token twice"
    elif not all(map(_is_logp, (logp for _, logp in found))):
        problem = "has log-probabilities that are no numbers up to 0"
    elif (total := sum(math.exp(logp) for _, logp in found)) > 1 + _ABOVE_ONE:
        problem = f"has probabilities that add up to {total:.3f}"
    elif total == 0.0:
        problem = "has probabilities of 0 alone"
    if problem is not None:
        raise place.error(
            f"field '{field}' {problem}, expected the teacher's most likely tokens at this target; correct the record."
        )
    return found


def _is_logp(value: object) -> bool:
    """Returns whether a value is a number up to 0; -inf is one, and an integer that no float holds is none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return value == -math.inf or -sys.float_info.max <= value <= 0


def _pairs(entry: Any) -> Likely:
    if isinstance(entry, tuple):
        return list(zip(*entry, strict=True))
    if isinstance(entry, Mapping):
        return [
            (int(token), value["logprob"] if isinstance(value, Mapping) else value) for token, value in entry.items()
        ]
    return [(int(str(one["token"]).removeprefix("token_id:")), one["logprob"]) for one in entry]


def as_record(tokens: NDArray[Any], targets: NDArray[np.bool_], top: TopTokens) -> dict[str, Any]:
    """Returns a document as a record of ids, with its teacher's tokens at each target."""
    labels = np.where(targets, tokens.astype(np.int64), IGNORE_LABEL)
    kept = [ids != NO_TOKEN for ids in top.ids]
    return {
        "input_ids": tokens.tolist(),
        "labels": labels.tolist(),
        "target_token_ids": [ids[some].tolist() for ids, some in zip(top.ids, kept, strict=True)],
        "target_logprobs": [
            [round(float(logp), 6) for logp in logps[some]] for logps, some in zip(top.logps, kept, strict=True)
        ],
    }
