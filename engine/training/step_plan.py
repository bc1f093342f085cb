"""The steps of a run, their number and the learning rate of each, and its data, which decides the number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.config.load import from_yaml
from engine.config.optim import OptimOptions
from engine.config.run import RunConfig
from engine.data.order import DataOrder
from engine.errors import UserError
from engine.optim.lr_schedule import learning_rate
from engine.telemetry.format import how_far
from engine.training.run_data import RunData

if TYPE_CHECKING:
    from engine.training.samples import SamplePrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The steps of a run.

    Args:
        steps: in all.
        epochs: that these are, where epochs end the run.
        optim: whose schedule they follow.
    """

    steps: int
    epochs: float | None
    optim: OptimOptions

    def how_far(self, step: int) -> str:
        """Returns the progress of the run after `step` steps."""
        return how_far(step, self.steps, self.epochs)

    def rate(self, step: int) -> float:
        """Returns the learning rate of the step after `step` others."""
        optim = self.optim
        return learning_rate(
            step,
            schedule=optim.schedule,
            peak=optim.lr,
            minimum=optim.min_lr,
            warmup_steps=optim.warmup(self.steps),
            total_steps=self.steps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedData:
    """The data of a run, and its way through it.

    Args:
        data: the rows.
        fingerprint: of the training rows.
        prompts: tokens of train.sample_prompts.
        tasks: of evaluation.tasks, loaded; None for none.
        step_plan: how many steps, at which learning rates.
    """

    data: RunData
    fingerprint: str
    prompts: list[SamplePrompt]
    tasks: Any
    step_plan: StepPlan


def plan_steps(config: RunConfig, order: DataOrder, *, step: int = 0, consumed: int = 0) -> StepPlan:
    """Plans the steps of a run that has taken `step` steps and consumed so many samples.

    Epochs are counted from the samples and not from the steps, whose batch may have been another before.
    """
    epochs = config.train.num_epochs
    steps = config.train.steps if epochs is None else step + order.steps_left(consumed, epochs)
    assert steps is not None
    return StepPlan(steps=steps, epochs=epochs, optim=config.optim)


def rate_change(saved: str, step_plan: StepPlan, data: RunData, *, step: int) -> str | None:
    """Returns a sentence where the learning rate after `step` steps differs from the checkpoint's schedule; None where
    it does not.

    Args:
        saved: configuration of the checkpoint, as YAML.
        step_plan, data: of the run now.
        step: at least 1.
    """
    try:
        before = from_yaml(saved)
    except UserError:  # another version's, with options that this one does not have
        return None
    old = plan_steps(before, data.earlier_order(before))
    expected, now = old.rate(step), step_plan.rate(step)
    if abs(now - expected) <= 1e-9 * max(now, expected):
        return None
    return (
        f"the learning rate of step {step + 1} is {now:.3g}, where the checkpoint's own schedule has {expected:.3g} "
        f"(step {step} had {old.rate(step - 1):.3g}; {old.steps} steps before, {step_plan.steps} now)"
    )
