"""Training options: how long, in which batches, and when to evaluate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config.checks import require, require_at_least, require_choices, require_not_negative, require_positive
from engine.config.option import IGNORED, REPORTED, option

EvalMean = Literal["tokens", "rows"]
LastBatch = Literal["short", "full"]


LARGEST_GLOBAL_BATCH = 2**20
"""Maximum rows of one optimizer step; the largest pretraining runs take some tens of thousands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """Train: how long, in which batches, and when to evaluate.

    Args:
        steps: Optimizer steps to take; give this or train.epochs.
        epochs: Passes over the training data, fractions allowed; 1 if train.steps is not set either.
        micro_batch_size: Rows in one forward pass of one data-parallel rank.
        global_batch_size: Rows in one optimizer step, over all ranks and micro-batches.
        last_batch: Handling of the last batch of an epoch if the rows do not fill it. "short" takes the rows that
            are left, so that an epoch reads each row exactly once; "full" adds the first rows of the next epoch.
        seed: Seed of the data order, of fresh weights and of dropout.
        deterministic: Use only operations that give the same bits on every run of the same layout.
        eval_every: Steps between evaluations of the validation data, in addition to those at the start and the end; 0
            for none.
        eval_first: Step of the first evaluation, a multiple of train.eval_every, with none at the start or the end
            beside these. null evaluates at the start and at the end too.
        eval_samples: Number of validation samples to evaluate, from the first; null evaluates all of them.
        eval_mean: Weights of the mean that is the evaluation loss. "tokens" weighs all target tokens alike; "rows"
            takes the mean of each row first and weighs all rows alike.
        target_eval_loss: Training ends as soon as an evaluation loss is at most this; null trains to the last step.
        early_stopping_patience: Training ends after this many evaluations in a row without a lower loss; null trains
            to the last step.
        early_stopping_min_delta: By how much the loss must fall to count as lower for early stopping.
        sample_every: Steps between text samples from the model, in addition to those at the start and the end; 0 for
            none.
        sample_prompts: Prompts that are continued greedily as the model trains.
        sample_tokens: Maximum number of new tokens in a sample.
        sample_chat: Render each prompt as a user's message, with the tokenizer's chat template or as the model's family
            writes conversations.
        sample_images: Images that train.sample_prompts are about, one path for each prompt and "" for none; relative
            to data.image_folder where that is set. A prompt with an image is a user's message.
        synthetic_steps: Steps on made-up tokens that warm the devices up before any data is read; their changes
            are undone. The data is then read after the model, so its errors are reported later.
        router_aux_loss_coef: Coefficient of the auxiliary loss that has the routers of a mixture of experts spread
            tokens evenly, over the whole global batch; 0 leaves it out, whatever config.json says.
        collective_timeout: Seconds that ranks wait for one that does not answer before the run stops; set it above
            the longest time that one rank may lag the others, such as rank 0 while it writes a file.
        hang_report_after: Seconds without progress after which the run reports which ranks wait in which
            collective and which never arrived, and each rank's stack is written to the run's folder; less than
            train.collective_timeout, null takes half of it.
    """

    steps: int | None = option(None, REPORTED)
    epochs: float | None = option(None, REPORTED)
    micro_batch_size: int = option(1, IGNORED)  # the layout
    global_batch_size: int = option(8, REPORTED)
    last_batch: LastBatch = option("short", REPORTED)
    seed: int = option(1234, REPORTED)
    deterministic: bool = option(False, IGNORED)  # bits within one layout
    eval_every: int = option(0, REPORTED)
    eval_first: int | None = option(None, REPORTED)
    eval_samples: int | None = option(None, REPORTED)
    eval_mean: EvalMean = option("tokens", REPORTED)
    target_eval_loss: float | None = option(None, REPORTED)
    early_stopping_patience: int | None = option(None, REPORTED)
    early_stopping_min_delta: float = option(0.0, REPORTED)
    sample_every: int = option(0, IGNORED)  # printed
    sample_prompts: tuple[str, ...] = option((), IGNORED)
    sample_tokens: int = option(48, IGNORED)
    sample_chat: bool = option(False, IGNORED)
    sample_images: tuple[str, ...] = option((), IGNORED)
    synthetic_steps: int = option(0, IGNORED)  # they leave no trace
    router_aux_loss_coef: float = option(0.0, REPORTED)
    collective_timeout: float = option(600.0, IGNORED)
    hang_report_after: float | None = option(None, IGNORED)

    def __post_init__(self) -> None:
        require_choices("train", self)
        require(
            self.steps is None or self.epochs is None,
            f"train.steps is {self.steps} and train.epochs is {self.epochs}, but only one of them can end the run: "
            "remove one of the two; --train.epochs null on the command line lets train.steps end it.",
        )
        require_at_least("train.steps", self.steps, 1, "use for example 100")
        require_positive("train.epochs", self.epochs, "use for example 1")
        require_at_least("train.micro_batch_size", self.micro_batch_size, 1, "use for example 1")
        require_at_least("train.global_batch_size", self.global_batch_size, 1, "use for example 8")
        # a step's rows are planned as lists; far more than this would exhaust memory without a message
        require(
            self.global_batch_size <= LARGEST_GLOBAL_BATCH,
            f"train.global_batch_size is {self.global_batch_size:,} rows, but at most {LARGEST_GLOBAL_BATCH:,} are "
            "expected: use for example 8.",
        )
        require(
            0 <= self.seed < 2**32,
            f"train.seed is {self.seed}, but a whole number from 0 to {2**32 - 1} is expected: use for example 1234.",
        )
        require_at_least("train.eval_every", self.eval_every, 0, "use 0 to evaluate only at the start and the end")
        require_at_least("train.eval_first", self.eval_first, 1, "use null to evaluate at the start too")
        require_positive("train.target_eval_loss", self.target_eval_loss, "use null to take all steps")
        require_at_least("train.early_stopping_patience", self.early_stopping_patience, 1, "use null to take all steps")
        require_not_negative(
            "train.early_stopping_min_delta", self.early_stopping_min_delta, "use 0 for any improvement"
        )
        require_at_least("train.sample_every", self.sample_every, 0, "use 0 for none")
        require_at_least("train.sample_tokens", self.sample_tokens, 1, "use for example 48")
        require(
            bool(self.sample_every) == bool(self.sample_prompts),
            f"train.sample_every is {self.sample_every} and train.sample_prompts has {len(self.sample_prompts)} texts, "
            "but samples need both: give both, or none.",
        )
        require(
            len(self.sample_images) in (0, len(self.sample_prompts)),
            f"train.sample_images has {len(self.sample_images)} paths and train.sample_prompts has "
            f'{len(self.sample_prompts)} texts, but each prompt has its own: give as many, with "" for a prompt '
            "without an image.",
        )
        require_at_least("train.synthetic_steps", self.synthetic_steps, 0, "use 0 for none")
        require_not_negative("train.router_aux_loss_coef", self.router_aux_loss_coef, "use 0 to leave it out")
        require_at_least("train.eval_samples", self.eval_samples, 1, "use null for all samples")
        require_positive("train.collective_timeout", self.collective_timeout, "use for example 600")
        if self.hang_report_after is not None:
            require_positive("train.hang_report_after", self.hang_report_after, "use for example 60")
            require(
                self.hang_report_after < self.collective_timeout,
                f"train.hang_report_after is {self.hang_report_after:g}, but train.collective_timeout ends the run "
                f"after {self.collective_timeout:g} s, before there would be a report: use for example "
                f"{self.collective_timeout / 2:g}, or null.",
            )

    @property
    def hang_report_seconds(self) -> float:
        """Seconds without progress after which a hang is reported."""
        return self.collective_timeout / 2 if self.hang_report_after is None else self.hang_report_after

    @property
    def num_epochs(self) -> float | None:
        """Passes over the data that end the run; None when train.steps ends it."""
        if self.steps is not None:
            return None
        return 1.0 if self.epochs is None else self.epochs
