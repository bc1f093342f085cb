"""What a resumed run says of its learning rate, where its steps are counted in completions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config.load import parse_config, to_yaml
from engine.config.run import RunConfig
from engine.data.record_files import Place
from engine.rollouts.data.prompts import Prompt, PromptLoader, PromptSet
from engine.rollouts.run_data import PromptData
from engine.training.step_plan import plan_steps, rate_change


def test_a_resumed_run_of_prompts_is_warned_of_true_changes_alone(tmp_path: Path) -> None:
    """Five prompts with four completions each are 20: twice as many are five full batches of eight, and would be six
    where epochs end with short ones."""
    given = {
        "model.path": str(tmp_path), "objective.name": "grpo", "rollout.num_generations": "4", "train.epochs": "2",
        "train.global_batch_size": "8", "optim.schedule": "linear",
    }  # fmt: skip
    config = parse_config([word for name, value in given.items() for word in (f"--{name}", value)])
    data = _prompts(config)
    step_plan = plan_steps(config, data.train.order)
    assert step_plan.steps == 5
    assert rate_change(to_yaml(config), step_plan, data, step=2) is None

    fewer = replace(config, rollout=replace(config.rollout, num_generations=2))
    data = _prompts(fewer)
    said = rate_change(to_yaml(config), plan_steps(fewer, data.train.order, step=2, consumed=8), data, step=2)
    assert said is not None and said.endswith("5 steps before, 4 now)"), said


def _prompts(config: RunConfig) -> PromptData:
    prompts = (Prompt(place=Place(Path("prompts"), "line", 1), ids=(3, 4), given=""),) * 5
    loader = PromptLoader(
        PromptSet(prompts=prompts, columns=(), num_too_long=0, longest=2),
        num_generations=config.rollout.num_generations,
        num_iterations=config.objective.num_iterations,
        steps_per_generation=1,
        global_batch_size=config.train.global_batch_size,
        num_micro_batches=1,
        seed=0,
    )
    tokenizer: Any = None
    return PromptData(tokenizer=tokenizer, train=loader, rewards={})
