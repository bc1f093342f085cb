"""Recipes that supervise and distill, and the loops that the cookbook begins with, on a server of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serving.cookbook import MARKS, NAME, run, script
from tests.serving.running import RunningServer

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = MARKS


def test_sl_loop(server: RunningServer, work: Path) -> None:
    steps = run(server, work, "sl_loop", lora_rank=4, batch_size=8, max_steps=4, learning_rate=1e-2, save_every=2)
    losses = [one["train_mean_nll"] for one in steps]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_rl_loop(server: RunningServer, work: Path, loss: str) -> None:
    options = {"batch_size": 4, "group_size": 4, "max_steps": 2, "max_tokens": 8, "save_every": 0}
    steps = run(server, work, "rl_loop", lora_rank=4, loss_fn=loss, **options)
    assert len(steps) >= 2


def test_chat_sl(server: RunningServer, work: Path) -> None:
    steps = run(
        server, work, "chat_sl.train", lora_rank=4, renderer_name="role_colon", batch_size=4, max_steps=4, eval_every=2,
        learning_rate=1e-2, max_length=256, save_every=2, rolling_save_every=1,
    )  # fmt: skip
    losses = [one["train_mean_nll"] for one in steps if "train_mean_nll" in one]
    assert losses[-1] < losses[0] - 0.1


def test_prompt_distillation(server: RunningServer, work: Path) -> None:
    steps = run(
        server, work, "prompt_distillation.train", file_path=work / "conversations.jsonl", renderer_name="role_colon",
        lora_rank=4, batch_size=8, max_steps=4, learning_rate=1e-2, max_length=256, eval_every=0, save_every=0,
    )  # fmt: skip
    losses = [one["train_mean_nll"] for one in steps if "train_mean_nll" in one]
    assert losses[-1] < losses[0] - 0.1


def test_dpo(server: RunningServer, work: Path) -> None:
    """Losses of pairs that the client differentiates, against a reference that is sampled."""
    steps = run(
        server, work, "preference.dpo.train", dataset="hhh", renderer_name="role_colon", batch_size=8, max_steps=4,
        learning_rate=1e-3, max_length=256,
    )  # fmt: skip
    losses = [one["dpo_loss"] for one in steps if "dpo_loss" in one]
    assert abs(losses[0] - 0.6931) < 1e-3, "the reference is the model itself"
    assert losses[-1] < losses[0] - 0.01


def test_on_policy_distillation(server: RunningServer, work: Path) -> None:
    steps = run(
        server, work, "distillation.on_policy_distillation", teacher_model=NAME, renderer_name="role_colon",
        lora_rank=4, groups_per_batch=2, group_size=2, max_tokens=8, max_steps=2, eval_every=0, save_every=0,
    )  # fmt: skip
    assert abs(steps[0]["teacher_kl"]) < 1e-6, "the teacher is the student as it begins"


def test_sdft(server: RunningServer, work: Path) -> None:
    """A teacher's most likely tokens as targets."""
    steps = run(
        server, work, "sdft.train", renderer_name="role_colon", lora_rank=4, groups_per_batch=2, max_tokens=8,
        topk=4, max_context_length=2048, max_steps=2, eval_every=0, save_every=0,
    )  # fmt: skip
    assert len(steps) >= 2


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
