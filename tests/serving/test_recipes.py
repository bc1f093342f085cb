"""The SDK and recipes of tinker-cookbook, as they are, on a server of a tiny model.

They run by a Python of their own, which RANKFOLD_TINKER_CLIENT names; without one these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.asgi import KEY
from tests.serving.running import RunningServer

CLIENT = os.environ.get("RANKFOLD_TINKER_CLIENT")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CLIENT is None, reason="RANKFOLD_TINKER_CLIENT names no Python with tinker and its cookbook"),
]
NAME = "Qwen/Qwen3-8B-Base"
"""A name that the cookbook knows; the folder of the name in the working directory is a tiny model."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the model, and data sets of sums under the names of those that recipes read."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    work: Path = tmp_path_factory.mktemp("work")
    folder = work / NAME
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(letters)}, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=264, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    sums = [(3 * number % 50, 7 * number % 50) for number in range(32)]
    chats = [
        {"messages": [{"role": "user", "content": f"{a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]}
        for a, b in sums
    ]
    _write(work / "HuggingFaceH4/no_robots/train.jsonl", chats)
    _write(
        work / "openai/gsm8k/main/train.jsonl",
        [{"question": f"{a} + {b}?", "answer": f"#### {a + b}"} for a, b in sums],
    )
    header = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n"
    (work / "openai/gsm8k/README.md").write_text(header)
    return work


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in records))


@pytest.fixture(scope="module")
def server(work: Path) -> Iterator[RunningServer]:
    running = RunningServer(work / NAME, work / "state", "--name", NAME)
    yield running
    running.kill()


def run(server: RunningServer, work: Path, recipe: str, **options: Any) -> list[dict[str, float]]:
    """Runs a recipe; returns the metrics of its steps."""
    out = work / recipe
    words = {"model_name": NAME, "log_path": out, "lora_rank": 4, **options}
    assert CLIENT is not None
    ended = subprocess.run(
        [CLIENT, "-m", f"tinker_cookbook.recipes.{recipe}", *[f"{name}={one}" for name, one in words.items()]],
        cwd=work,
        env={
            **{name: one for name, one in os.environ.items() if name != "PYTHONPATH"},
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": KEY,
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def script(server: RunningServer, work: Path, name: str) -> str:
    """Runs a file of this folder by the client's Python; returns what it prints."""
    assert CLIENT is not None
    ended = subprocess.run(
        [CLIENT, str(Path(__file__).parent / name), NAME],
        cwd=work,
        env={
            **{name: one for name, one in os.environ.items() if name != "PYTHONPATH"},
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": KEY,
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_sl_loop(server: RunningServer, work: Path) -> None:
    steps = run(server, work, "sl_loop", batch_size=8, max_steps=4, learning_rate=1e-2, save_every=2)
    losses = [one["train_mean_nll"] for one in steps]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_rl_loop(server: RunningServer, work: Path, loss: str) -> None:
    options = {"batch_size": 4, "group_size": 4, "max_steps": 2, "max_tokens": 8, "save_every": 0}
    steps = run(server, work, "rl_loop", loss_fn=loss, **options)
    assert len(steps) >= 2


def test_math_rl(server: RunningServer, work: Path) -> None:
    """The sampler's and the trainer's numbers are the same."""
    steps = run(
        server, work, "math_rl.train", env="arithmetic", renderer_name="role_colon", groups_per_batch=4, group_size=4,
        learning_rate=1e-3, max_tokens=12, max_steps=3, loss_fn="ppo", eval_every=0, save_every=0,
        behavior_if_log_dir_exists="delete",
    )  # fmt: skip
    apart = [abs(one["optim/kl_sample_train_v1"]) for one in steps if "optim/kl_sample_train_v1" in one]
    assert apart and max(apart) < 1e-6


def test_losses_and_log_probabilities(server: RunningServer, work: Path) -> None:
    """A traced loss has on the server the curve that it has where the SDK differentiates the function itself."""
    found = json.loads(script(server, work, "sdk_losses.py").splitlines()[-1])
    assert found["loss_id"] is not None
    traced, differentiated = ([one["loss:sum"] for one in curve] for curve in found["curves"])
    assert traced == pytest.approx(differentiated, rel=1e-6) and len({*traced}) == 4
    assert found["curves"][0][0]["custom/tokens:sum"] == 2 * (9 + 14 + 30)
    assert found["named"] == found["trained"]
    assert found["best"][:-2] == [None] * 6 and found["prompt"][:-2] == [None] * 6 and found["drawn"] == [7, 5]
    for tokens, logprobs, best in found["samples"]:
        for token, logprob, pairs in zip(tokens, logprobs, best, strict=True):
            assert all(abs(one - logprob) < 5e-6 for other, one in pairs if other == token)
