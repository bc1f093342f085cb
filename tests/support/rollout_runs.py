"""What tests of rollouts share: the example's tiny model, prompts, rewards, and whole runs on any number of ranks."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from engine.config.load import load_config
from engine.rollouts.source import RolloutSource
from engine.runtime.launch import Launch
from engine.telemetry.listener import RunListener
from engine.telemetry.log import Log
from engine.training.prepare import prepare
from engine.training.prepared_run import PreparedRun
from engine.training.trainer import Trainer
from examples.grpo_arithmetic.make_small import write_model, write_sums
from tests.support.commands import options

REWARDS = """
def ones(completions, **columns):
    return [completion.count("1") / 6 for completion in completions]

def long(completion_ids, answer):
    return [0.01 * len(ids) + 0.001 * int(right) for ids, right in zip(completion_ids, answer)]
"""


def rollout_settings(folder: Path, **changes: object) -> dict[str, object]:
    """Options of a run that makes completions of ones likely, by their names; those of `changes` with __ for the
    point. Factors B are zero before the first step alone."""
    write_model(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48}
    (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_sums(folder)
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    settings: dict[str, object] = {
        "model.path": folder / "model", "model.init": "random", "data.train": folder / "prompts.jsonl",
        "data.seq_length": 32, "data.packing": "true", "objective.name": "grpo", "rollout.num_generations": 4,
        "rollout.max_completion_length": 6, "rollout.slots": 8, "lora.rank": 4, "optim.lr": 0.03,
        "optim.schedule": "constant", "train.steps": 4, "train.micro_batch_size": 2, "train.global_batch_size": 32,
        "rollout.rewards": f"{folder}/rewards.py:ones,{folder}/rewards.py:long", "rollout.reward_weights": "1,0.5",
        "log.peak_tflops": 0,
        "checkpoint.dir": folder / "run",
    }  # fmt: skip
    return settings | {name.replace("__", "."): value for name, value in changes.items()}


def prepared(settings: dict[str, object], opened: ExitStack) -> PreparedRun:
    """The run of this rank, ready to take its first step; where there are ranks, all of them call it."""
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    launch = Launch(rank=ranks[0], world_size=ranks[1], device=torch.device("cpu"))
    return prepare(load_config(options(settings)), launch, Log(launch.rank), RunListener(), opened)


def run_here(settings: dict[str, object]) -> None:
    """A whole run on this rank."""
    with ExitStack() as opened:
        Trainer(prepared(settings, opened)).train()


def stepped(settings: dict[str, object], steps: int) -> list[dict[str, Any]]:
    """What each of the first steps comes to on this rank: the completions and figures of its rows, its loss, and the
    objective's figures. For ranks that were not started by torchrun."""
    found = []
    with ExitStack() as opened:
        run = prepared(settings, opened)
        for number, rows in enumerate(run.source.stream(0, 0, steps)):
            result = run.training.step(rows.batches, rows.targets, run.step_plan.rate(number))
            assert isinstance(run.source, RolloutSource) and run.source.buffer is not None
            completions = [one.tokens.tolist() for one in run.source.buffer.completions]
            named = run.training.objective.named(result.metrics.tolist())
            found.append({"completions": completions, "loss": float(result.loss), **rows.figures, **named})
    return found


def records(folder: Path) -> list[dict[str, Any]]:
    """The training records of a run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def texts(folder: Path) -> list[dict[str, Any]]:
    """The completions that a run logged."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if any(name.startswith("completion/") for name in record)]


def final_state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint that one rank wrote."""
    return load_file(folder / "checkpoints" / f"step_{step:08d}" / "rank_00000.safetensors")
