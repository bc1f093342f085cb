"""All guards of a run, as the loop sees them: told of every step, and asked once its figures have been read.

In the hot path, a guard only launches work whose results stay on the device until the report of the step, which comes
when the next step already runs. So a step is reported on one step later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor

from engine.config.guards import GuardOptions
from engine.config.run import RunConfig
from engine.distributed.mesh import Axis, Mesh
from engine.errors import UserError
from engine.layers.encoded_storage import encoded_entries
from engine.optim.adamw import FlatAdamW
from engine.optim.loss_scale import FLOOR
from engine.runtime.launch import Launch
from engine.training.build import Training
from engine.training.guards import liveness, replicas
from engine.training.guards.fingerprint import Fingerprints
from engine.training.guards.liveness import LivenessGuard
from engine.training.guards.nonfinite import Locator
from engine.training.guards.replicas import PendingComparison, ReplicaGuard
from engine.training.guards.spikes import LEAST_LOSS, LEAST_NORM, NO_LIMIT, RunningLimit
from engine.training.observer import LaunchedStep, Observer, StepReport
from engine.training.step import TrainStep

FROZEN_EVERY = 10
"""Comparisons of replicas from one of frozen parameters to the next."""
EARLY_COMPARISON = 2
"""Steps after which replicas are compared for the first time: a sum that a layout forgets shows at once."""
MAX_LOCATED = 3
"""Maximum number of steps of a run that are recomputed to find where they stopped being finite."""
KEPT_BATCHES = 16
"""Unread steps whose micro-batches are kept for that."""


class Guards(Observer):
    """Watches one run on this rank. Every rank makes the same calls.

    Args:
        options: the guards' section.
        step: of the run.
        optimizer: of the run, in the state of the first step to come.
        mesh: the axes.
        world: all ranks of the run.
        beta1: of AdamW.
        seed: of the run.
        max_skipped_steps: consecutive skipped steps after which the run stops.
        say: prints a line.
    """

    def __init__(
        self,
        options: GuardOptions,
        step: TrainStep,
        optimizer: FlatAdamW,
        mesh: Mesh,
        world: Axis,
        *,
        beta1: float,
        seed: int,
        max_skipped_steps: int,
        say: Callable[[str], None],
    ) -> None:
        self._options, self._step, self._optimizer, self._say = options, step, optimizer, say
        self._mesh, self._world, self._beta1, self._seed = mesh, world, beta1, seed
        self._entries = step.stages.entries()
        self._prints = Fingerprints(step.stages.step.device)
        encoded = [weight for model in step.stages.models() for weight in encoded_entries(model)]
        weights = optimizer.flat.sharding.weights
        self._replicas = ReplicaGuard(self._entries, encoded, weights, mesh, world, self._prints)
        self._locator = Locator(step, optimizer.flat, self._entries, self._replicas, world)
        self._unread: deque[LaunchedStep] = deque()
        self._max_skipped_steps, self._skipped_in_a_row, self._located = max_skipped_steps, 0, 0
        window, deviations = options.spike_window, options.spike_deviations
        self._losses = RunningLimit(window=window, deviations=deviations, least=LEAST_LOSS, logarithms=False)
        self._norms = RunningLimit(window=window, deviations=deviations, least=LEAST_NORM, logarithms=True)
        self._loss_limit = self._norm_limit = NO_LIMIT
        self._comparison: PendingComparison | None = None
        self._comparisons, self._compared = 0, -1
        self._liveness: LivenessGuard | None = None
        self._live_from: int | None = None
        self._live_steps = 0
        """Steps with a learning rate and a signal to learn from, since then."""
        self._looked_after = 0
        self._begun_at = 0

    def begin(self, step: int, consumed: int) -> None:
        """Called before the loop. Collective; waits for the device.

        Args:
            step: steps taken so far.
            consumed: the data cursor.

        Raises:
            UserError: copies of a parameter differ already.
        """
        self._begun_at = step
        if self._options.liveness_steps:
            unread = self._step.stages.models()[0].config.unread_modules
            watched = [entry for entry in self._entries if not entry.name.startswith(unread)]
            self._liveness = LivenessGuard(
                watched, self._optimizer, self._replicas, self._mesh, self._world, self._prints, beta1=self._beta1
            )
        if self._compares:
            self._comparison = self._replicas.start(step, frozen=True, numbers=self._numbers(consumed))
            self._compared = step
            self._read_comparison()

    def after(self, launched: LaunchedStep) -> None:
        """Takes note of a step that was handed to the device. Launches work, waits for nothing."""
        launched = replace(launched, loss_limit=self._loss_limit, norm_limit=self._norm_limit)
        self._unread.append(launched)
        if len(self._unread) > KEPT_BATCHES:
            old = self._unread[-1 - KEPT_BATCHES]
            self._unread[-1 - KEPT_BATCHES] = replace(old, batches=[])
        self._check_adapters(launched)
        if self._compares and self._is_due(launched.step):
            self._compare(launched)

    def read(self, report: StepReport) -> None:
        """Reads and judges the figures of all steps up to the reported one, of which `after` was told.

        Raises:
            UserError: a guard's policy stops the run.
        """
        self.judge(report.step)

    def judge(self, step: int) -> None:
        """Judges the figures of all steps up to `step`; see `read`."""
        while self._unread and self._unread[0].step <= step:
            self._judge(self._unread.popleft())
        self._set_limits()
        self._read_comparison(step)
        self._read_liveness(step)

    def finish(self, step: int, consumed: int) -> None:
        """Called after the loop, when all figures are read. Collective; waits for the device.

        Raises:
            UserError: a guard's policy stops the run.
        """
        guard = self._liveness
        is_short = guard is not None and self._live_from is not None and not guard.is_over
        if guard is not None and is_short and self._live_steps > 2:
            while not guard.is_over:
                guard.look()
            self._looked_after = step
            self._read_liveness(step)
        self._read_comparison()
        if self._compares and self._compared != step:
            self._comparison = self._replicas.start(step, frozen=False, numbers=self._numbers(consumed))
            self._compared = step
            self._read_comparison()

    # spikes, and figures that are not finite

    def _judge(self, launched: LaunchedStep) -> None:
        loss, norm, scale, *_ = launched.figures.read()
        if isfinite(loss) and not isfinite(norm) and self._is_overflow(launched, scale):
            return
        finite = isfinite(loss) and isfinite(norm)
        skipped = not finite or loss > launched.loss_limit or norm > launched.norm_limit
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if not finite:
            self._report_non_finite(launched, loss, norm)
        elif self._options.spike_policy != "off":
            self._report_spike(launched, loss, norm, skipped=skipped)
        self._losses.add(loss)
        self._norms.add(norm)
        if self._skipped_in_a_row >= self._max_skipped_steps:
            raise UserError(
                f"the last {self._max_skipped_steps} steps up to step {launched.step} had a loss or gradient that is "
                "not finite or far above those before, and were skipped: lower optim.lr, set optim.clip_grad_norm, or "
                "look at the data around this step; optim.max_skipped_steps says how many may follow each other."
            )

    def _is_overflow(self, launched: LaunchedStep, scale: float) -> bool:
        """Returns whether a gradient that is not finite is a normal event of float16: the scale has been halved, and
        the next step tries again. At the scale's floor nothing is left to halve."""
        if self._optimizer.loss_scale is None or scale <= FLOOR:
            return False
        self._say(
            f"step {launched.step}: the gradient overflowed, the update was skipped and the loss scale {scale:g} halved"
        )
        if scale / 2 <= FLOOR:
            self._say(
                f"warning: the loss scale is at its floor of {FLOOR:g}; if gradients go on to overflow the model does "
                "not train in float16, use model.dtype bfloat16"
            )
        return True

    def _report_non_finite(self, launched: LaunchedStep, loss: float, norm: float) -> None:
        text = f"step {launched.step}: loss {loss}, gradient norm {norm}: not finite, the update was skipped"
        # of several in a row the first is the informative one
        if self._options.locate_non_finite and self._skipped_in_a_row == 1 and self._located < MAX_LOCATED:
            self._located += 1
            if launched.batches:
                found = self._locator.locate(launched.batches, launched.targets, launched.step - 1)
                text += f"; {found.sentence()}"
        if self._options.non_finite_policy == "stop":
            raise UserError(
                f"{text}: look at the named module and at the data of this step, or set "
                "guards.non_finite_policy to skip."
            )
        self._say(text)

    def _report_spike(self, launched: LaunchedStep, loss: float, norm: float, *, skipped: bool) -> None:
        spikes = [
            f"{what} is {figure:.4g}, where the median of recent steps is {limit.middle():.4g} and {most:.4g} would "
            "still be usual"
            for what, figure, limit, most in (
                ("the loss", loss, self._losses, self._losses.limit()),
                ("the gradient norm", norm, self._norms, self._norms.limit()),
            )
            if figure > most
            or (skipped and figure > (launched.loss_limit if limit is self._losses else launched.norm_limit))
        ]
        if not spikes:
            return
        text = f"step {launched.step}: {'; '.join(spikes)}" + ("; the update was skipped" if skipped else "")
        if self._options.spike_policy == "stop":
            raise UserError(f"{text}: lower optim.lr, look at the data, or set guards.spike_policy to warn or skip.")
        self._say(text)

    def _set_limits(self) -> None:
        """Writes the limits of the next step to the device; a number in a tensor, without a wait."""
        if self._options.spike_policy not in ("skip", "stop"):
            return
        self._loss_limit, self._norm_limit = self._losses.limit(), self._norms.limit()
        self._optimizer.loss_limit.fill_(self._loss_limit)
        self._optimizer.norm_limit.fill_(self._norm_limit)

    # replicas

    @property
    def _compares(self) -> bool:
        return self._options.replicas_every > 0 and self._replicas.compares

    def _is_due(self, step: int) -> bool:
        return step % self._options.replicas_every == 0 or step == self._begun_at + EARLY_COMPARISON

    def _compare(self, launched: LaunchedStep) -> None:
        self._read_comparison()  # of a step long ago, unless reports are rarer than comparisons
        self._comparisons += 1
        numbers = self._numbers(launched.consumed, launched)
        self._comparison = self._replicas.start(
            launched.step,
            frozen=self._comparisons % FROZEN_EVERY == 0,
            numbers=numbers,
            shared_data=("the tokens of the step",),
        )
        self._compared = launched.step

    def _numbers(self, consumed: int, launched: LaunchedStep | None = None) -> dict[str, Tensor]:
        """Returns the numbers, beside parameters, that are the same on all ranks."""
        optimizer, host = self._optimizer, torch.tensor([consumed, self._seed])
        numbers = {
            "the data cursor": host[0],
            "the seed": host[1],
            "the count of steps": self._step.stages.step,
            "the count of updates": optimizer.step_count.view(torch.int32).long(),
            "the learning rate": optimizer.lr.view(torch.int32).long(),
        }
        if optimizer.loss_scale is not None:
            numbers["the loss scale"] = optimizer.loss_scale.value.view(torch.int32).long()
        if launched is not None:
            numbers["the loss"] = launched.result.loss.view(torch.int32).long()
            numbers["the gradient norm"] = launched.result.grad_norm.view(torch.int32).long()
            tokens = [batch.tokens_BS for batch in launched.batches]
            numbers["the tokens of the step"] = Fingerprints(tokens[0].device).of(tokens)
        return numbers

    def _read_comparison(self, up_to: int | None = None) -> None:
        pending = self._comparison
        if pending is None or (up_to is not None and pending.step > up_to):
            return
        self._comparison = None
        differences = self._replicas.finish(pending)
        if differences:
            text = replicas.sentence(pending.step, differences)
            if self._options.replicas_policy == "stop":
                raise UserError(
                    f"{text}: resume from a checkpoint before this step, and look at that rank's memory and at the "
                    "reduction of that parameter's gradient; guards.replicas_policy warn continues regardless."
                )
            self._say(f"warning: {text}")

    # adapters

    def _check_adapters(self, launched: LaunchedStep) -> None:
        guard = self._liveness
        if guard is None or guard.is_over:
            return
        if not launched.has_signal:
            return
        if self._live_from is None:
            if launched.lr <= 0:
                return
            self._live_from, self._live_steps = launched.step, 0
            guard.begin()
        self._live_steps += 1
        # twice, because the model may read a step's update as late as in the next one
        if self._live_steps >= self._options.liveness_steps:
            guard.look()
            self._looked_after = launched.step

    def _read_liveness(self, step: int) -> None:
        guard = self._liveness
        if guard is None or not guard.is_over or step < self._looked_after:
            return
        verdict = guard.verdict()
        if verdict is None:  # almost all of these steps were skipped
            self._live_from = None
            return
        self._liveness = None
        if verdict.idle:
            self._say(f"note: {liveness.idle_sentence(self._looked_after, verdict.idle)}")
        if verdict.dead:
            text = liveness.sentence(self._looked_after, verdict.dead)
            if self._options.liveness_policy == "stop":
                raise UserError(
                    f"{text}: the adapter would be exported as it began; take it out of lora.targets if that is meant, "
                    "or set guards.liveness_policy to warn."
                )
            self._say(f"warning: {text}")


def build_guards(config: RunConfig, training: Training, launch: Launch, *, say: Callable[[str], None]) -> Guards:
    """Returns the guards of a run whose weights and state are loaded.

    Args:
        say: prints a line on the rank that prints.
    """
    return Guards(
        config.guards,
        training.step,
        training.optimizer,
        training.mesh,
        Axis("world", launch.world_size, launch.rank),
        beta1=config.optim.betas[0],
        seed=config.train.seed,
        max_skipped_steps=config.optim.max_skipped_steps,
        say=say,
    )
