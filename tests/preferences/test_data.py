"""Records of compared answers: every form, wrong ones, truncation, packing, batches, and which answers are mismatched.

Token ids of chat records are compared with those of transformers' own chat template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.batch import Batch
from engine.data.collate import rank_batch
from engine.data.dataset import TokenDataset
from engine.data.formats import ALPACA_PROMPT, ALPACA_RESPONSE, ChatSample, CompletionSample, read_samples
from engine.data.loader import DataLoader, EvalLoader
from engine.data.record_files import Place
from engine.data.row_shape import RowShape
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.errors import UserError
from engine.preferences.batch_parts import Answers, Mismatched
from engine.preferences.data.answer_columns import answer_columns, put_reference
from engine.preferences.data.judged import MISMATCHED, parse_judged
from engine.preferences.data.preference_pairs import parse_pair
from tests.support.answer_data import build_judged, build_pairs

PLACE = Place(Path("pairs.jsonl"), "line", 1)
QUESTION = {"role": "user", "content": "Q"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}


@pytest.fixture(scope="module")
def tokenizer(data_dir: Path) -> Tokenizer:
    return load_tokenizer(data_dir / "tokenizers" / "minimind")


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


ALPACA = ALPACA_PROMPT.format(instruction="Q") + ALPACA_RESPONSE
TEXTS: list[tuple[dict[str, Any], tuple[str, str, str]]] = [
    ({"prompt": "Q ", "chosen": "good", "rejected": "bad"}, ("Q ", "good", "bad")),
    ({"instruction": "Q", "input": "", "chosen": "good", "rejected": "bad"}, (ALPACA, "good", "bad")),
    ({"chosen": "Human: Q Bot: good", "rejected": "Human: Q Bot: bad"}, ("Human: Q Bot:", " good", " bad")),
    ({"chosen": "same", "rejected": "same, longer"}, ("same", "", ", longer")),
]


@pytest.mark.parametrize(("record", "expected"), TEXTS)
def test_texts(record: dict[str, Any], expected: tuple[str, str, str]) -> None:
    pair = parse_pair(PLACE, record)
    assert isinstance(pair.chosen, CompletionSample) and isinstance(pair.rejected, CompletionSample)
    assert (pair.chosen.prompt, pair.chosen.completion, pair.rejected.completion) == expected
    assert pair.rejected.prompt == pair.chosen.prompt


SHAREGPT = {"conversations": [{"from": "human", "value": "Q"}]}
TURNS: list[dict[str, Any]] = [
    {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},  # MiniMind's
    {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    {**SHAREGPT, "chosen": {"from": "gpt", "value": "good"}, "rejected": {"from": "gpt", "value": "bad"}},
    {"messages": [QUESTION], "chosen": GOOD, "rejected": BAD},
]


@pytest.mark.parametrize("record", TURNS)
def test_turns(record: dict[str, Any]) -> None:
    pair = parse_pair(PLACE, record)
    assert isinstance(pair.chosen, ChatSample) and isinstance(pair.rejected, ChatSample)
    assert pair.chosen.messages == (QUESTION, GOOD)
    assert pair.rejected.messages == (QUESTION, BAD)


def test_a_system_turn_comes_first() -> None:
    pair = parse_pair(PLACE, {**TURNS[2], "system": "S"})
    assert isinstance(pair.rejected, ChatSample)
    assert pair.rejected.messages[0] == {"role": "system", "content": "S"} and len(pair.rejected.messages) == 3


WRONG_PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "Q", "chosen": "good"}, "line 1: the record has the fields prompt, chosen, .* add 'rejected'"),
    ({"prompt": "Q", "completion": "A"}, "add 'chosen', or set objective.name to language_modeling"),
    ({"prompt": "Q", "completion": "A", "label": True}, "set objective.name to kto"),
    ({"prompt": "Q", "chosen": "good", "rejected": 3}, "field 'rejected' is a number, expected a string"),
    ({"prompt": ["Q"], "chosen": "good", "rejected": "bad"}, "field 'prompt' is a list, expected a string"),
    (
        {"prompt": "Q", "chosen": "a", "rejected": "b", "images": ["x.png"]},
        "field 'images' names an image, for which answers that",
    ),
    ({"prompt": "Q", "chosen": "a", "rejected": "b", "system": "S"}, "field 'system' does not go with answers that"),
    ({"chosen": [QUESTION, GOOD], "rejected": [QUESTION]}, "'rejected' ends with a turn of user"),
    ({"chosen": [QUESTION, GOOD], "rejected": [{**QUESTION, "content": "P"}, BAD]}, "differ before their last turn"),
    ({"chosen": [], "rejected": []}, "field 'chosen' is empty, expected a list of turns"),
    ({"chosen": None, "rejected": None}, "field 'chosen' is null, expected a list of turns"),
    ({**SHAREGPT, "chosen": {"from": "nobody", "value": "A"}, "rejected": {"from": "gpt", "value": "B"}}, "'nobody'"),
]


@pytest.mark.parametrize(("record", "sentence"), WRONG_PAIRS)
def test_wrong_pairs(record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_pair(PLACE, record)


JUDGED: list[tuple[dict[str, Any], bool]] = [
    ({"prompt": "Q", "completion": "good", "label": True}, True),
    ({"prompt": "Q", "completion": "bad", "label": False}, False),
    ({"instruction": "Q", "output": "bad", "label": False}, False),
    ({"prompt": [QUESTION], "completion": [GOOD], "label": True}, True),
    ({"messages": [QUESTION, GOOD], "kto_tag": True}, True),
    ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "bad"}], "label": False}, False),
]


@pytest.mark.parametrize(("record", "liked"), JUDGED)
def test_judged(record: dict[str, Any], liked: bool) -> None:
    answer = parse_judged(PLACE, record)
    assert answer.liked is liked
    text = "good" if liked else "bad"
    if isinstance(answer.sample, ChatSample):
        assert answer.sample.messages == (QUESTION, {"role": "assistant", "content": text})
    else:
        prompt = ALPACA if "instruction" in record else "Q"
        assert (answer.sample.prompt, answer.sample.completion) == (prompt, text)


WRONG_JUDGED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "Q", "completion": "A"}, "expected 'label' beside a question and its answer"),
    ({"prompt": "Q", "completion": "A", "label": "yes"}, "field 'label' is 'yes', expected true or false"),
    ({"prompt": "Q", "completion": "A", "label": 1}, "field 'label' is 1, expected true or false"),
    ({"prompt": "Q", "chosen": "A", "rejected": "B"}, "set objective.name to dpo"),
    ({"text": "Q", "label": True}, "expected a question and its answer"),
    ({"prompt": "Q", "label": True}, "field 'completion' is missing"),
    ({"messages": [QUESTION, GOOD, QUESTION], "label": True}, "'messages' ends with a turn of user"),
]


@pytest.mark.parametrize(("record", "sentence"), WRONG_JUDGED)
def test_wrong_judged(record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_judged(PLACE, record)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (TURNS[0], "a pair of answers .* set objective.name to dpo"),
        ({**TURNS[2], "conversations": [{"from": "human", "value": "Q"}]}, "set objective.name to dpo"),
        (JUDGED[0][0], "set objective.name to kto, or remove the label"),
        (JUDGED[4][0], "set objective.name to kto"),
    ],
)
def test_language_modeling_does_not_learn_judged_answers(record: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        list(read_samples(write(tmp_path, [record]), "auto")[1])


def test_a_label_beside_text_is_left_alone(tmp_path: Path) -> None:
    assert len(list(read_samples(write(tmp_path, [{"text": "spam", "label": True}]), "auto")[1])) == 1


@pytest.mark.parametrize("build", [build_pairs, build_judged])
def test_text_files_and_empty_files_are_refused(build: Any, tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.txt is a text file"):
        build(tmp_path / "a.txt", tokenizer=tokenizer, seq_length=8)


def test_minimind_records_have_the_templates_tokens(tmp_path: Path, data_dir: Path, tokenizer: Tokenizer) -> None:
    """Two answers in an earlier and in the last turn: the last one alone is compared."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(data_dir / "tokenizers" / "minimind")
    before = [QUESTION, {"role": "assistant", "content": "An earlier answer."}, {"role": "user", "content": "And?"}]
    path = write(tmp_path, [{"chosen": [*before, GOOD], "rejected": [*before, BAD]}])
    dataset = build_pairs(path, tokenizer=tokenizer, seq_length=200)
    sides = list(dataset.documents(0))
    for (tokens, targets), answer in zip(sides, (GOOD, BAD), strict=True):
        expected = theirs.apply_chat_template([*before, answer], tokenize=True, return_dict=False)
        assert tokens.tolist() == expected
        runs = np.flatnonzero(np.diff(targets.astype(int), prepend=0) == 1)
        assert len(runs) == 1, "one answer is compared"
        assert theirs.decode(tokens[targets]).strip().endswith(answer["content"] + theirs.eos_token)
        assert "earlier" not in theirs.decode(tokens[targets])
    assert answer_columns(dataset).signs.tolist() == [1.0, -1.0] and dataset.target_counts.tolist() == [1]


def pairs(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"question {index} ", "chosen": "good " * (1 + index % 4), "rejected": "bad " * (1 + index % 3)}
        for index in range(count)
    ]


def test_long_pairs_go_or_are_cut_on_both_sides(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = [
        {"prompt": "Q ", "chosen": "a b c d e f g h i j", "rejected": "x"},
        {"prompt": "Q " * 30, "chosen": "a", "rejected": "b"},
        {"prompt": "Q ", "chosen": "the same", "rejected": "the same"},
        {"prompt": "Q ", "chosen": "one", "rejected": "two"},
    ]
    path = write(tmp_path, records)
    cut = build_pairs(path, tokenizer=tokenizer, seq_length=8)
    assert len(cut) == 2 and cut.report.truncated == 1
    assert (cut.report.dropped_prompt_only, cut.report.dropped_alike) == (1, 1)
    assert cut.report.summary().startswith("4 records, 2 pairs, ") and cut.report.limit == 8
    assert (
        "1 of 4 pairs has an answer that, with its prompt, is longer than data.seq_length 8" in cut.report.warnings()[0]
    )
    assert max(len(tokens) for row in range(2) for tokens, _ in cut.documents(row)) == 8
    dropped = build_pairs(path, tokenizer=tokenizer, seq_length=8, overlong="drop")
    assert len(dropped) == 1 and dropped.report.dropped_overlong == 2
    with pytest.raises(UserError, match="line 1: an answer with its question has .* more than data.seq_length 8"):
        build_pairs(path, tokenizer=tokenizer, seq_length=8, overlong="error")
    with pytest.raises(UserError, match="leaves nothing to compare: of 1 pair 1 has two equal answers; give"):
        build_pairs(write(tmp_path, records[2:3]), tokenizer=tokenizer, seq_length=8)


def loader_of(dataset: TokenDataset, rows: int) -> DataLoader:
    return DataLoader(
        dataset, RowShape(micro_batch_size=rows), global_batch_size=rows, seed=0, shuffle=False, num_workers=0
    )


def answer_tokens(batch: Batch) -> list[list[int]]:
    """What each answer must predict, read from the batch alone."""
    assert batch.part(Answers) is not None
    weights, ids = batch.loss_weights_BS.bool(), batch.part(Answers).ids_BS
    return [batch.labels_BS[weights & (ids == number)].tolist() for number in range(len(batch.part(Answers).documents))]


@pytest.mark.parametrize("packing", [False, True])
def test_batches_say_which_token_belongs_to_which_answer(packing: bool, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path, pairs(9))
    dataset = build_pairs(path, tokenizer=tokenizer, seq_length=24, packing=packing)
    assert packing == (len(dataset) < 9) and dataset.seq_length == 48
    assert dataset.target_counts.sum() == 9, "a pair counts once, however long"
    put_reference(dataset, np.arange(18, dtype=np.float32))
    batch = loader_of(dataset, len(dataset)).batches(0)[0]
    answers = batch.part(Answers)
    assert answers is not None and answers.reference_logps is not None
    assert sorted(answers.documents) == list(range(18))
    assert answers.signs.tolist() == [1.0, -1.0] * 9
    assert [first + 1 for first in answers.documents[::2]] == list(answers.documents[1::2]), "sides of one pair"
    assert answers.reference_logps.tolist() == [float(document) for document in answers.documents]
    for found, length, document in zip(answer_tokens(batch), answers.lengths, answers.documents, strict=True):
        span = slice(dataset.starts[document], dataset.starts[document] + dataset.lengths[document])
        assert found == dataset.tokens[span][dataset.targets[span]].tolist()
        assert len(found) == length


def test_context_parts_hold_each_token_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = build_pairs(write(tmp_path, pairs(4)), tokenizer=tokenizer, seq_length=24)
    parts = [
        rank_batch(dataset, [0, 3], [0, 1], RowShape(pad_multiple=4, context_size=2, context_rank=rank))
        for rank in range(2)
    ]
    whole = rank_batch(dataset, [0, 3], [0, 1], RowShape(pad_multiple=4))
    assert whole.part(Answers) is not None
    for number, expected in enumerate(answer_tokens(whole)):
        held = [token for part in parts for token in answer_tokens(part)[number]]
        assert sorted(held) == sorted(expected)
    for part in parts:
        assert (
            part.part(Answers) is not None
            and part.part(Answers).lengths.tolist() == whole.part(Answers).lengths.tolist()
        )


def test_fillers_of_the_last_evaluation_batch_have_no_answers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = build_pairs(write(tmp_path, pairs(3)), tokenizer=tokenizer, seq_length=24)
    found = []
    for rank in range(2):
        (batch,) = EvalLoader(dataset, RowShape(micro_batch_size=2, data_rank=rank, data_size=2))
        assert batch.part(Answers) is not None
        found.append(batch.part(Answers))
        assert batch.loss_weights_BS.sum() == batch.part(Answers).lengths.sum()
    assert [len(answers.documents) for answers in found] == [4, 2]
    (empty,) = EvalLoader(dataset, RowShape(micro_batch_size=2, data_rank=1, data_size=2), max_samples=2)
    assert (
        empty.part(Answers) is not None and empty.part(Answers).documents == () and len(empty.part(Answers).signs) == 0
    )


def judged(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"question {index} ", "completion": f"answer {index} " * (1 + index % 3), "label": index % 2 == 0}
        for index in range(count)
    ]


@pytest.mark.parametrize("packing", [False, True])
def test_mismatched_answers_are_those_of_the_record_before(packing: bool, tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = judged(7)
    dataset = build_judged(write(tmp_path, records), tokenizer=tokenizer, seq_length=40, packing=packing)
    assert packing == (len(dataset) < 7) and dataset.seq_length == 40
    assert dataset.target_counts.sum() == 7 and answer_columns(dataset).signs.tolist() == [1.0, -1.0] * 3 + [1.0]
    batch = loader_of(dataset, len(dataset)).batches(0)[0]
    beside = batch.part(Mismatched)
    assert beside is not None
    other = beside.batch
    assert other.part(Answers) is not None and batch.part(Answers) is not None
    assert other.part(Answers).documents == batch.part(Answers).documents
    for data, shift in ((dataset, 0), (dataset.companions[MISMATCHED], 1)):
        for document in range(7):
            span = slice(data.starts[document], data.starts[document] + data.lengths[document])
            question = tokenizer.encode(records[document]["prompt"])
            answer = [*tokenizer.encode(records[document - shift]["completion"]), tokenizer.eos_id]
            assert data.tokens[span].tolist() == question + answer
            assert data.targets[span].tolist() == [False] * len(question) + [True] * len(answer)


def test_one_answer_cannot_be_mismatched(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="leaves 1 answer to train on, and at least 2 are expected"):
        build_judged(write(tmp_path, judged(1)), tokenizer=tokenizer, seq_length=40)


def test_another_label_is_another_data_set(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = judged(3)
    first = build_judged(write(tmp_path, records), tokenizer=tokenizer, seq_length=40).fingerprint()
    records[0]["label"] = False
    assert build_judged(write(tmp_path, records), tokenizer=tokenizer, seq_length=40).fingerprint() != first
