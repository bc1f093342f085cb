"""Recipes of tinker-cookbook, as they are, with a tiny model and data.

They run by a Python of their own, which RANKFOLD_TINKER_CLIENT names.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.asgi import KEY
from tests.serving.running import RunningServer

CLIENT = os.environ.get("RANKFOLD_TINKER_CLIENT")
NAME = "Qwen/Qwen3-8B-Base"
"""A name that the cookbook knows; the folder of the name in the working directory is a tiny model."""
MARKS = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CLIENT is None, reason="RANKFOLD_TINKER_CLIENT names no Python with tinker and its cookbook"),
]
"""Marks of tests that run recipes."""


def make_work(work: Path) -> None:
    """Writes a tiny model, and data sets of sums under the names of those that recipes read.

    Args:
        work: the working directory.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = work / NAME
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(letters)}, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    marks = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=264, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=8192, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    sums = [(3 * number % 50, 7 * number % 50) for number in range(32)]
    chats = [
        {"messages": [{"role": "user", "content": f"{a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]}
        for a, b in sums
    ]
    _write(work / "HuggingFaceH4/no_robots/train.jsonl", chats)
    _write(work / "HuggingFaceH4/no_robots/test.jsonl", chats[:4])
    graded = [{"question": f"{a} + {b}?", "answer": f"#### {a + b}"} for a, b in sums]
    _write_splits(work / "openai/gsm8k", "main", {"train": graded, "test": graded[:8]})
    pairs = [
        {"chosen": _dialogue(f"{a} + {b}?", str(a + b)), "rejected": _dialogue(f"{a} + {b}?", str(a - b))}
        for a, b in sums
    ]
    _write(work / "Anthropic/hh-rlhf/train.jsonl", pairs)
    _write(work / "Anthropic/hh-rlhf/test.jsonl", pairs[:4])
    _write(work / "zwhe99/DeepMath-103K/train.jsonl", [{"question": f"{a} + {b}?"} for a, b in sums])
    words = ["the", "river", "of", "a", "city", "in", "war", "had", "many", "seasons", "and", "teams", "known", "most"]
    rows = [[words[(3 * row + 5 * place) % len(words)] for place in range(80)] for row in range(1500)]
    texts = [{"text": " ".join(row)} for row in rows]
    _write_splits(work / "Salesforce/wikitext", "wikitext-103-raw-v1", {"train": texts})
    _write(work / "conversations.jsonl", chats)
    questions = [
        {
            "domain": "Chemistry", "details": {"level": "L3"}, "type": "mcq-4-choices", "question": f"{a} + {b}?",
            "choices": {"label": ["A", "B"], "text": [str(a + b), str(a - b)]}, "answerKey": "A",
        }
        for a, b in sums
    ]  # fmt: skip
    _write(work / "hicai-zju/SciKnowEval/test.jsonl", questions)


def _dialogue(question: str, answer: str) -> str:
    return f"\n\nHuman: {question}\n\nAssistant: {answer}"


def _write_splits(folder: Path, config: str, splits: dict[str, list[dict[str, Any]]]) -> None:
    """Writes a data set with a configuration of a name."""
    header = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
    for split, records in splits.items():
        _write(folder / config / f"{split}.jsonl", records)
        header += f"  - split: {split}\n    path: {config}/{split}.jsonl\n"
    (folder / "README.md").write_text(f"{header}---\n")


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in records))


def run(server: RunningServer, work: Path, recipe: str, **options: Any) -> list[dict[str, float]]:
    """Runs a recipe; returns the metrics of its steps.

    Args:
        work: the working directory.
        recipe: its module in tinker_cookbook.recipes.
        options: of its command line.
    """
    out = Path(tempfile.mkdtemp(dir=work)) / recipe
    words = {"model_name": NAME, "log_path": out, **options}
    assert CLIENT is not None
    _by_client(server, work, CLIENT, "-m", f"tinker_cookbook.recipes.{recipe}", *[f"{a}={b}" for a, b in words.items()])
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def script(server: RunningServer, work: Path, name: str, python: str | None = None) -> str:
    """Runs a file of this folder by a client's Python, with the name of the base; returns what it prints."""
    python = python or CLIENT
    assert python is not None
    return _by_client(server, work, python, str(Path(__file__).parent / name), NAME)


def _by_client(server: RunningServer, work: Path, *words: str) -> str:
    ended = subprocess.run(
        words,
        cwd=work,
        env={
            **{name: one for name, one in os.environ.items() if name != "PYTHONPATH"},
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": KEY,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(work / "cache"),
        },
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout
