"""The command line of generation as a user has it: prompts, files, a terminal's lines, several ranks, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.commands import REPOSITORY, run_tool
from tests.support.generation import chat_ids, save_chat_model
from tests.support.warm_python import warm_python

PROMPTS = ("Once upon a time", "The", "Lily and Tom went to the park. They saw a big dog and")


def _stock_texts(folder: Path, prompts: tuple[str, ...], new: int, dtype: str = "float32") -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=new, do_sample=False, pad_token_id=0)[0]
        answers.append(ids[inputs["input_ids"].shape[1] :].tolist())
    return answers


@pytest.mark.distributed
def test_a_file_of_prompts_over_two_ranks(stories_dir: Path, tmp_path: Path) -> None:
    records = [{"prompt": prompt, "name": str(number)} for number, prompt in enumerate(PROMPTS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n\n" for record in records))
    result = run_tool(
        "generate", "--model", stories_dir, "--pipeline", 2, "--prompts", tmp_path / "in.jsonl", "--out",
        tmp_path / "out.jsonl", "--ids", "--batch", 2, "--max-new-tokens", 20, "--report", ranks=2,
    )  # fmt: skip
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["completion_ids"] for answer in answers] == _stock_texts(stories_dir, PROMPTS, 20)
    assert [{"prompt": answer["prompt"], "name": answer["name"]} for answer in answers] == records
    assert {answer["ending"] for answer in answers} == {"length"} and result.stdout == ""
    *_, prefill, decode, headings, first, second = result.stderr.splitlines()
    prompt_tokens = sum(answer["prompt_tokens"] for answer in answers)
    assert prefill.startswith(f"prefill: {prompt_tokens} tokens in ") and decode.startswith("decode: 57 tokens in ")
    assert "memory bandwidth" in headings and first.endswith("GB/s") and second.endswith("-")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_prompt_is_shown_as_text(stories_dir: Path, dtype: str) -> None:
    result = run_tool(
        "generate", "--model", stories_dir, "--prompt", PROMPTS[0], "--max-new-tokens", 20, "--dtype", dtype
    )
    (ids,) = _stock_texts(stories_dir, PROMPTS[:1], 20, dtype)
    tokenizer = AutoTokenizer.from_pretrained(stories_dir)
    assert PROMPTS[0] + result.stdout == tokenizer.decode([*tokenizer(PROMPTS[0])["input_ids"], *ids][1:]) + "\n"


@pytest.fixture(scope="module")
def adapter(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT adapter with drawn factors."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(stories_dir)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(folder)
    return folder


def test_an_adapter_beside_its_base(stories_dir: Path, adapter: Path, tmp_path: Path) -> None:
    """Both as two runs with one model each have them; with the adapter left on, both answers would be its own."""
    base = _stock_texts(stories_dir, PROMPTS, 12)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    given = ("generate", "--model", stories_dir, "--adapter", adapter, "--max-new-tokens", 12)
    out = ("--prompts", tmp_path / "in.jsonl", "--ids", "--out")
    run_tool(*given, *out, tmp_path / "alone.jsonl")
    run_tool(*given, *out, tmp_path / "both.jsonl", "--compare-base")
    alone, both = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("alone.jsonl", "both.jsonl")
    )
    assert [one["base_completion_ids"] for one in both] == base
    tuned = [one["completion_ids"] for one in alone]
    assert [one["completion_ids"] for one in both] == tuned and all(map(list.__ne__, tuned, base))
    shown = run_tool(*given, "--compare-base", "--prompt", PROMPTS[0]).stdout
    assert shown == f"[1 base]{_spaced(both[0]['base_completion'])}\n[1 adapter]{_spaced(both[0]['completion'])}\n"


def _spaced(text: str) -> str:
    return text if text[:1].isspace() else f" {text}"


@pytest.fixture(scope="module")
def chat_model(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a real tokenizer that has a chat template."""
    return save_chat_model(tmp_path_factory.mktemp("chat"), data_dir, 256)


def test_conversations(chat_model: Path, tmp_path: Path) -> None:
    talks = [
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who are you?"}],
    ]
    records = [{"messages": talk} for talk in talks] + [{"prompt": "Hello"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    result = run_tool(
        "generate", "--model", chat_model, "--prompts", tmp_path / "in.jsonl", "--ids", "--max-new-tokens", 8, "--chat"
    )
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    for answer, talk in zip(answers, [*talks, talks[0]], strict=True):
        prompt, expected = chat_ids(chat_model, talk, 8)
        assert (answer["prompt_tokens"], answer["completion_ids"]) == (len(prompt), expected)


def test_a_chat_template_by_name(chat_model: Path, tmp_path: Path) -> None:
    """The tokenizer's own template is not asked, and its arguments reach the other one."""
    talk = [{"role": "user", "content": "Hello"}]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    result = run_tool(
        "generate", "--model", chat_model, "--prompts", tmp_path / "in.jsonl", "--max-new-tokens", 2,
        "--chat-template", "qwen3", "--chat-arguments", '{"enable_thinking": false}',
    )  # fmt: skip
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    expected = AutoTokenizer.from_pretrained(chat_model)(text, add_special_tokens=False)["input_ids"]
    assert json.loads(result.stdout)["prompt_tokens"] == len(expected)


def _talk(folder: Path, lines: str, *options: str) -> tuple[list[str], str]:
    """Lines of stdout after lines of stdin, and what was said beside."""
    result = subprocess.run(
        [str(warm_python()), str(REPOSITORY / "tools" / "generate.py"), "--model", str(folder), *options],
        input=lines, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines(), result.stderr


def test_a_conversation_at_the_terminal(chat_model: Path) -> None:
    """Each line goes on from those before; /reset forgets them, and a line too long is refused and forgotten."""
    first, second = {"role": "user", "content": "Hello"}, {"role": "user", "content": "And you?"}
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    long = "many words " * 300
    out, said = _talk(
        chat_model, f"Hello\n{long}\nAnd you?\n\n/reset\nHello\n", "--chat", "--max-new-tokens", "6", "--ignore-eos"
    )
    answer = tokenizer.decode(chat_ids(chat_model, [first], 6)[1], skip_special_tokens=True)
    after = [first, {"role": "assistant", "content": answer}, second]
    later = tokenizer.decode(chat_ids(chat_model, after, 6)[1], skip_special_tokens=True)
    assert out == [*f"{answer}\n{later}\n{answer}".split("\n")]
    assert "but the model's context is 256: shorten the message, or /undo, /reset." in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "{stories}", "--prompt", "word " * 600], "but the model's context is 512: shorten the prompt."),
        (
            ["--model", "{stories}", "--prompt", "a", "--max-new-tokens", "600"],
            "--max-new-tokens is 600, but the model's context is 512: set --max-new-tokens to 5",
        ),
        (["--model", "{stories}", "--prompt", "a", "--chat"], "--chat needs a chat template"),
        (["--model", "{stories}", "--prompt", "a", "--tensor", "2"], "need 2 ranks, but there are 1"),
        (["--model", "{stories}", "--prompts", "{tmp}/none.jsonl"], "none.jsonl cannot be read"),
        (["--model", "{stories}", "--prompts", "{tmp}/bad.jsonl"], "give it either prompt or messages"),
        (["--model", "{tmp}", "--prompt", "a"], "has no config.json"),
        (["--model", "{stories}", "--adapter", "{tmp}/none", "--prompt", "a"], "is not a folder"),
        (["--adapter", "{tmp}", "--step", "3", "--prompt", "a"], "has no complete checkpoint"),
        (["--prompt", "a"], "there is no --model"),
        (["--model", "{stories}", "--prompt", "a", "--top-k", "5"], "--temperature is 0"),
        (["--model", "{stories}", "--prompt", "a", "--batch", "0"], "--batch is 0, but at least 1"),
        (["--model", "{stories}", "--prompt", "a", "--out", "x"], "--out is for the answers to a file"),
        (["--model", "{stories}", "--prompt", "a", "--stop", ""], "--stop is an empty text"),
        (["--model", "{stories}", "--prompt", "a", "--compare-base"], "give the adapter with --adapter"),
        (["--model", "{stories}", "--adapter", "{tmp}", "--compare-base"], "give them with --prompt or --prompts"),
    ],
)
def test_refusals(options: list[str], words: str, stories_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "a"}\n')
    given = [option.format(stories=stories_dir, tmp=tmp_path) for option in options]
    result = run_tool("generate", *given, status=2)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ") and words in last
    assert "Traceback" not in result.stderr
