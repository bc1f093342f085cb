"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math

from engine.choices import LearningRateSchedule


def learning_rate(
    step: int,
    *,
    schedule: LearningRateSchedule,
    peak: float,
    minimum: float,
    warmup_steps: int,
    total_steps: int,
) -> float:
    """Returns the learning rate of step `step` (0-based), as in transformers' schedules.

    Warm-up is linear from 0 at step 0 to `peak` at step `warmup_steps`; then the rate is constant, or decays to
    `minimum` at `total_steps`, linearly or along half a cosine (Loshchilov & Hutter, arXiv 1608.03983).
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    share = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return minimum + (peak - minimum) * share
