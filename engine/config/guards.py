"""Guards: checks of a run while it trains, and its reactions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config.checks import require, require_at_least, require_choices, require_positive
from engine.config.option import IGNORED, REPORTED, option

Policy = Literal["warn", "stop"]
SpikePolicy = Literal["off", "warn", "skip", "stop"]
NonFinitePolicy = Literal["skip", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardOptions:
    """Guards: checks of a run while it trains, and its reactions.

    Args:
        liveness_steps: Steps after the first one with a learning rate by which both factors of every adapter must have
            had a gradient and reached the model; 0 switches the check off.
        liveness_policy: Reaction to a dead adapter, "stop" or "warn".
        replicas_every: Steps between comparisons of replicated parameters across ranks; 0 switches them off. Trained
            parameters are compared each time, frozen ones at the start and every tenth time.
        replicas_policy: Reaction to copies that differ, "stop" or "warn".
        spike_policy: Reaction to a spike of the loss or the gradient norm: "warn", "skip" (the device skips the
            update), "stop" (the update is skipped, and training stops), or "off".
        spike_deviations: How far above the recent median a spike is, in robust standard deviations (1.4826 times the
            median absolute deviation; of the norm's logarithm). A loss that is less than 1 above the median, or a norm
            that is less than 4 times it, is never a spike.
        spike_window: Number of recent steps in the median; nothing is a spike in the first half of them.
        non_finite_policy: Reaction to a loss or gradient that is not finite: "skip" skips the update,
            and stops after optim.max_skipped_steps of them in a row; "stop" stops at the first.
        locate_non_finite: Recompute such a step to name the module where it began, at most three times in a run.
    """

    liveness_steps: int = option(5, IGNORED)
    liveness_policy: Policy = option("stop", IGNORED)
    replicas_every: int = option(100, IGNORED)
    replicas_policy: Policy = option("stop", IGNORED)
    spike_policy: SpikePolicy = option("warn", REPORTED)
    spike_deviations: float = option(8.0, REPORTED)
    spike_window: int = option(64, REPORTED)
    non_finite_policy: NonFinitePolicy = option("skip", REPORTED)
    locate_non_finite: bool = option(True, IGNORED)

    def __post_init__(self) -> None:
        require_choices("guards", self)
        require(
            self.liveness_steps == 0 or self.liveness_steps >= 3,
            f"guards.liveness_steps is {self.liveness_steps}, but an adapter's factor A has no gradient before the "
            "second update and is checked after the third: use 3 or more, or 0 to check nothing.",
        )
        require_at_least("guards.replicas_every", self.replicas_every, 0, "use for example 100, or 0 for never")
        require_at_least("guards.spike_window", self.spike_window, 8, "use for example 64")
        require_positive("guards.spike_deviations", self.spike_deviations, "use for example 8")
