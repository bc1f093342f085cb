"""Datasets: what is learnt, what is cut off or left out and counted, and the fingerprint."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from transformers import AutoTokenizer

from engine.data import tokenize
from engine.data.dataset import TokenDataset, dataset_of
from engine.data.formats import CompletionSample, read_samples
from engine.data.text_reader import build_texts
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.errors import UserError
from tests.support.shared_data import shared

LONG = 4096


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    return load_tokenizer(shared("tokenizers/llama2_32000/tokenizer.model"))


@pytest.fixture(scope="module")
def processor() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(shared("tokenizers/llama2_32000/tokenizer.model")))


def write(folder: Path, records: list[dict[str, Any]], name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def documents(dataset: TokenDataset) -> list[tuple[list[int], list[bool]]]:
    return [
        (tokens.tolist(), targets.tolist()) for row in range(len(dataset)) for tokens, targets in dataset.documents(row)
    ]


def test_text_is_learnt_from_the_second_token_on(
    tmp_path: Path, llama: Tokenizer, processor: sentencepiece.SentencePieceProcessor
) -> None:
    texts = ["Once upon a time", "two\nlines\n", ""]
    path = write(tmp_path, [{"text": text} for text in texts])
    dataset = build_texts(path, tokenizer=llama, seq_length=LONG)
    expected = [[1, *processor.encode(text), 2] for text in texts]
    assert documents(dataset) == [(ids, [False] + [True] * (len(ids) - 1)) for ids in expected]
    assert dataset.report.records == dataset.report.documents == 3
    assert dataset.report.target_tokens == sum(len(ids) - 1 for ids in expected) == dataset.target_counts.sum()


@pytest.mark.parametrize("mask_prompt", [True, False])
def test_completions_are_learnt_with_their_end(
    llama: Tokenizer, processor: sentencepiece.SentencePieceProcessor, mask_prompt: bool
) -> None:
    path = shared("instruct/identity.json")
    dataset = build_texts(path, tokenizer=llama, seq_length=LONG, mask_prompt=mask_prompt)
    samples = list(read_samples(path, "alpaca")[1])
    assert len(dataset) == len(samples)
    for sample, (ids, targets) in zip(samples, documents(dataset), strict=True):
        assert isinstance(sample, CompletionSample)
        prompt, completion = [1, *processor.encode(sample.prompt)], [*processor.encode(sample.completion), 2]
        assert ids == prompt + completion
        learnt_prompt = [False] * len(prompt) if mask_prompt else [False] + [True] * (len(prompt) - 1)
        assert targets == learnt_prompt + [True] * len(completion)


def test_both_chat_formats_give_the_template_s_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(shared("tokenizers/minimind"))
    reference = AutoTokenizer.from_pretrained(shared("tokenizers/minimind"), local_files_only=True)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]
    other = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "Hello."}]
    path = write(tmp_path, [{"messages": turns}])
    also = write(tmp_path, [{"conversations": other}], "other.jsonl")
    dataset = build_texts([str(path), str(also)], tokenizer=tokenizer, seq_length=LONG)
    first, second = documents(dataset)
    assert first == second
    ids, targets = first
    assert ids == reference.apply_chat_template(turns, return_dict=True)["input_ids"]
    assert reference.decode([token for token, flag in zip(ids, targets, strict=True) if flag]) == "Hello.<|im_end|>\n"


def test_conversations_without_a_template_name_the_record(tmp_path: Path, llama: Tokenizer) -> None:
    path = write(tmp_path, [{"messages": [{"role": "assistant", "content": "x"}]}])
    with pytest.raises(UserError, match=r"data\.jsonl line 1: .*no chat template.*text, completion or alpaca"):
        build_texts(path, tokenizer=llama, seq_length=LONG)


@pytest.mark.parametrize("seq_length", [2, 7, 64, 100_000_000])
def test_text_stream_loses_nothing(
    tmp_path: Path, llama: Tokenizer, processor: sentencepiece.SentencePieceProcessor, seq_length: int
) -> None:
    text = shared("corpus/wiki_demo.txt").read_text(encoding="utf-8")[:20_000]
    path = tmp_path / "stream.txt"
    path.write_text(text, encoding="utf-8")
    stream = [1, *processor.encode(text), 2]
    dataset = build_texts(path, tokenizer=llama, seq_length=seq_length)
    cuts = documents(dataset)
    learnt = [token for ids, targets in cuts for token, flag in zip(ids, targets, strict=True) if flag]
    assert learnt == stream[1:]
    assert cuts[0][0][0] == 1
    # Each cut opens with the token that the one before it learnt last.
    assert all(before[0][-1] == after[0][0] for before, after in pairwise(cuts))
    assert all(len(ids) == min(seq_length, len(stream)) for ids, _ in cuts[:-1])
    assert (dataset.report.truncated, dataset.report.dropped) == (0, 0)


def test_long_streams_are_encoded_in_pieces_that_join(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Tokenizer
) -> None:
    monkeypatch.setattr(tokenize, "SEGMENT_CHARACTERS", 100)
    text = shared("corpus/tinyshakespeare.txt").read_text(encoding="utf-8")[:3000] + "x" * 250
    path = tmp_path / "stream.txt"
    path.write_text(text, encoding="utf-8")
    dataset = build_texts(path, tokenizer=llama, seq_length=LONG)
    # sentencepiece opens each piece with a space of its own, nothing else may differ.
    assert llama.decode(dataset.tokens[1:-1].tolist()).replace(" ", "") == text.replace(" ", "")
    assert len(dataset.tokens) < len(text) / 2


def test_overlong_records_are_truncated_dropped_or_refused(tmp_path: Path, llama: Tokenizer) -> None:
    records = [
        {"prompt": "Hi", "completion": "a b c"},
        {"prompt": "Hi", "completion": " word" * 50},
        {"prompt": "word " * 50, "completion": "x"},
    ]
    path = write(tmp_path, records)
    whole = documents(build_texts(path, tokenizer=llama, seq_length=LONG))
    cut = build_texts(path, tokenizer=llama, seq_length=16, overlong="truncate")
    assert documents(cut) == [whole[0], (whole[1][0][:16], whole[1][1][:16])]
    report = cut.report
    longest = max(len(ids) for ids, _ in whole)
    assert (report.truncated, report.dropped_overlong, report.dropped_prompt_only) == (1, 0, 1)
    assert (report.longest, report.lost_tokens) == (longest, len(whole[1][0]) - 16)
    assert "3 records, 2 documents" in report.summary() and "1 truncated" in report.summary()
    truncated, prompt = report.warnings()
    assert truncated == (
        f"1 of 3 documents is longer than data.seq_length 16 and truncated, {report.lost_tokens} tokens lost; "
        f"data.seq_length {longest} would keep all tokens"
    )
    assert prompt.startswith("1 of 3 documents is dropped: the prompt alone fills data.seq_length 16")
    assert not build_texts(path, tokenizer=llama, seq_length=longest).report.warnings()
    dropped = build_texts(path, tokenizer=llama, seq_length=16, overlong="drop")
    assert documents(dropped) == whole[:1]
    assert (dropped.report.truncated, dropped.report.dropped_overlong, dropped.report.dropped) == (0, 2, 2)
    with pytest.raises(UserError, match=r"data\.jsonl line 2: the record has \d+ tokens.*data\.seq_length 16"):
        build_texts(path, tokenizer=llama, seq_length=16, overlong="error")


def test_nothing_to_learn_is_an_error(tmp_path: Path, llama: Tokenizer) -> None:
    path = write(tmp_path, [{"prompt": "word " * 50, "completion": "x"}])
    longest = len(documents(build_texts(path, tokenizer=llama, seq_length=LONG))[0][0])
    sentence = (
        rf"leaves nothing to train on: of 1 document 1 has a prompt that alone fills data.seq_length 16; raise "
        rf"data.seq_length \(the longest document has {longest} tokens\)."
    )
    with pytest.raises(UserError, match=sentence):
        build_texts(path, tokenizer=llama, seq_length=16)
    with pytest.raises(UserError, match="has no records"):
        build_texts(write(tmp_path, []), tokenizer=llama, seq_length=16)
    with pytest.raises(UserError, match="expected at least 2"):
        build_texts(path, tokenizer=llama, seq_length=1)


def test_completions_need_an_end_token(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((shared("tokenizers/minimind") / "tokenizer.json").read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id is None
    with pytest.raises(UserError, match="no end token"):
        build_texts(shared("instruct/identity.json"), tokenizer=tokenizer, seq_length=LONG)


def test_packing_keeps_every_document(llama: Tokenizer) -> None:
    path = shared("instruct/alpaca_en_demo.json")
    plain = build_texts(path, tokenizer=llama, seq_length=1024)
    packed = build_texts(path, tokenizer=llama, seq_length=1024, packing=True)
    assert sorted(documents(packed)) == sorted(documents(plain))
    assert packed.row_lengths.max() <= 1024
    assert packed.target_counts.sum() == plain.target_counts.sum() == packed.report.target_tokens
    efficiency = packed.report.packing_efficiency
    assert efficiency == pytest.approx(plain.report.tokens / (len(packed) * 1024))
    assert efficiency is not None and efficiency > 0.95
    assert plain.report.packing_efficiency is None


def test_fingerprint_sees_tokens_targets_and_rows() -> None:
    base = [([5, 6, 7], [False, True, True]), ([8, 9], [False, True])]
    token = [([5, 6, 4], [False, True, True]), base[1]]
    target = [([5, 6, 7], [False, False, True]), base[1]]
    border = [([5, 6, 7, 8], [False, True, True, False]), ([9], [False])]
    variants = [base, token, target, border, base[::-1]]
    prints = [dataset_of(variant, seq_length=8).fingerprint() for variant in variants]
    prints.append(dataset_of(base, seq_length=8, packing=True).fingerprint())
    assert len(set(prints)) == len(prints)
    assert prints[0] == dataset_of(base, seq_length=8).fingerprint()


def test_ids_of_large_vocabularies_are_kept() -> None:
    for largest in (65_535, 65_536, 262_143):
        dataset = dataset_of([([1, largest], [False, True])], seq_length=4)
        assert dataset.max_token == largest and dataset.tokens.tolist() == [1, largest]
    assert dataset.tokens.dtype == np.int32


def test_progress_ends_at_the_number_of_records(tmp_path: Path, llama: Tokenizer) -> None:
    seen: list[int] = []
    paths = [str(write(tmp_path, [{"text": "x"}] * 1500)), str(shared("instruct/identity.json"))]
    dataset = build_texts(paths, tokenizer=llama, seq_length=LONG, progress=seen.append)
    total = dataset.report.records
    assert total == 1500 + len(json.loads(shared("instruct/identity.json").read_text(encoding="utf-8")))
    assert seen == [1024, 1500 - 1024, total - 1500]
