"""Optimizer options: AdamW and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from engine.choices import LearningRateSchedule
from engine.config.checks import require, require_at_least, require_choices, require_not_negative, require_positive
from engine.config.option import IGNORED, REPORTED, option

Backend = Literal["auto", "torch", "native", "apex"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimOptions:
    """Optim: AdamW (arXiv 1711.05101) and the schedule of its learning rate.

    Args:
        backend: Code that updates the weights; all compute the same. "auto" takes the fastest that comes with the
            engine and logs which, "torch" is torch's fused AdamW, "native" is the compiled CPU kernel, "apex" is
            FusedAdam of NVIDIA apex on a GPU; a backend named here that cannot run is an error.
        lr: Highest learning rate, reached at the end of the warm-up.
        betas: Decay rates of the running averages of the gradient and of its square.
        eps: Added to the denominator of the update, after the square root.
        weight_decay: Decoupled weight decay of everything trained (adapters and DoRA's magnitudes too) except biases
            and norms, as in Hugging Face's Trainer.
        clip_grad_norm: Gradients whose norm is larger are scaled down to this norm; 0 switches clipping off.
        max_skipped_steps: Steps in a row that may be skipped, because a loss or gradient is not finite or spikes where
            guards.spike_policy is skip, before the run stops. 1 stops at the first.
        loss_scale: Initial loss scale where model.dtype is float16, a power of two. It halves when the gradient
            overflows, and that step is skipped.
        loss_scale_window: Steps without an overflow after which the loss scale doubles.
        schedule: Learning rate after the warm-up. "linear" and "cosine" decay to optim.min_lr at the last step;
            "constant" stays.
        warmup_steps: Steps over which the learning rate rises linearly from 0 to optim.lr.
        warmup_ratio: Warm-up as a share of all steps of the run, rounded up, instead of optim.warmup_steps.
        min_lr: Learning rate at the end of "linear" and "cosine".
        lr_pattern: Highest learning rates that differ from optim.lr, by names of modules as in trainable, such as
            {vision: 2e-5, lm_head: 1e-4}; adapters belong to their module, and lora_B means all of these factors. The
            first that matches counts. Warm-up and schedule are those of optim.lr in proportion, optim.min_lr too. null
            for none.
    """

    backend: Backend = option("auto", IGNORED)  # the update is the same
    lr: float = option(2e-4, REPORTED)
    betas: tuple[float, float] = option((0.9, 0.999), REPORTED)
    eps: float = option(1e-8, REPORTED)
    weight_decay: float = option(0.0, REPORTED)
    clip_grad_norm: float = option(1.0, REPORTED)
    max_skipped_steps: int = option(10, IGNORED)  # when a run gives up
    loss_scale: float = option(65536.0, IGNORED)  # the checkpoint has the current one
    loss_scale_window: int = option(1000, REPORTED)
    schedule: LearningRateSchedule = option("cosine", REPORTED)
    warmup_steps: int = option(0, REPORTED)
    warmup_ratio: float | None = option(None, REPORTED)
    min_lr: float = option(0.0, REPORTED)
    lr_pattern: dict[str, float] | None = option(None, REPORTED)

    def __post_init__(self) -> None:
        require_choices("optim", self)
        require_positive("optim.lr", self.lr, "use for example 2e-4")
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"optim.betas is {list(self.betas)}, but two numbers from 0 to below 1 are expected: "
            "use for example [0.9, 0.999].",
        )
        require_positive("optim.eps", self.eps, "use for example 1e-8")
        require_not_negative("optim.weight_decay", self.weight_decay, "use 0 for none")
        require_not_negative("optim.clip_grad_norm", self.clip_grad_norm, "use 0 to switch clipping off")
        require_at_least("optim.max_skipped_steps", self.max_skipped_steps, 1, "use 1 to stop at the first")
        require(
            self.loss_scale in [2.0**power for power in range(25)],
            f"optim.loss_scale is {self.loss_scale:g}, but a power of two from 1 to {2**24} is expected: use for "
            "example 65536.",
        )
        require_at_least("optim.loss_scale_window", self.loss_scale_window, 1, "use for example 1000")
        require_at_least("optim.warmup_steps", self.warmup_steps, 0, "use 0 for no warm-up")
        if self.warmup_ratio is not None:
            require(
                0 <= self.warmup_ratio <= 1,
                f"optim.warmup_ratio is {self.warmup_ratio}, but a share from 0 to 1 is expected: use e.g. 0.03.",
            )
            require(
                self.warmup_steps == 0,
                f"optim.warmup_steps is {self.warmup_steps} and optim.warmup_ratio is {self.warmup_ratio}, but one "
                "number says how long the warm-up is: remove one of the two.",
            )
        require_not_negative("optim.min_lr", self.min_lr, "use 0 to end at zero")
        require(
            self.min_lr <= self.lr,
            f"optim.min_lr is {self.min_lr} and optim.lr is {self.lr}, but the schedule falls from optim.lr to "
            "optim.min_lr: set optim.min_lr to optim.lr or less.",
        )

        for pattern, rate in (self.lr_pattern or {}).items():
            require(
                isinstance(pattern, str) and bool(pattern),
                f"optim.lr_pattern contains {pattern!r}, but names of modules are expected: put it in quotes where it "
                "is one, or remove it.",
            )
            require_positive(f"optim.lr_pattern of {pattern}", rate, "use for example 2e-5")

    def warmup(self, total_steps: int) -> int:
        """Returns the steps of the warm-up in a run of `total_steps`."""
        return self.warmup_steps if self.warmup_ratio is None else ceil(self.warmup_ratio * total_steps)
