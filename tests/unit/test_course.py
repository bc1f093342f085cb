"""What a resumed run says of its learning rate, where its steps are counted in completions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.config.load import parse_config, to_yaml
from engine.data.order import DataOrder
from engine.training.course import plan_course, rate_change


def test_a_resumed_run_of_prompts_is_warned_of_true_changes_alone(tmp_path: Path) -> None:
    """Five prompts with four completions each are 20: twice as many are five full batches of eight, and would be six
    where epochs end with short ones."""
    given = {
        "model.path": str(tmp_path), "objective.name": "grpo", "rollout.num_generations": "4", "train.epochs": "2",
        "train.global_batch_size": "8", "optim.schedule": "linear",
    }  # fmt: skip
    config = parse_config([word for name, value in given.items() for word in (f"--{name}", value)])
    order = DataOrder(count=5 * 4, batch=8, seed=0, last_batch="full")
    course = plan_course(config, order)
    assert course.steps == 5
    assert rate_change(to_yaml(config), config, course, order, step=2) is None

    fewer = replace(config, rollout=replace(config.rollout, num_generations=2))
    fewer_order = replace(order, count=5 * 2)
    said = rate_change(to_yaml(config), fewer, plan_course(fewer, fewer_order, step=2, consumed=8), fewer_order, step=2)
    assert said is not None and said.endswith("5 steps before, 4 now)"), said
