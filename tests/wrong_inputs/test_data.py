"""Wrong data and tokenizers: one sentence that names file, record and field, before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.wrong_inputs.workplace import Workplace

Refused = Callable[..., None]

FILES: dict[str, tuple[str, bytes, str]] = {
    "empty": ("train.jsonl", b"", "train.jsonl has no records"),
    "blank lines": ("train.jsonl", b"\n \n\n", "train.jsonl has no records"),
    "binary": ("train.jsonl", bytes(range(256)) * 8, "line 1: not a JSON record"),
    "UTF-16": ("train.jsonl", '{"text": "ab"}\n'.encode("utf-16"), "line 1: not UTF-8 at byte 0"),
    "Latin-1": ("train.jsonl", '{"text": "\xe9"}\n'.encode("latin-1"), "line 1: not UTF-8 at byte 10"),
    "cut off": ("train.jsonl", b'{"text": "ab"}\n{"text": "a', "line 2: not a JSON record (Unterminated string"),
    "Python's quotes": ("train.jsonl", b"{'text': 'ab'}\n", "line 1: not a JSON record (Expecting property name"),
    "number": ("train.jsonl", b"5\n", "line 1: the record is of type int"),
    "null": ("train.jsonl", b"null\n", "line 1: the record is of type NoneType"),
    "deep": ("train.jsonl", b'{"text": ' + b"[" * 100_000, "line 1: the record cannot be read (maximum recursion"),
    "digits": ("train.jsonl", b'{"text": ' + b"9" * 5000 + b"}", "the record cannot be read (Exceeds the limit"),
    "20 MB in a line": ("train.jsonl", b'{"text": "' + b"a" * 20_000_000, "line 1: not a JSON record (Unterminated"),
    "20 MB of zeros": ("train.jsonl", bytes(20_000_000), "line 1: not a JSON record"),
    "empty array": ("train.json", b"[]", "train.json has no records"),
    "open array": ("train.json", b'[{"text": "a"}', "train.json line 1: the array is not JSON"),
    "array with a comma": ("train.json", b'[{"text": "a"},\n]', "train.json line 2: the array is not JSON"),
    "array of texts": ("train.json", b'["ab"]', "index 0: the record is of type str"),
    "deep array": ("train.json", b"[" * 100_000, "train.json: the array cannot be read (maximum recursion"),
    "TSV": ("train.tsv", b"a\tb\n", "train.tsv ends in '.tsv', expected"),
    "gzip": ("train.jsonl.gz", b"\x1f\x8b", "train.jsonl.gz ends in '.gz', expected"),
    "no extension": ("train", b'{"text": "a"}', "train ends in '', expected"),
    "empty text": ("train.txt", b" \n", "train.txt has no text"),
    "binary text": ("train.txt", b"\xff\xfe\x00", "train.txt is not UTF-8 text (byte 0)"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("option", ["data.train", "data.validation"])
def test_files(case: str, option: str, place: Workplace, refused: Refused):
    name, content, words = FILES[case]
    file = place.folder / "given" / name
    file.parent.mkdir()
    file.write_bytes(content)
    place.options[option] = file
    refused(words)


USER, ANSWER = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}
RECORDS: list[tuple[str, list[dict[str, Any]], str]] = [
    ("", [{"body": "a"}], "line 1: the record has the fields body, expected those of one format"),
    ("", [{}], "line 1: the record has the fields none, expected"),
    ("", [{"text": None}], "line 1: field 'text' is null, expected a string"),
    ("", [{"text": 5}], "line 1: field 'text' is a number"),
    ("", [{"text": ["a"]}], "line 1: field 'text' is a list"),
    ("", [{"text": "\ud800"}], "line 1: field 'text' has half of a surrogate pair at character 0"),
    ("", [{"text": "ab"}, {"body": "a"}], "line 2: field 'text' is missing"),
    ("", [{"prompt": "a", "completion": 1}], "line 1: field 'completion' is a number"),
    ("completion", [{"completion": "a"}], "line 1: field 'prompt' is missing, which the format completion needs"),
    ("alpaca", [{"text": "ab"}], "line 1: field 'instruction' is missing"),
    ("", [{"instruction": "a", "output": ["b"]}], "line 1: field 'output' is a list"),
    ("", [{"instruction": "a", "output": "b", "history": [["x", "y"]]}], "line 1: field 'history' is not supported"),
    ("", [{"conversations": []}], "line 1: field 'conversations' is empty, expected a list of turns"),
    ("", [{"conversations": "hello"}], "line 1: field 'conversations' is a string"),
    ("", [{"conversations": [{"from": "robot", "value": "a"}]}], "field 'conversations[0].from' is 'robot'"),
    ("", [{"conversations": [{"from": "human"}]}], "field 'conversations[0].value' is missing"),
    ("", [{"messages": [USER]}], "line 1: field 'messages' has no turn of the assistant"),
    ("", [{"messages": ["hi"]}], "line 1: field 'messages[0]' is a string"),
    ("", [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], "has no turn of the assistant"),
    ("", [{"messages": [USER, ANSWER], "images": ["a.png"]}], "field 'images' names 1 image, but <image>"),
    ("", [{"messages": [USER, ANSWER]}], "tokenizer.model has no chat template, which conversations"),
    ("dpo", [{"text": "ab"}], "line 1: the record has the fields text, expected"),
    ("dpo", [{"prompt": "a", "chosen": "b"}], "add 'rejected'"),
    ("dpo", [{"prompt": "a", "chosen": "b", "rejected": 1}], "line 1: field 'rejected' is a number"),
    ("dpo", [{"prompt": 5, "chosen": "b", "rejected": "a"}], "line 1: field 'prompt' is a number"),
    ("dpo", [{"prompt": "a", "chosen": "b", "rejected": [ANSWER]}], "line 1: field 'rejected' is a list"),
    ("dpo", [{"chosen": [USER], "rejected": [USER]}], "field 'chosen' ends with a turn of user"),
    ("dpo", [{"chosen": [USER, ANSWER], "rejected": [ANSWER, ANSWER]}], "differ before their last turn"),
    ("dpo", [{"prompt": "a", "chosen": "b", "rejected": "b"}], "1 has two equal answers"),
]


@pytest.mark.parametrize(("kind", "records", "words"), RECORDS, ids=lambda value: str(value)[:60])
def test_records(kind: str, records: list[dict[str, Any]], words: str, place: Workplace, refused: Refused):
    place.records(*records)
    if kind == "dpo":
        place.set(objective__name="dpo")
    elif kind:
        place.set(data__format=kind)
    refused(words)


def test_rows_that_hold_nothing(place: Workplace, refused: Refused):
    place.records({"text": "ab" * 50})
    place.set(data__overlong="drop")
    refused(
        "leaves nothing to train on: of 1 document 1 is longer than data.seq_length 16; raise data.seq_length (the "
        "longest"
    )
    place.set(data__overlong="error")
    refused("line 1: the record has 103 tokens, more than data.seq_length 16")
    place.records({"prompt": "ab" * 50, "completion": "a"})
    place.set(data__overlong="truncate")
    refused("of 1 document 1 has a prompt that alone fills data.seq_length 16; raise data.")
    place.set(data__packing="concatenate", data__seq_length=512)
    refused("tokens in all, which do not fill one row of data.seq_length 512")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere.jsonl", "data.train is nowhere.jsonl, which is not a file"),
        ("/", "data.train is /, which is not a file"),
        ("", "data.train is empty"),
        (None, "data.train is not set"),
    ],
)
def test_paths(path: str | None, words: str, place: Workplace, refused: Refused):
    place.set(data__train=path)
    refused(words)


WORDS = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"ab": 0, "[UNK]": 1, "</s>": 2}, "unk_token": "[UNK]"},
}  # fmt: skip
SETTINGS: dict[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, "has neither tokenizer.json nor tokenizer.model"),
    "parts of one": ({"vocab.json": "{}", "merges.txt": ""}, "has neither tokenizer.json nor tokenizer.model"),
    "no sentencepiece": ({"tokenizer.model": "abc"}, "tokenizer.model is not a sentencepiece model"),
    "empty sentencepiece": ({"tokenizer.model": ""}, "tokenizer.model is not a sentencepiece model"),
    "no JSON": ({"tokenizer.json": "{"}, "tokenizer.json is not valid JSON"),
    "a list": ({"tokenizer.json": "[]"}, "tokenizer.json holds no JSON mapping"),
    "no model": ({"tokenizer.json": "{}"}, "tokenizer.json has no model and added_tokens"),
    "odd model": (
        {"tokenizer.json": json.dumps({**WORDS, "model": {"type": "Odd"}})}, "is not one that transformers can open"
    ),
    "settings no JSON": (
        {"tokenizer.json": json.dumps(WORDS), "tokenizer_config.json": "{"}, "tokenizer_config.json is not valid JSON"
    ),
    "settings a list": (
        {"tokenizer.json": json.dumps(WORDS), "tokenizer_config.json": "[]"}, "tokenizer_config.json holds no JSON"
    ),
    "end token a number": (
        {"tokenizer.json": json.dumps(WORDS), "tokenizer_config.json": '{"eos_token": 5}'},
        "with the settings beside it, is not one that transformers can open",
    ),
    "template a number": (
        {"tokenizer.json": json.dumps(WORDS), "tokenizer_config.json": '{"chat_template": 5}'}, "chat_template 5"
    ),
    "special tokens no JSON": (
        {"tokenizer.json": json.dumps(WORDS), "special_tokens_map.json": "{"},
        "special_tokens_map.json is not valid JSON",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_tokenizers(case: str, place: Workplace, refused: Refused):
    files, words = SETTINGS[case]
    folder = place.folder / "tokenizer"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    place.set(data__tokenizer=folder)
    refused(words)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if", "refuses these messages (unexpected 'end of template')"),
        ("{{ raise_exception('no') }}", "refuses these messages (no)"),
        ("{{ 1 / 0 }}", "refuses these messages (division by zero)"),
        ("{{ nobody.knows.it }}", "refuses these messages ('nobody' is undefined)"),
        (None, "has no chat template"),
    ],
)
def test_chat_templates(template: str | None, words: str, place: Workplace, refused: Refused):
    (place.model / "tokenizer.json").write_text(json.dumps(WORDS))
    (place.model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    place.records({"messages": [USER, ANSWER]})
    refused(words)


def test_a_tokenizer_of_another_model(place: Workplace, refused: Refused):
    def cut(tensors: dict[str, Any]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:6].clone()

    place.change_config(vocab_size=6)
    place.change_tensors(cut)
    refused("token id 6, but the model's vocabulary has 6 entries")


def test_completions_without_an_end(place: Workplace, refused: Refused):
    (place.model / "tokenizer.json").write_text(json.dumps(WORDS))
    place.records({"prompt": "ab", "completion": "ab"})
    refused("the tokenizer has no end token")


def test_a_text_file_is_no_conversation(place: Workplace, refused: Refused):
    text: Path = place.folder / "text.txt"
    text.write_text("abab")
    place.set(data__train=text, data__format="messages")
    refused("text.txt is a text file but data.format is messages")
    place.set(data__format="auto", objective__name="dpo")
    refused("text.txt is a text file, but")
