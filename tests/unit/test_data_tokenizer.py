"""Tokenizers against the libraries that define them, and the assistant mask against transformers' own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from transformers import AutoTokenizer

from engine.data.tokenizer import ChatOptions, load_tokenizer
from engine.errors import UserError
from tests.support.shared_data import shared

FOLDERS = ["tokenizers/llama2_32000", "tokenizers/minimind", "tokenizers/torchtitan_test", "weights/stories260K/hf"]
MODELS = [
    "tokenizers/llama2_32000/tokenizer.model",
    "tokenizers/tok512/tok512.model",
    "tokenizers/mistral/mistral_instruct_tokenizer_240323.model.v3",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello, how can I help?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Capital of France?\n"},
        {"role": "assistant", "content": "Paris é 漢字 🙂"},
        {"role": "user", "content": "And of Italy?"},
        {"role": "assistant", "content": "Rome.\n\n"},
    ],
    [
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "<|im_end|> inside"},
    ],
]
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# What reasoning models do: only the last turn shows its (here empty) reasoning, so longer conversations change it.
UNSTABLE = PLAIN.replace("{% generation %}", "{% generation %}{% if loop.last %}{{ '<think></think>' }}{% endif %}")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    records = json.loads(shared("instruct/alpaca_en_demo.json").read_text(encoding="utf-8"))
    odd = [
        "",
        " ",
        "\n",
        "  two  spaces ",
        "é漢字🙂\u2028x",
        "<s> </s> <|im_end|>",
        "1234567890",
        "tabs\t\tand\r\nlines",
    ]
    return odd + [record["output"] for record in records]


def with_template(folder: Path, template: str, source: str = "tokenizers/minimind") -> Path:
    """A copy of a tokenizer whose chat template is another."""
    shutil.copy(shared(source) / "tokenizer.json", folder)
    config = json.loads((shared(source) / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_encodes_like_transformers(name: str, texts: list[str]) -> None:
    ours = load_tokenizer(shared(name))
    reference = AutoTokenizer.from_pretrained(shared(name), local_files_only=True)
    expected = reference(texts, add_special_tokens=False).input_ids
    assert ours.encode_many(texts) == expected
    assert [ours.encode(text) for text in texts[:40]] == expected[:40]
    assert ours.vocab_size == len(reference)


@pytest.mark.parametrize("name", FOLDERS)
def test_special_tokens_are_those_of_transformers(name: str) -> None:
    ours = load_tokenizer(shared(name))
    reference = AutoTokenizer.from_pretrained(shared(name), local_files_only=True)
    assert (ours.bos_id, ours.eos_id) == (reference.bos_token_id, reference.eos_token_id)
    text = "Once upon a time"
    assert ours.encode(text, bos=ours.adds_bos) == reference(text).input_ids
    assert ours.encode(text, eos=True) == reference(text, add_special_tokens=False).input_ids + [reference.eos_token_id]
    assert ours.decode(ours.encode(text, bos=True, eos=True)) == reference.decode(
        reference(text).input_ids, skip_special_tokens=True
    )


@pytest.mark.parametrize("name", MODELS)
def test_model_file_encodes_like_sentencepiece(name: str, texts: list[str]) -> None:
    ours = load_tokenizer(shared(name))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(shared(name)))
    expected = [reference.encode(text) for text in texts]
    assert ours.encode_many(texts) == expected
    assert ours.encode(texts[-1], bos=True, eos=True) == [reference.bos_id(), *expected[-1], reference.eos_id()]
    assert ours.decode(expected[-1]) == reference.decode(expected[-1])
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (
        reference.vocab_size(),
        reference.bos_id(),
        reference.eos_id(),
    )
    assert ours.adds_bos and not ours.has_chat_template


def test_folder_with_only_a_model_file_is_opened_by_sentencepiece(tmp_path: Path, texts: list[str]) -> None:
    shutil.copy(shared(MODELS[0]), tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": false}')
    ours = load_tokenizer(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(shared(MODELS[0])))
    assert [ours.encode(text) for text in texts] == [reference.encode(text) for text in texts]
    assert not ours.adds_bos


def test_gpt2_files_as_tokenizer_json(tmp_path: Path, texts: list[str]) -> None:
    folder = shared("tokenizers/gpt2")
    reference = tokenizers.ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    reference.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    assert ours.encode_many(texts) == [reference.encode(text).ids for text in texts]
    assert ours.bos_id is None and not ours.adds_bos
    assert ours.encode("x", bos=True, eos=True) == ours.encode("x")
    with pytest.raises(UserError, match="neither tokenizer.json nor tokenizer.model"):
        load_tokenizer(folder)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", ["tokenizers/minimind", "tokenizers/torchtitan_test"])
def test_chat_ids_are_those_of_transformers(name: str, chat: list[dict[str, Any]]) -> None:
    ids, mask = load_tokenizer(shared(name)).apply_chat(chat)
    reference = AutoTokenizer.from_pretrained(shared(name), local_files_only=True)
    assert ids == reference.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert len(mask) == len(ids)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", [PLAIN, UNSTABLE], ids=["prefix-stable", "unstable"])
def test_assistant_mask_is_what_generation_blocks_say(
    tmp_path: Path, template: str, chat: list[dict[str, Any]]
) -> None:
    ids, mask = load_tokenizer(with_template(tmp_path, template)).apply_chat(chat)
    reference = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    expected: Any = reference.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert ids == expected["input_ids"]
    assert mask == [bool(flag) for flag in expected["assistant_masks"]]
    assert any(mask)


def test_assistant_mask_without_generation_blocks_is_the_same(tmp_path: Path) -> None:
    marked, bare = tmp_path / "marked", tmp_path / "bare"
    marked.mkdir()
    bare.mkdir()
    unmarked = PLAIN.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with_template(marked, PLAIN)
    expected: Any = AutoTokenizer.from_pretrained(marked, local_files_only=True).apply_chat_template(
        CHATS[1], return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = load_tokenizer(with_template(bare, unmarked), ChatOptions(learn_after_end=False)).apply_chat(CHATS[1])
    assert (ids, mask) == (expected["input_ids"], [bool(flag) for flag in expected["assistant_masks"]])


def test_turn_with_reasoning_is_learnt_from_where_it_leaves_the_prompt() -> None:
    """minimind's prompt closes an empty reasoning block; a turn that has reasoning parts from it inside the block."""
    tokenizer = load_tokenizer(shared("tokenizers/minimind"))
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}]
    ids, mask = tokenizer.apply_chat(chat)
    reference = AutoTokenizer.from_pretrained(shared("tokenizers/minimind"), local_files_only=True)
    learnt = reference.decode([token for token, flag in zip(ids, mask, strict=True) if flag])
    assert learnt == "hm\n</think>\n\nHello<|im_end|>\n"


@pytest.mark.parametrize("chat", CHATS)
def test_template_that_rewrites_history_needs_no_marks(tmp_path: Path, chat: list[dict[str, Any]]) -> None:
    (tmp_path / "bare").mkdir()
    bare = UNSTABLE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    options = ChatOptions(learn_after_end=False)
    found = load_tokenizer(with_template(tmp_path / "bare", bare), options).apply_chat(chat)
    assert found == load_tokenizer(with_template(tmp_path, UNSTABLE)).apply_chat(chat)


def test_template_that_refuses_messages_says_why(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ raise_exception('roles must alternate') }}{% endfor %}"
    with pytest.raises(UserError, match="roles must alternate"):
        load_tokenizer(with_template(tmp_path, template)).apply_chat(CHATS[0])


@pytest.mark.parametrize("name", [MODELS[1], "tokenizers/llama2_32000"])
def test_no_chat_template_says_which_formats_work(name: str) -> None:
    tokenizer = load_tokenizer(shared(name))
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="no chat template.*text, completion or alpaca"):
        tokenizer.apply_chat(CHATS[0])


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "missing.model")
    (tmp_path / "broken.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match="not a sentencepiece model"):
        load_tokenizer(tmp_path / "broken.model")
    (tmp_path / "tokenizer.json").write_text("{ not json")
    with pytest.raises(UserError, match="not valid JSON"):
        load_tokenizer(tmp_path)


def test_class_named_in_the_config_cannot_change_the_tokens(tmp_path: Path, texts: list[str]) -> None:
    shutil.copy(shared("tokenizers/torchtitan_test") / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    ours = load_tokenizer(tmp_path)
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert ours.encode_many(texts) == [reference.encode(text, add_special_tokens=False).ids for text in texts]
