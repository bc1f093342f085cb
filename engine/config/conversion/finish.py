"""What follows once all keys are read: batches, the warm-up, and what the other trainer does by default."""

from __future__ import annotations

from math import ceil
from typing import Any

from engine.config.conversion.conversion import Conversion
from engine.config.conversion.reading import Given
from engine.errors import UserError

PLACES = {
    "model.path": "path/to/model",
    "data.train": "path/to/train.jsonl",
    "data.validation": "path/to/validation.jsonl",
}
"""Written where nobody said them."""

_TRAINER_DEFAULTS: tuple[tuple[str, str, Any], ...] = (
    ("learning_rate", "optim.lr", 5e-5),
    ("lr_scheduler_type", "optim.schedule", "linear"),
    ("max_grad_norm", "optim.clip_grad_norm", 1.0),
    ("seed", "train.seed", 42),
)
_MINICPM_DEFAULTS: tuple[tuple[str, str, Any], ...] = (
    ("lora_r", "lora.rank", 64),
    ("lora_alpha", "lora.alpha", 64.0),
    ("lora_dropout", "lora.dropout", 0.05),
    ("model_max_length", "data.seq_length", 2048),
)
_MINIMIND_DPO_DEFAULTS: tuple[tuple[str, str, Any], ...] = (
    ("beta", "objective.beta", 0.15),
    ("learning_rate", "optim.lr", 4e-8),
    ("grad_clip", "optim.clip_grad_norm", 1.0),
    ("max_seq_len", "data.seq_length", 1024),
)


def program(conversion: Conversion, given: Given) -> None:
    """The script that was started says what trains, and how."""
    name = str(given.value)
    conversion.facts["program"] = name
    if name == "train_dpo.py":
        conversion.take(given, "objective.name", "dpo")
        conversion.take(given, "objective.reference", "initial", "a model as it is at the start")
        conversion.take(given, "lora.rank", 0, "full weights")
        conversion.take(given, "trainable", ["*"], "full weights")
    elif name in ("train_full_sft.py", "train_pretrain.py"):
        conversion.take(given, "lora.rank", 0, "full weights")
        conversion.take(given, "trainable", ["*"], "full weights")
    else:
        conversion.drop(given, "tools/pretrain_lora.py is started")


def finish(conversion: Conversion, ranks: int | None) -> int:
    """Adds the options that follow from several keys.

    Args:
        ranks: number of processes where the user says it; None takes the one that was read, or 1.

    Returns:
        Processes of the run.

    Raises:
        UserError: numbers that do not go together.
    """
    facts = conversion.facts
    processes = ranks or facts.get("processes") or facts.get("processes_per_node", 1) * facts.get("machines", 1)
    _other_defaults(conversion)
    _batch(conversion, processes)
    _schedule(conversion)
    _evaluation(conversion, processes)
    _weights_in_host_memory(conversion)
    betas = [facts.get("beta1", 0.9), facts.get("beta2", 0.999)]
    if "beta1" in facts or "beta2" in facts:
        conversion.imply("flags", "adam_beta1, adam_beta2", "optim.betas", betas)
    for name in ("model.path", "data.train"):
        _require_place(conversion, name)
    return int(processes)


def _other_defaults(conversion: Conversion) -> None:
    keys = {row.given.key for row in conversion.rows}
    facts = conversion.facts
    if facts.get("program") == "train_dpo.py":
        _imply(conversion, "train_dpo.py's default", _MINIMIND_DPO_DEFAULTS)
        facts.setdefault("micro", 4)
        conversion.imply("train_dpo.py", "schedule", "optim.schedule", "cosine")
        conversion.imply("train_dpo.py", "schedule", "optim.min_lr", conversion.options["optim.lr"] / 10, "to a tenth")
    if "llm_type" in keys and facts.get("lora"):
        _imply(conversion, "MiniCPM-V's default", _MINICPM_DEFAULTS)
    if "per_device_train_batch_size" in keys:
        _imply(conversion, "the Trainer's default", _TRAINER_DEFAULTS)
        if "train.steps" not in conversion.options:
            facts.setdefault("epochs", 3.0)
    if facts.get("mlperf"):
        source = "MLPerf's reference"
        conversion.imply(source, "blocks of samples end to end", "data.packing", "concatenate")
        conversion.imply(source, "samples over a block", "data.overlong", "drop")
        if conversion.has("train.eval_mean"):
            conversion.imply(source, "mean of evaluations", "train.eval_mean", "rows", "each block's own mean")
        conversion.imply(source, "labels of training", "data.mask_prompt", False, "all tokens")


def _imply(conversion: Conversion, source: str, defaults: tuple[tuple[str, str, Any], ...]) -> None:
    for key, name, value in defaults:
        conversion.imply(source, key, name, value)


def _batch(conversion: Conversion, processes: int) -> None:
    facts, options = conversion.facts, conversion.options
    sizes = [int(options.get(f"parallel.{name}", 1)) for name in ("tensor", "pipeline", "context")]
    model_ranks = sizes[0] * sizes[1] * sizes[2]
    if processes % model_ranks:
        raise UserError(
            f"{processes} processes do not divide into copies of the model over {model_ranks} ranks each: give "
            "--ranks with a multiple of it."
        )
    copies = processes // model_ranks
    accumulation = int(facts.get("accumulation", 1))
    known_batch = options.get("train.global_batch_size")
    micro = int(facts.get("micro", 0)) or (max(1, int(known_batch) // (copies * accumulation)) if known_batch else 1)
    conversion.imply("derived", "rows of one pass", "train.micro_batch_size", micro)
    note = f"{micro} a pass x {accumulation} accumulated x {copies} data-parallel"
    conversion.imply("derived", "rows of one update", "train.global_batch_size", micro * accumulation * copies, note)


def _schedule(conversion: Conversion) -> None:
    facts, options = conversion.facts, conversion.options
    if "train.steps" not in options and "epochs" in facts:
        conversion.imply("derived", "passes over the data", "train.epochs", float(facts["epochs"]))
    ratio = facts.get("warmup_ratio")
    if ratio is None or "optim.warmup_steps" in options:
        return
    steps = options.get("train.steps")
    if ratio == 0 or steps is not None:
        conversion.imply("derived", "warm-up", "optim.warmup_steps", ceil(ratio * (steps or 0)))
    else:
        conversion.to_fill.append(
            f"optim.warmup_steps: {ratio:g} of the steps that {facts.get('epochs', 1)} epochs make"
        )


def _evaluation(conversion: Conversion, processes: int) -> None:
    facts, options = conversion.facts, conversion.options
    every = facts.get("eval_every")
    off = facts.get("no_evaluation_strategy") or facts.get("no_eval_strategy")
    if not every or off:
        return
    conversion.imply("derived", "evaluations", "train.eval_every", every)
    if "eval_iters" in facts:
        samples = facts["eval_iters"] * facts.get("eval_batch", 1) * processes // int(options.get("parallel.tensor", 1))
        conversion.imply("derived", "eval_iters x eval_batch_size x copies", "train.eval_samples", samples)
    _require_place(conversion, "data.validation")


def _weights_in_host_memory(conversion: Conversion) -> None:
    options = conversion.options
    if options.get("memory.offload_weights") and options.get("parallel.shard") == "parameters":
        given = Given(source="derived", key="ZeRO-3 with parameters in host memory", value="both")
        conversion.take(given, "parallel.shard", "gradients", "weights wait in host memory, and so on no other rank")


def _require_place(conversion: Conversion, name: str) -> None:
    if name not in conversion.options:
        conversion.options[name] = PLACES[name]
        conversion.to_fill.append(f"{name}: nothing that was given says it; {PLACES[name]} stands there")
