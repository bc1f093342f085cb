"""Tokenizer files that hang, fill the memory, crash or name code: each ends in a sentence, soon, and runs nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.data import tokenizer_calls, tokenizer_worker
from engine.data.tokenizer import load_tokenizer
from engine.data.tokenizer_calls import CallLimits
from engine.errors import UserError
from engine.foreign.limited_process import Messages
from tests.support.shared_data import shared
from tests.support.sweeps import sampled
from tests.support.warm_python import warm_python

pytestmark = pytest.mark.cold_workers

Change = Callable[[dict[str, Any]], object]
TEXT = "a" * 60 + "! The quick brown fox."
REPLACES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaaaaaaaa"}


def normalized(*normalizers: dict[str, Any]) -> Change:
    return lambda content: content.update(normalizer={"type": "Sequence", "normalizers": list(normalizers)})


def split(pattern: str, **options: Any) -> Change:
    first = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **options}
    second = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return lambda content: content.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [first, second]})


def decoded(*decoders: dict[str, Any]) -> Change:
    return lambda content: content.update(decoder={"type": "Sequence", "decoders": list(decoders)})


def added(*tokens: dict[str, Any]) -> Change:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return lambda content: content["added_tokens"].extend({**plain, **token} for token in tokens)


LIMIT = "did not finish a text within|asks for more than|ended its process|retry-limit-in-match over"
OPENED = "is not one that transformers can open"
FILES: dict[str, tuple[Change, str]] = {
    "multiplying normalizers": (normalized(*[REPLACES] * 12), LIMIT),
    "a normalizer with a large text": (normalized({**REPLACES, "content": "a" * 2**20}, *[REPLACES] * 3), LIMIT),
    "normalizers in front": (normalized(*[{"type": "Prepend", "prepend": "a" * 2**20}] * 40, *[REPLACES] * 2), LIMIT),
    "a normalizer's pattern": (normalized({**REPLACES, "pattern": {"Regex": "(a|aa|a?a)+$"}}), LIMIT),
    "a pattern that backtracks": (split("(a+)+$|(a|aa)+$"), LIMIT),
    "nested repetitions": (split("((a*)*)*b"), LIMIT),
    "a large repetition": (split("((a{1,1000}){1,1000}){1,1000}b"), f"{LIMIT}|{OPENED}"),
    "a pattern without syntax": (split("(((("), OPENED),
    "a pattern that nests": (split("(" * 30000 + "a" + ")" * 30000), f"{OPENED}|ended its process"),
    "multiplying decoders": (decoded(*[REPLACES] * 12), LIMIT),
    "an id beyond 32 bits": (added({"id": 2**32, "content": "<x>"}), OPENED),
    "an id beyond 31 bits": (added({"id": 2**32 - 2, "content": "<x>"}), ""),
    "a negative id": (added({"id": -1, "content": "<x>"}), OPENED),
    "the id of another": (added({"id": 1, "content": "<x>"}), ""),
    "a number for a text": (added({"id": 9999, "content": 7}), OPENED),
    "vocabulary with large ids": (
        lambda content: content["model"]["vocab"].update(x=2**31),
        "beyond|ended its process",
    ),
    "vocabulary with texts": (lambda content: content["model"]["vocab"].update(x="y"), OPENED),
    "vocabulary as a list": (lambda content: content["model"].update(vocab=[["a", 0.0]]), OPENED),
    "no kind of model": (lambda content: content["model"].update(type="Python"), OPENED),
    "merges of what is not there": (lambda content: content["model"].update(merges=["q§ §q"]), OPENED),
    "many added tokens": (added(*({"id": 9000 + n, "content": f"<{n}>"} for n in range(20000))), ""),
}
"""What is changed in tokenizer.json -> what the sentence says; nothing where it works."""
SETTINGS: dict[str, tuple[str, str]] = {
    "nested": ('{"a": ' + "[" * 200000 + "]" * 200000 + "}", "nests too deeply"),
    "special tokens as lists": ('{"eos_token": ["</s>"]}', OPENED),
    "special tokens as mappings": ('{"eos_token": {"x": 1}}', OPENED),
    "special tokens as numbers": ('{"eos_token": 7}', OPENED),
    "a mapping of added tokens": ('{"added_tokens_decoder": {"x": 1}}', OPENED),
    "added tokens without content": ('{"added_tokens_decoder": {"1": {}}}', ""),
    "a far id": ('{"added_tokens_decoder": {"99999999999": {"content": "<x>"}}}', ""),
    "code": (
        '{"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil", '
        '"trust_remote_code": true, "custom_pipelines": {"x": {"impl": "evil.Evil"}}}',
        "",
    ),
    "a template as a number": ('{"chat_template": 7}', "expected text"),
    "a template as a mapping": ('{"chat_template": {"a": 1}}', "expected text"),
    "a default template as a number": ('{"chat_template": [{"name": "default", "template": 7}]}', "expected text"),
    "a default template that is null": ('{"chat_template": [{"name": "default", "template": null}]}', "expected text"),
    "a length as a text": ('{"model_max_length": "x"}', OPENED),
    "a large length": ('{"model_max_length": 1e400, "truncation_side": "no"}', OPENED),
}
"""The text of tokenizer_config.json -> what the sentence says."""
QUICK = (
    "multiplying normalizers", "a pattern that backtracks", "multiplying decoders",
    "vocabulary with large ids", "no kind of model",
)  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits, and processes that start at once."""
    limits = CallLimits(open_seconds=30.0, open_bytes=2**29, text_seconds=0.5, text_bytes=2**28)
    monkeypatch.setattr(tokenizer_calls, "LIMITS", limits)
    monkeypatch.setattr(sys, "executable", str(warm_python()))


def used(folder: Path) -> None:
    """Opens, encodes and decodes."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_id is None or tokenizer.bos_id < tokenizer.vocab_size
    ids = tokenizer.encode(TEXT)
    assert max(ids, default=0) < tokenizer.vocab_size
    tokenizer.encode_many([TEXT, "b"])
    tokenizer.decode(ids)
    tokenizer.show(ids)


def check(folder: Path, words: str) -> None:
    started = time.process_time()
    if words:
        with pytest.raises(UserError, match=words) as caught:
            used(folder)
        message = str(caught.value)
        assert len(message) < 900 and "\n" not in message and "Traceback" not in message, message
    else:
        used(folder)
    assert time.process_time() - started < 3


@pytest.mark.parametrize("name", sampled(FILES, QUICK))
def test_hostile_tokenizer_files(name: str, tmp_path: Path) -> None:
    change, words = FILES[name]
    content = json.loads((shared("tokenizers/torchtitan_test") / "tokenizer.json").read_text(encoding="utf-8"))
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    check(tmp_path, words)


@pytest.mark.parametrize(
    "name", sampled(SETTINGS, ("nested", "special tokens as lists", "a default template as a number", "code"))
)
def test_hostile_settings(name: str, tmp_path: Path) -> None:
    text, words = SETTINGS[name]
    shutil.copy(shared("tokenizers/torchtitan_test") / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for module in ("json", "jinja2", "transformers", "tokenizers"):
        shutil.copy(tmp_path / "evil.py", tmp_path / f"{module}.py")
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        check(tmp_path, words)
    finally:
        os.chdir(before)
    assert not (tmp_path / "ran").exists()


def test_the_answer_counts_as_memory(tmp_path: Path) -> None:
    """Text with control characters is six times as long in JSON."""
    content = json.loads((shared("tokenizers/torchtitan_test") / "tokenizer.json").read_text(encoding="utf-8"))
    decoded({"type": "Replace", "pattern": {"Regex": "^"}, "content": "\x01" * 2**20})(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("b")
    with pytest.raises(UserError, match="asks for more than"):
        tokenizer.decode(ids * 48)
    assert len(tokenizer.decode(ids)) == 2**20 + 1


def test_an_answer_that_is_too_long_for_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_worker, "MOST_BYTES", 9)
    own, other = socket.socketpair()
    with own, other:
        worker = tokenizer_worker._Worker(Messages(other))
        worker._tokenizer = SimpleNamespace(decode=lambda ids: "x" * 99)
        Messages(own).send(tokenizer_calls.CALL, b'["decode", [[1]], {}]')
        worker.answer()
        kind, data = Messages(own).receive(1.0)
    assert kind == tokenizer_calls.REFUSAL and b"of one text" in data


@pytest.mark.parametrize("data", [b"", b"\n\xff\xff\xff\xff\x0f", b"\x12" * 4096, bytes(range(256)) * 64], ids=range(4))
def test_broken_sentencepiece_models(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    check(tmp_path, "is not a sentencepiece model")


@pytest.mark.slow
def test_damaged_sentencepiece_models(tmp_path: Path) -> None:
    """Bytes of a real one changed: it opens and encodes, or is refused."""
    model = bytearray((shared("tokenizers/tok512") / "tok512.model").read_bytes())
    draw = random.Random(0)
    for _ in range(60):
        damaged = bytearray(model)
        for _ in range(draw.choice([1, 8, 64])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        try:
            used(tmp_path)
        except UserError as refusal:
            assert "\n" not in str(refusal)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "added_tokens.json"],
)
def test_pipes_in_place_of_files(name: str, tmp_path: Path) -> None:
    if name != "tokenizer.json":
        shutil.copy(shared("tokenizers/torchtitan_test") / "tokenizer.json", tmp_path)
    os.mkfifo(tmp_path / name)
    check(tmp_path, "has neither" if name == "tokenizer.json" else "")


def test_a_large_chat_template_file(tmp_path: Path) -> None:
    shutil.copy(shared("tokenizers/torchtitan_test") / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{# x #}" * 1000000)
    check(tmp_path, "has 7,000,000 characters, more than 4,194,304")
