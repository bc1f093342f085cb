"""Options and state with which a run continues inside a buffer of an earlier start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.config.hub import recorded
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.rollouts.weights import Ledger


def buffer_options(config: RunConfig, teachers: Sequence[str | None]) -> dict[str, Any]:
    """Returns the options that must be the same when a buffer is made and read, as JSON values by their names.

    Args:
        teachers: identities of the teachers.
    """
    return {
        "rollout.rewards": [[source.name, source.weight] for source in config.rollout.reward_sources],
        "rollout.overlong_buffer": config.rollout.overlong_buffer,
        "distillation.teachers": [recorded(teacher) for teacher in config.distillation.teachers],
        "the content of distillation.teachers": list(teachers),
        "distillation.weights": list(config.distillation.factors),
        "distillation.discount": config.distillation.discount,
        "distillation.whole": config.distillation.whole,
        "rollout.num_generations": config.rollout.num_generations,
        "rollout.tools": list(config.rollout.tools),
        "rollout.environment": config.rollout.environment,
        "rollout.agent": config.rollout.agent,
        "rollout.tool_format": config.rollout.tool_format,
        "rollout.max_turns": config.rollout.max_turns,
        "rollout.temperature": config.rollout.temperature,
        "objective.reference_sync_steps": config.objective.reference_sync_steps,
        "train.global_batch_size": config.train.global_batch_size,
        "data.seq_length": config.data.seq_length,
    }


def require_unchanged(checkpoint: TrainingCheckpoint, saved: dict[str, Any], now: dict[str, Any], *, data: str) -> None:
    """Refuses to continue inside a buffer whose completions, rewards or rows would be mistaken for others.

    Args:
        saved, now: options that the buffer was made with, and those of the run, as `buffer_options` returns them.
        data: fingerprint of the prompts.

    Raises:
        UserError: an option or the prompts have changed.
    """
    advice = "or resume from a checkpoint between two buffers"
    for name, value in now.items():
        if name in saved and saved[name] != value:
            raise UserError(
                f"{checkpoint.folder} lies inside a buffer of completions that was made with {name} "
                f"{json.dumps(saved[name])}, and {name} is {json.dumps(value)} now: give the old value, {advice}."
            )
    if checkpoint.state["data"] != data:
        raise UserError(
            f"{checkpoint.folder} lies inside a buffer of completions of other prompts than data.train has now: "
            f"give the data that the buffer was made with, {advice}."
        )


def is_state(values: Any) -> bool:
    """Returns whether `values` is the state of a source, between two buffers or inside one."""
    if not isinstance(values, dict):
        return False
    if not Ledger.is_state(values.get("weights")):
        return False
    numbers = {name: value for name, value in values.items() if name not in ("options", "weights")}
    if not all(type(value) is int and value >= 0 for value in numbers.values()):
        return False
    names = numbers.keys() - {"begun_at", "lag"}
    if names == {"generation", "prompts"}:
        return "options" not in values
    if names != {"generation", "prompts", "taken", "num_steps", "iterations"}:
        return False
    inside = numbers["generation"] >= 1 and 1 <= numbers["taken"] < numbers["num_steps"] * numbers["iterations"]
    return inside and isinstance(values.get("options"), dict)
