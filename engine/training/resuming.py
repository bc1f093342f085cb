"""Resuming: the state of the checkpoint, the changes since, and whether any step is left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.config.load import to_yaml
from engine.config.resume_rules import changes, flat_options
from engine.config.run import RunConfig
from engine.config.snapshots import records
from engine.errors import UserError
from engine.telemetry.metrics import RecordedEvaluation
from engine.training.evaluate import is_due
from engine.training.evaluations import BestLoss, ending
from engine.training.run_data import RunData
from engine.training.step_plan import StepPlan, rate_change


class RunComplete(Exception):
    """Raised where nothing is left to do; the message gives the reason, and advice."""

    def __init__(self, sentence: str, *, step: int, run_dir: Path) -> None:
        super().__init__(sentence)
        self.step, self.run_dir = step, run_dir


def require_trained(run_dir: Path, steps: int, *, updates: int) -> None:
    """Raises UserError where a run is at its end and every one of its steps was skipped."""
    if steps and not updates:
        raise UserError(
            f"the run in {run_dir} skipped every step of {steps:,}, because a loss or gradient was not finite or far "
            "above those before, so that nothing was trained: look at the warnings of its first steps and at the data, "
            "and train anew in another checkpoint.dir."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingPoint:
    """The state of a run as its checkpoint has it.

    Args:
        path: of the checkpoint.
        step, consumed: steps taken and samples consumed.
        updates: steps that were not skipped.
        data: fingerprint of the training data.
        best: outcome of its evaluations.
        run_config: its configuration, as YAML.
    """

    path: Path
    step: int
    consumed: int
    updates: int
    data: str
    best: BestLoss
    run_config: str

    @classmethod
    def of(cls, checkpoint: TrainingCheckpoint) -> StartingPoint:
        """Returns the starting point of a checkpoint that `check_state` has checked."""
        state = checkpoint.state
        return cls(
            path=checkpoint.folder,
            step=int(state["step"]),
            consumed=int(state["consumed"]),
            updates=int(state["updates"]),
            data=str(state["data"]),
            best=BestLoss.of_state(state.get("best")),
            run_config=checkpoint.run_config,
        )

    def differences(self, config: RunConfig, step_plan: StepPlan, data: RunData, fingerprint: str) -> list[str]:
        """Returns a sentence for everything that has changed and changes the results.

        Args:
            config, step_plan, data: of the run now.
            fingerprint: of its training data.
        """
        found = [
            f"changed since {self.path.name}: {change}" for change in changes(self.run_config, to_yaml(records(config)))
        ]
        rate = rate_change(self.run_config, step_plan, data, step=self.step) if self.step else None
        if rate is not None:
            found.append(rate)
        if fingerprint != self.data:
            found.append(
                f"data.train differs from the data that {self.path} was trained on; the run continues at sample "
                f"{self.consumed} of it"
            )
        return found

    def completion(self, config: RunConfig, step_plan: StepPlan, best: BestLoss) -> str | None:
        """Returns the reason why nothing is left to do; None where steps are left.

        Args:
            best: outcome of all evaluations.

        Raises:
            UserError: nothing is left to do, and no step was applied.
        """
        train, ends = config.train, self.step >= step_plan.steps
        why = ending(best, target=train.target_eval_loss, patience=train.early_stopping_patience)
        if not ends and why is None:
            return None
        evaluates = config.data.evaluates and is_due(train, self.step, ends=True)
        if why is None and (
            (evaluates and best.seen != self.step) or (config.evaluation.tasks and best.scored != self.step)
        ):
            return None
        require_trained(self.path.parent.parent, self.step, updates=self.updates)
        reason = {
            "target": f"step {self.step}, train.target_eval_loss {train.target_eval_loss} reached",
            "patience": f"step {self.step}, early stopping after {best.misses} evaluations without improvement",
            None: f"step {self.step} of {step_plan.steps}",
        }[why]
        more = f", or raise {'train.steps' if train.steps else 'train.epochs'} to go on" if why is None else ""
        return f"this run is complete ({reason}): nothing to do; choose another checkpoint.dir to train anew{more}"

    def judged_by(self) -> str:
        """Returns checkpoint.best of the run that wrote the checkpoint."""
        return str(flat_options(self.run_config).get("checkpoint.best", "loss"))

    def best_with(self, known: RecordedEvaluation, *, min_delta: float, same_judge: bool, samples: bool) -> BestLoss:
        """Returns the outcome of all evaluations.

        Args:
            known: the evaluations after `step` steps, which the checkpoint may lack.
            min_delta: by which a loss must be lower to count.
            same_judge: whether checkpoint.best is as it was; scores of another figure do not count.
            samples: whether evaluations sample completions, which checkpoint.best compares.
        """
        best = BestLoss.of_state(self.best.state())
        if known.loss is not None:
            best.take(self.step, known.loss, min_delta=min_delta)
        if known.has_tasks:
            best.take_score(self.step, known.score)
        if not same_judge:
            best.score, best.score_step = BestLoss().score, -1
            if samples:  # whose figure is then another
                best.loss, best.step, best.mark, best.misses = BestLoss().loss, -1, BestLoss().mark, 0
        return best
