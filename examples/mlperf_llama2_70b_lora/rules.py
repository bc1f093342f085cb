"""The rules of MLPerf Training's llama2_70b_lora that its own checker does not look at.

What is fixed by the benchmark is compared with the configuration before anything is read. `check_recipe` holds at every
size; `check_size` is the model and the data of the benchmark, which the small job replaces.
"""

from __future__ import annotations

from math import ceil, floor

from engine.config.run import RunConfig
from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig

BENCHMARK = "llama2_70b_lora"
TARGET_LOSS = 0.925
SEQUENCE_LENGTH = 8192
TRAIN_SAMPLES, EVAL_SAMPLES = 3901, 173
TRAINABLE_PARAMETERS = 44_564_480
SAMPLES_BETWEEN_EVALUATIONS = 384
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def evaluation_steps(global_batch_size: int) -> int:
    """Steps between two evaluations: those of 384 sequences, rounded up."""
    return ceil(SAMPLES_BETWEEN_EVALUATIONS / global_batch_size)


def first_evaluation(global_batch_size: int) -> int:
    """Step of the first evaluation: the first FLOOR(0.125 x batch + 2) are skipped."""
    skipped = floor(0.125 * global_batch_size + 2)
    return (skipped + 1) * evaluation_steps(global_batch_size)


def check_recipe(config: RunConfig) -> None:
    """What every run of the benchmark has in common, at any size.

    Raises:
        UserError: an option has another value than the rules give it.
    """
    lora, optim, train, data = config.lora, config.optim, config.train, config.data
    batch = train.global_batch_size
    fixed = {
        "lora.rank": (lora.rank, 16),
        "lora.alpha": (lora.alpha, 32),
        "lora.dropout": (lora.dropout, 0.1),
        "lora.fused": (lora.fused, "qkv"),
        "lora.targets": (sorted(lora.targets), sorted(TARGETS)),
        "lora.exclude": (list(lora.exclude), []),
        "lora.layers": (lora.layers, None),
        "lora.rank_pattern": (dict(lora.rank_pattern or {}), {}),
        "lora.alpha_pattern": (dict(lora.alpha_pattern or {}), {}),
        "lora.rslora": (lora.rslora, False),
        "lora.init_from": (lora.init_from, None),
        "trainable": (list(config.trainable), []),
        "objective.name": (config.objective.name, "language_modeling"),
        "optim.betas": (list(optim.betas), [0.9, 0.999]),
        "optim.eps": (optim.eps, 1e-8),
        "optim.weight_decay": (optim.weight_decay, 1e-4),
        "optim.clip_grad_norm": (optim.clip_grad_norm, 0.3),
        "optim.schedule": (optim.schedule, "cosine"),
        "optim.warmup_steps": (optim.warmup_steps, 0),
        "optim.warmup_ratio": (optim.warmup_ratio, None),
        "optim.min_lr": (optim.min_lr, 0.0),
        "data.packing": (data.packing, "concatenate"),
        "data.format": (data.format, "tokens"),
        "data.mask_prompt": (data.mask_prompt, True),
        "train.last_batch": (train.last_batch, "full"),
        "train.eval_every": (train.eval_every, evaluation_steps(batch)),
        "train.eval_first": (train.eval_first, first_evaluation(batch)),
        "train.eval_samples": (train.eval_samples, None),
        "train.eval_mean": (train.eval_mean, "rows"),
        "train.target_eval_loss": (train.target_eval_loss, TARGET_LOSS),
        "checkpoint.resume": (config.checkpoint.resume, "none"),
    }
    for option, (given, expected) in fixed.items():
        _require(option, given, expected, f"with train.global_batch_size {batch}" if ".eval_" in option else "")
    if train.steps is None:
        raise UserError(
            "train.steps is not set, but the benchmark's schedule ends at a step: set it, for example to 1024."
        )
    if not train.synthetic_steps:
        raise UserError(
            "train.synthetic_steps is 0, so that data would be read before the clock runs, which MLPerf forbids: set "
            "it to 1 or more."
        )
    if config.guards.spike_policy not in ("off", "warn"):
        raise UserError(
            f"guards.spike_policy is {config.guards.spike_policy}, which leaves steps out that the benchmark takes: "
            "set it to warn or off."
        )


def check_size(config: RunConfig, decoder: DecoderConfig, trainable_parameters: int) -> None:
    """The benchmark's own model and row length.

    Args:
        decoder: of the model that is trained.
        trainable_parameters: over the whole model.

    Raises:
        UserError: they are others.
    """
    _require("data.seq_length", config.data.seq_length, SEQUENCE_LENGTH)
    shape = {
        "family": (decoder.family, "llama"),
        "hidden size": (decoder.hidden, 8192),
        "layers": (decoder.num_layers, 80),
        "heads": (decoder.num_heads, 64),
        "key/value heads": (decoder.num_kv_heads, 8),
        "vocabulary": (decoder.vocab_size, 32000),
        "trained parameters": (trainable_parameters, TRAINABLE_PARAMETERS),
    }
    for what, (given, expected) in shape.items():
        if given != expected:
            raise UserError(
                f"model.path {config.model.path} has {what} {given}, but Llama-2-70B with the benchmark's adapters has "
                f"{expected}: give the benchmark's model, or start with --small."
            )


def check_samples(train_samples: int, eval_samples: int) -> None:
    """The benchmark's own rows.

    Raises:
        UserError: there are more or fewer.
    """
    for option, given, expected in (
        ("data.train", train_samples, TRAIN_SAMPLES),
        ("data.validation", eval_samples, EVAL_SAMPLES),
    ):
        if given != expected:
            raise UserError(
                f"{option} has {given} rows of {SEQUENCE_LENGTH} tokens, but the benchmark's has {expected}: prepare "
                "it with prepare_data.py from the benchmark's files."
            )


def _require(option: str, given: object, expected: object, why: str = "") -> None:
    if given != expected:
        raise UserError(
            f"{option} is {given}, but the rules of {BENCHMARK} want {expected}{why and f' {why}'}: set it to that."
        )
