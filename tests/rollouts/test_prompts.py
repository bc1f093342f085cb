"""Prompts that the model answers itself: their tokens, what is kept for rewards, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.data.tokenizer import load_tokenizer
from engine.errors import UserError
from engine.rollouts.data.prompts import PromptLoader, PromptSet, read_prompts


def written(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read(path: Path, tokenizer: Path, room: int = 500, **more: Any) -> PromptSet:
    return read_prompts(path, tokenizer=load_tokenizer(tokenizer), room=room, **more)


def test_texts_and_conversations_are_tokenised_as_by_transformers(tmp_path: Path, data_dir: Path) -> None:
    from transformers import AutoTokenizer

    folder = data_dir / "tokenizers" / "minimind"
    stock = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+3?"}]
    path = written(
        tmp_path / "p.jsonl",
        {"prompt": "2+3=", "answer": "5"},
        {"prompt": turns, "answer": "5", "level": 2},
        {"messages": turns[1:], "answer": "6"},
    )
    found = read(path, folder)
    assert found.columns == ("answer", "level")
    assert [one.columns for one in found.prompts] == [
        {"answer": "5", "level": None}, {"answer": "5", "level": 2}, {"answer": "6", "level": None},
    ]  # fmt: skip
    expected = [
        stock("2+3=")["input_ids"],
        *(stock.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in (turns, turns[1:])),
    ]
    assert [list(one.ids) for one in found.prompts] == expected
    assert [one.completion("5") for one in found.prompts[:2]] == ["5", [{"role": "assistant", "content": "5"}]]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "a"}, "the record has the fields text, expected prompt or messages"),
        ({"prompt": ""}, "has no tokens"),
        ({"prompt": 3}, "field 'prompt' is a number, expected a list of turns"),
        ({"prompt": "a", "completions": "b"}, "field 'completions' has the name of an argument of reward functions"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
         "ends with a turn of the assistant"),
        ({"prompt": "a", "image": "x.png"}, "field 'image' names an image"),
    ],
)  # fmt: skip
def test_records_that_are_refused(record: dict[str, Any], words: str, tmp_path: Path, data_dir: Path) -> None:
    path = written(tmp_path / "p.jsonl", {"prompt": "fine"}, record)
    with pytest.raises(UserError) as error:
        read(path, data_dir / "tokenizers" / "minimind")
    assert words in str(error.value) and "p.jsonl line 2" in str(error.value)


def test_long_prompts(tmp_path: Path, data_dir: Path) -> None:
    folder = data_dir / "tokenizers" / "minimind"
    path = written(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "word " * 50})
    found = read(path, folder, room=10)
    assert (len(found.prompts), found.num_too_long) == (1, 1)
    assert "1 prompt of more than 10 tokens left out" in found.summary(10)
    with pytest.raises(UserError, match="line 2: the prompt has .* tokens, and data.seq_length less"):
        read(path, folder, room=10, overlong="error")
    with pytest.raises(UserError, match="has nothing to answer, all 2 prompts have more than 0 tokens"):
        read(path, folder, room=0)


def test_order_of_prompts(tmp_path: Path, data_dir: Path) -> None:
    """Five prompts, two a step, three steps at a time: an epoch is 2.5 steps of 8 completions each taken twice."""
    path = written(tmp_path / "p.jsonl", *({"prompt": f"{number}"} for number in range(5)))
    prompts = read(path, data_dir / "tokenizers" / "minimind")
    loader = PromptLoader(
        prompts, num_generations=4, num_iterations=2, steps_per_generation=3, global_batch_size=8,
        num_micro_batches=1, seed=1,
    )  # fmt: skip
    assert (loader.prompts_per_step, loader.prompt_order.batch, loader.order.steps_left(0, 1)) == (2, 6, 5)
    seen = [*loader.prompt_order.rows(0).tolist(), *loader.prompt_order.rows(6).tolist()[:4]]
    assert sorted(seen[:5]) == sorted(seen[5:10]) == list(range(5))
    again = PromptSet(prompts=prompts.prompts[:4], columns=(), num_too_long=0, longest=1)
    assert again.fingerprint() != prompts.fingerprint()
