"""Chat templates by name, what is learnt of any conversation, and how a sample is shown.

Expected renderings are those of the formats' authors, written out; those of templates that TRL keeps are compared with
the originals.
"""

from __future__ import annotations

import json
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AddedToken, PreTrainedTokenizerFast

from engine.config.data import DataOptions
from engine.config.model import ModelOptions
from engine.config.run import RunConfig
from engine.data.named_templates import TEMPLATES
from engine.data.opened_tokenizer import HuggingFaceTokenizer
from engine.data.preview import first_documents, preview
from engine.data.text_reader import build_texts
from engine.data.tokenizer import ChatOptions, load_tokenizer
from engine.errors import UserError
from engine.telemetry.log import Log
from engine.training.data_sets import show_samples
from tests.support.commands import run_tool
from tests.support.shared_data import shared

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Ok"},
]
RENDERED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "⟦Yo<|im_end|>\n⟧<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦Ok<|im_end|>\n⟧",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]⟦ Yo </s>⟧<s>[INST] Bye [/INST]⟦ Ok </s>⟧",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦Yo<|eot_id|>⟧"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "⟦Ok<|eot_id|>⟧",
    "mistral": "<s>[INST] Be brief.\n\nHi [/INST]⟦ Yo</s>⟧[INST] Bye [/INST]⟦ Ok</s>⟧",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n⟦Yo<end_of_turn>\n⟧"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n⟦Ok<end_of_turn>\n⟧",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n⟦Yo<|end|>\n⟧<|user|>\nBye<|end|>\n"
    "<|assistant|>\n⟦Ok<|end|>\n</s>⟧",
    "qwen2.5": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "⟦Yo<|im_end|>\n⟧<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦Ok<|im_end|>\n⟧",
    "qwen3": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "⟦<think>\n\n</think>\n\nYo<|im_end|>\n⟧<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    "⟦<think>\n\n</think>\n\nOk<|im_end|>\n⟧",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n⟦Yo</s>\n⟧<|user|>\nBye</s>\n"
    "<|assistant|>\n⟦Ok</s>\n⟧",
    "vicuna": "<s>Be brief. USER: Hi ASSISTANT:⟦ Yo</s>⟧USER: Bye ASSISTANT:⟦ Ok</s>⟧",
    "alpaca": "<s>Be brief.\n\n### Instruction:\nHi\n\n### Response:\n⟦Yo</s>\n\n⟧### Instruction:\nBye\n\n"
    "### Response:\n⟦Ok</s>\n\n⟧",
}


@cache
def characters() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes and the control tokens of all formats, so that no token joins two texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    names = ["im_start", "im_end", "start_header_id", "end_header_id", "eot_id", "end", "user", "assistant", "system"]
    control = [f"<|{name}|>" for name in names] + ["<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]
    tokenizer.add_tokens([AddedToken(token, special=True) for token in control])
    return tokenizer


def named(name: str, **options: Any) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(characters(), Path("x"), ChatOptions(template=name, **options))


def shown(tokenizer: HuggingFaceTokenizer, chat: list[dict[str, Any]]) -> str:
    """A conversation with what is learnt in brackets."""
    return preview(*tokenizer.apply_chat(chat), tokenizer, colour=False).replace("↵\n", "\n")


@pytest.mark.parametrize("name", TEMPLATES)
def test_named_templates(name: str) -> None:
    assert shown(named(name), CHAT) == RENDERED[name]


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_where_answers_begin(name: str) -> None:
    """What a model is given when it generates is what stands before an answer that it learnt."""
    tokenizer = named(name)
    prompt = tokenizer.show(tokenizer.chat_prompt(CHAT[:2]))
    assert RENDERED[name].startswith(prompt + "⟦")


@pytest.mark.parametrize("name", ["llama2", "mistral", "zephyr", "vicuna", "alpaca"])
def test_templates_that_end_with_the_end_token_need_one(name: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters().backend_tokenizer)
    with pytest.raises(UserError, match="the tokenizer has none"):
        HuggingFaceTokenizer(tokenizer, Path("x"), ChatOptions(template=name)).apply_chat(CHAT)


STOCK = {"llama3": "llama3", "gemma": "gemma3", "phi3": "phi3", "qwen2.5": "qwen2_5", "qwen3": "qwen3"}
TALKS = [
    CHAT,
    CHAT[1:],
    [{"role": "user", "content": " a\n"}, {"role": "assistant", "content": "b <think>\nhm\n</think>\n\nc"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "reasoning_content": "hm", "content": "b"}],
]


@pytest.mark.parametrize("name", STOCK)
def test_named_templates_write_what_the_stock_ones_do(name: str) -> None:
    trl = pytest.importorskip("trl")
    folder = Path(trl.__file__).parent / "chat_templates"
    ours, theirs = named(name), named(str(folder / f"{STOCK[name]}.jinja"))
    for talk in TALKS:
        assert ours.apply_chat(talk, learn="all") == theirs.apply_chat(talk, learn="all")
        assert ours.chat_prompt(talk[:-1]) == theirs.chat_prompt(talk[:-1])


def test_tool_calls_in_qwens_formats() -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    talk = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon."},
    ]
    assert shown(named("qwen2.5"), [{"role": "system", "content": "s"}, *talk]).endswith(
        '<|im_start|>assistant\n⟦<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>\n⟧'
        "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦Noon.<|im_end|>\n⟧"
    )


# templates without marks and without a training form: what is learnt is found by comparison
UNKNOWN = {
    "last turn otherwise": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ '<think>\n\n</think>\n\n' if loop.last and m.role == 'assistant' }}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}",
    "system prompt of its own": "{{ '<|im_start|>system\nYou are X.<|im_end|>\n' if messages[0].role != 'system' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}",
    "end of the text": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}",
    "trimmed": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' if add_generation_prompt }}",
}
ENDINGS = ("<|im_end|>\n", "<|end|>\n", "<|end|>\n</s>", "<|eot_id|>")
contents = st.text(alphabet="ab \n漢<|>", max_size=6)
turns = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), contents), min_size=1, max_size=6)


@pytest.mark.parametrize("name", UNKNOWN)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=turns)
def test_nothing_but_answers_and_their_endings_is_learnt(
    name: str, turns: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Whatever the order of roles, each answer in its turn, and no character of anybody else."""
    file = tmp_path / "template.jinja"
    file.write_text(UNKNOWN[name], encoding="utf-8")
    tokenizer = named(str(file))
    chat = [{"role": role, "content": text} for role, text in turns]
    answers = [text for role, text in turns if role == "assistant"]
    ids, mask = tokenizer.apply_chat(chat)
    assert ids == tokenizer.apply_chat(chat, learn="all")[0]
    pieces, piece = [], []
    for token, flag in [*zip(ids, mask, strict=True), (0, False)]:
        if flag:
            piece.append(token)
        elif piece:
            pieces.append(tokenizer.show(piece))
            piece = []
    found = [text.removeprefix("<think>\n\n</think>\n\n") for text in pieces]
    expected = [text.strip() if name == "trimmed" else text for text in answers]
    assert len(found) == len(expected)
    for text, answer in zip(found, expected, strict=True):
        assert text.startswith(answer) and text[len(answer) :] in ENDINGS, (text, answer)


def test_an_answer_that_is_left_out_is_refused(tmp_path: Path) -> None:
    for source in (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:1] }}{% endfor %}",
        "{% for m in messages %}{{ m.content + m.content }}{% endfor %}",
    ):
        (tmp_path / "t.jinja").write_text(source)
        with pytest.raises(UserError, match="generation"):
            named(str(tmp_path / "t.jinja")).apply_chat(CHAT)


def test_marks_that_mark_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}"
    )
    with pytest.raises(UserError, match="marks nothing"):
        named(str(tmp_path / "t.jinja")).apply_chat(CHAT)


def test_what_stands_behind_the_end_token_is_an_option() -> None:
    assert DataOptions().learn_after_end
    stopped = named("chatml", learn_after_end=False)
    assert shown(stopped, CHAT) == RENDERED["chatml"].replace("<|im_end|>\n⟧", "<|im_end|>⟧\n")
    ids, mask = stopped.apply_chat(CHAT, learn="last")
    assert stopped.show([token for token, flag in zip(ids, mask, strict=True) if flag]) == "Ok<|im_end|>"


def test_arguments_reach_the_template() -> None:
    prompt = named("qwen3", arguments={"enable_thinking": False}).chat_prompt(CHAT[:2])
    assert named("qwen3").show(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_template_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file and no name of a template: give a file, or one of chatml, llama2"):
        named("chatmll")
    with pytest.raises(UserError, match="no file"):
        named(str(tmp_path))
    (tmp_path / "empty.jinja").write_text(" \n")
    with pytest.raises(UserError, match="is empty"):
        named(str(tmp_path / "empty.jinja"))
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8"):
        named(str(tmp_path / "binary.jinja"))
    with pytest.raises(UserError, match="sentencepiece model, which cannot encode the control tokens"):
        load_tokenizer(shared("tokenizers/tok512/tok512.model"), ChatOptions(template="chatml"))


def test_an_end_that_is_no_token_is_told() -> None:
    folder = shared("tokenizers/llama2_32000")
    (warning,) = load_tokenizer(folder, ChatOptions(template="chatml")).chat_warnings()
    assert "chatml ends an answer with '<|im_end|>', in which this tokenizer has no control token" in warning
    assert load_tokenizer(folder, ChatOptions(template="llama2")).chat_warnings() == []
    assert load_tokenizer(shared("tokenizers/minimind"), ChatOptions(template="chatml")).chat_warnings() == []


SPOKEN = (
    "{% for m in messages %}{{ m['role'].upper() }}: {% if m['role'] == 'assistant' %}BEGIN{{ m['content'] }} END"
    "{% else %}{{ m['content'] }} {% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""LLaVA 1.5's has this form: nothing but a space behind an answer."""


@pytest.mark.parametrize("begin", ["", "{% generation %}"])
def test_an_own_template_that_teaches_no_end_is_told(begin: str, tmp_path: Path) -> None:
    """To those who train: the model itself has been taught one. What is behind a block is not trained on."""
    end = begin.replace("generation", "endgeneration")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(shared("tokenizers/minimind"))
    warnings = {}
    for behind in ("", "{{ eos_token }}"):
        for name, last in (("inside", behind + end), ("outside", end + behind)):
            tokenizer.chat_template = SPOKEN.replace("BEGIN", begin).replace("END", last)
            tokenizer.save_pretrained(tmp_path)
            opened = load_tokenizer(tmp_path)
            assert opened.chat_warnings() == []
            warnings[bool(behind), name] = opened.chat_warnings(training=True)
    words = f"chat template of {tmp_path} ends an answer with '', in which this tokenizer has no control token, so "
    assert words in warnings[False, "inside"][0] and tokenizer.eos_token in warnings[False, "inside"][0]
    assert warnings[True, "inside"] == []
    assert bool(warnings[True, "outside"]) == bool(begin)


def test_samples_are_shown(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "首都？\x1b[31m"}, {"role": "assistant", "content": "巴黎。\nOui"}]
    records = [{"messages": talk}, {"messages": talk[:1] + [{"role": "assistant", "content": "x" * 9000}]}, {"bad": 1}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    tokenizer = named("chatml")
    first, second = first_documents([file], 2, tokenizer, data_format="auto", mask_prompt=True)
    plain = preview(first.tokens, first.targets, tokenizer, colour=False)
    head = "<|im_start|>user↵\n首都？\\x1b[31m<|im_end|>↵\n<|im_start|>assistant↵\n"
    assert plain == head + "⟦巴黎。↵\nOui<|im_end|>↵\n⟧"
    coloured = preview(first.tokens, first.targets, tokenizer, colour=True)
    assert coloured == f"\x1b[2m{head}\x1b[0m\x1b[1;32m巴黎。↵\nOui<|im_end|>↵\n\x1b[0m"
    assert preview(second.tokens, second.targets, tokenizer, colour=False).endswith(
        f"x⟧ ... {len(second.tokens) - 2000:,} more tokens"
    )


def test_a_run_shows_its_first_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f"{json.dumps({'messages': CHAT})}\n" * 3, encoding="utf-8")
    tokenizer = named("chatml")
    dataset = build_texts(file, tokenizer=tokenizer, seq_length=256)
    config = RunConfig(data=DataOptions(show=2), model=ModelOptions(path="x"))
    said = StringIO()
    show_samples(config, dataset, tokenizer, Log(0, said))
    text = said.getvalue().replace("↵\n", "\n")
    assert text.count(RENDERED["chatml"]) == 2 and "sample of row 2: " in text and "sample of row 3" not in text


def test_preprocess_shows_and_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": CHAT}) + "\n", encoding="utf-8")
    result = run_tool(
        "preprocess", "--tokenizer", shared("tokenizers/minimind"), "--chat-template", "chatml", "--show", 3, file
    )
    assert "line 1: " in result.stdout and "⟦Yo<|im_end|>↵\n⟧" in result.stdout
    assert list(tmp_path.iterdir()) == [file]
