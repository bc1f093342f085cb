"""Properties of data for any input: a record is a sample or a sentence, rows hold what they were given, pairs stay.

Compared with plain loops over lists. What packing and the zig-zag have of this kind stands with their other tests.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import IGNORE_LABEL
from engine.config.data import FORMATS
from engine.data.collate import build_batch, context_part
from engine.data.columns import contiguous
from engine.data.concatenate import concatenate
from engine.data.dataset import dataset_of
from engine.data.formats import parse_record, read_samples
from engine.data.record_files import Place
from engine.errors import UserError
from engine.preferences.data.answer_columns import answer_columns
from engine.preferences.data.preference_pairs import parse_pair
from tests.support.answer_data import build_pairs
from tests.unit.test_data_concatenate import Letters

TEXTS = st.text(alphabet="ab \n{}é\ud800", max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from(["user", "assistant", "robot"]), "from": TEXTS, "content": TEXTS | VALUES}
    ),
    max_size=3,
)
IDS = st.lists(st.sampled_from([-100, -1, 0, 5, 2**31, 2**64, 10**30, True, 1.5]), max_size=4)
FIELDS = (
    "text", "prompt", "completion", "instruction", "input", "output", "system", "conversations", "messages", "images",
    "chosen", "rejected", "label", "labels", "input_ids", "attention_mask",
)  # fmt: skip
RECORDS = st.dictionaries(st.sampled_from(FIELDS) | TEXTS, TEXTS | TURNS | IDS | VALUES, max_size=4)


@given(RECORDS, st.sampled_from(FORMATS))
@settings(max_examples=300, deadline=None)
def test_a_record_is_a_sample_or_a_sentence(record: dict[str, Any], data_format: str):
    place = Place(Path("a.jsonl"), "line", 3)
    if data_format != "auto":
        try:
            parse_record(place, record, data_format)
        except UserError as error:
            assert str(error).startswith("a.jsonl line 3: ")
    try:
        parse_pair(place, record)
    except UserError as error:
        assert str(error).startswith("a.jsonl line 3: ")


@given(st.binary(max_size=60) | st.lists(RECORDS | VALUES, max_size=3), st.sampled_from([".jsonl", ".json", ".txt"]))
@settings(max_examples=150, deadline=None)
def test_a_file_is_samples_or_a_sentence_that_names_it(content: Any, ending: str):
    lines = content if isinstance(content, bytes) else "\n".join(map(json.dumps, content)).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{ending}"
        path.write_bytes(lines)
        try:
            count, samples = read_samples(path, "auto")
            assert len(list(samples)) == count
        except UserError as error:
            assert str(path) in str(error)


@given(st.lists(st.text(alphabet='ab\n\u2028\x85"\\é', max_size=8), min_size=1, max_size=5), st.booleans())
@settings(max_examples=100, deadline=None)
def test_texts_come_back_from_lines_and_arrays(texts: list[str], as_array: bool):
    records = [{"text": text} for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.json"
        path.write_text(
            json.dumps(records) if as_array else "\r\n".join(map(json.dumps, records)), encoding="utf-8-sig"
        )
        assert [sample.text for sample in read_samples(path, "auto")[1]] == texts


@st.composite
def documents(draw: st.DrawFn) -> tuple[list[tuple[list[int], list[bool]]], int]:
    """Documents with any tokens learnt but the first, and the length of a row that holds each of them."""
    seq_length = draw(st.integers(2, 12))
    found = []
    for length in draw(st.lists(st.integers(1, seq_length), min_size=1, max_size=8)):
        tokens = draw(st.lists(st.integers(1, 70_000), min_size=length, max_size=length))
        targets = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        found.append((tokens, [False, *targets[1:]]))
    return found, seq_length


@given(documents(), st.booleans(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_batch_holds_its_documents(case: tuple[list[tuple[list[int], list[bool]]], int], packing: bool, data: Any):
    given_documents, seq_length = case
    dataset = dataset_of(given_documents, seq_length=seq_length, packing=packing)
    numbers = list(range(len(dataset)))
    rows = data.draw(st.lists(st.sampled_from([None, *numbers]), min_size=1, max_size=4))
    batch = build_batch(dataset, rows, range(5, 5 + len(rows)), length=seq_length)
    lengths = list(batch.document_lengths)
    assert batch.document_offsets.tolist() == [0, *np.cumsum(lengths)]
    for b, row in enumerate(rows):
        tokens, labels, positions = [], [], []
        for document in [] if row is None else dataset.rows.row(row).tolist():
            ids, targets = given_documents[document]
            tokens += ids
            labels += [ids[i + 1] if targets[i + 1] else IGNORE_LABEL for i in range(len(ids) - 1)] + [IGNORE_LABEL]
            positions += range(len(ids))
        padding = seq_length - len(tokens)
        last = positions[-1] + 1 if positions else 0
        assert batch.tokens_BS[b].tolist() == tokens + [0] * padding
        assert batch.labels_BS[b].tolist() == labels + [IGNORE_LABEL] * padding
        assert batch.positions_BS[b].tolist() == [*positions, *range(last, last + padding)]
        assert batch.token_index_BS[b].tolist() == [(5 + b) * seq_length + column for column in range(seq_length)]
        in_row, total = [], 0
        while total < seq_length:
            in_row.append(lengths.pop(0))
            total += in_row[-1]
        own = [] if row is None else [len(given_documents[one][0]) for one in dataset.rows.row(row).tolist()]
        expected = [*own[:-1], own[-1] + padding] if own else [seq_length]  # the padding belongs to the last
        assert total == seq_length and in_row == expected
    assert not lengths


@given(documents(), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_context_ranks_hold_every_token_once(case: tuple[list[tuple[list[int], list[bool]]], int], size: int):
    given_documents, length = case[0], max(case[1], 2 * size)
    dataset = dataset_of(given_documents, seq_length=length, packing=True)
    batch = build_batch(dataset, list(range(len(dataset))), range(len(dataset)), length=length)
    parts = [context_part(batch, size=size, rank=rank) for rank in range(size)]
    for name in ("tokens_BS", "labels_BS", "positions_BS"):
        whole = dict(zip(batch.token_index_BS.flatten().tolist(), getattr(batch, name).flatten().tolist(), strict=True))
        held = [
            pair
            for part in parts
            for pair in zip(part.token_index_BS.flatten().tolist(), getattr(part, name).flatten().tolist(), strict=True)
        ]
        assert sorted(held) == sorted(whole.items())


@given(documents(), st.integers(2, 9))
@settings(max_examples=200, deadline=None)
def test_concatenation_is_cutting_one_long_list(case: tuple[list[tuple[list[int], list[bool]]], int], seq_length: int):
    given_documents = case[0]
    tokens = [token for ids, _ in given_documents for token in ids]
    learnt = [flag for _, targets in given_documents for flag in ([all(targets[1:])] + targets[1:])]
    rows = []
    for start in range(0, len(tokens) - seq_length + 1, seq_length):
        targets = [False, *learnt[start + 1 : start + seq_length]]
        if any(targets):
            rows.append((tokens[start : start + seq_length], targets))
    columns = contiguous(
        np.array(tokens), np.array([flag for _, targets in given_documents for flag in targets]),
        np.cumsum([0, *(len(ids) for ids, _ in given_documents)]),
    )  # fmt: skip
    if not rows:
        with pytest.raises(UserError, match="data.packing is concatenate"):
            concatenate(columns, seq_length)
        return
    found, left_over = concatenate(columns, seq_length)
    assert found.targets is not None
    assert found.tokens.tolist() == [token for ids, _ in rows for token in ids]
    assert found.targets.tolist() == [flag for _, targets in rows for flag in targets]
    assert left_over == len(tokens) - len(rows) * seq_length
    assert found.starts.tolist() == [row * seq_length for row in range(len(rows))]
    assert found.lengths.tolist() == [seq_length] * len(rows)


ANSWER_TEXTS = st.text(alphabet="abc", max_size=5)


@given(
    st.lists(st.tuples(ANSWER_TEXTS, ANSWER_TEXTS, ANSWER_TEXTS), min_size=1, max_size=8), st.booleans(),
    st.integers(4, 12),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_pairs_stay_pairs(pairs: list[tuple[str, str, str]], packing: bool, seq_length: int):
    """The preferred answer and then the other, in one row, with one question; what is learnt is the answers alone."""
    kept = []
    for prompt, *answers in pairs:
        sides = [
            ([1, *map(ord, prompt + answer), 2][:seq_length], len(prompt) + 1) for answer in answers
        ]  # tokens, and where the answer begins
        if all(start < len(ids) for ids, start in sides) and sides[0][0] != sides[1][0]:
            kept.append(sides)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        records = [{"prompt": prompt, "chosen": yes, "rejected": no} for prompt, yes, no in pairs]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        arguments = {"tokenizer": Letters(), "seq_length": seq_length, "packing": packing}
        if not kept:
            with pytest.raises(UserError, match="leaves nothing to compare"):
                build_pairs(path, **arguments)
            return
        data = build_pairs(path, **arguments)
    expected = [(ids, [index >= start for index in range(len(ids))]) for sides in kept for ids, start in sides]
    found = {}
    for row in range(len(data)):
        numbers = data.rows.row(row).tolist()
        assert len(numbers) % 2 == 0 and data.row_lengths[row] <= data.seq_length == 2 * seq_length
        assert all(first % 2 == 0 and second == first + 1 for first, second in zip(*[iter(numbers)] * 2, strict=True))
        for number, (ids, targets) in zip(numbers, data.documents(row), strict=True):
            found[number] = (ids.tolist(), targets.tolist())
    assert [found[number] for number in sorted(found)] == expected
    assert answer_columns(data).signs.tolist() == [1.0, -1.0] * len(kept)
