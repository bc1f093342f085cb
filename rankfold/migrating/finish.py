"""Completes a conversion once all keys are read: whether adapters train, the trainer's defaults, and the batch."""

from __future__ import annotations

from math import prod

from engine.errors import UserError
from rankfold.migrating import hub_data, launcher_rules
from rankfold.migrating.conversion import Conversion
from rankfold.migrating.given import Given
from rankfold.migrating.table import Default, Trainer, engine_default
from rankfold.migrating.trainers.experts import add_expert_targets
from rankfold.migrating.trainers.rates import set_rates

PLACES = {
    "model.path": "path/to/model",
    "data.train": "path/to/train.jsonl",
    "data.validation": "path/to/validation.jsonl",
}
"""Placeholders for options that the input does not set."""
DERIVED = ("train.global_batch_size", "train.eval_every", "train.eval_samples", "checkpoint.every", "optim.betas")
"""Options with functions of their own below; the trainers' defaults go into these."""


def finish(conversion: Conversion, trainer: Trainer, ranks: int | None) -> int:
    """Adds the options that follow from several keys, and the trainer's defaults.

    Args:
        trainer: whose keys were read.
        ranks: number of processes, if given; None takes the one in the input, or 1.

    Returns:
        Processes of the run.

    Raises:
        UserError: numbers that do not go together.
    """
    facts = conversion.facts
    said = facts.get("processes") or (
        facts.get("processes_per_node") and facts["processes_per_node"] * facts.get("machines", 1)
    )
    processes = ranks or said or _model_ranks(conversion)
    if processes < 1 or int(facts.get("accumulation", 1)) < 1:
        raise UserError("a number of processes or of accumulated passes is below 1: correct it there.")
    if not (ranks or said) and processes > 1 and "train.global_batch_size" in conversion.options:
        conversion.to_fill.append(
            f"--ranks: the number of processes is not given; {processes} hold one copy of the model"
        )
    facts["ranks"] = int(processes)
    facts["trains_adapters"] = trainer.adapters(conversion)
    trainer.finish(conversion)
    launcher_rules.follow(conversion)
    adapters = trainer.adapters(conversion) and conversion.options.get("lora.rank") != 0
    if not adapters:
        _train_everything(conversion, trainer)
    if conversion.options.get("data.validation") and conversion.options.get("data.validation_split"):
        conversion.remove("data.validation_split", "data.validation is given, and counts")
    _length(conversion)
    _saving(conversion, trainer)
    _defaults(conversion, trainer, adapters=adapters)
    if adapters:
        _dropout(conversion, trainer)
        add_expert_targets(conversion)
    _lowest_rate(conversion)
    set_rates(conversion)
    _batch(conversion, trainer, int(processes), said=bool(ranks or said))
    _evaluation(conversion, int(processes))
    evaluates = any(conversion.options.get(name) for name in ("data.validation", "data.validation_split"))
    if "rollout.eval_generations" in conversion.options and not evaluates:
        conversion.remove("rollout.eval_generations", "nothing is evaluated")
    _betas(conversion, trainer)
    _weights_in_host_memory(conversion)
    _trackers(conversion)
    _places(conversion, trainer)
    return int(processes)


def _train_everything(conversion: Conversion, trainer: Trainer) -> None:
    """Sets options for a run without adapters, where the input has none."""
    options = conversion.options
    for name in [name for name in options if name.startswith("lora.") and name != "lora.rank"]:
        conversion.remove(name, "no adapters train")
    if options.get("lora.rank"):
        conversion.remove("lora.rank", "no adapters train")
    source = f"{trainer.name} without adapters"
    conversion.set_default(source, "full training", "lora.rank", 0)
    if options.get("lora.rank") == 0 and conversion.facts.get("finetuning_type") != "freeze":
        conversion.set_default(source, "full training", "trainable", conversion.facts.get("full training", ["*"]))
    if options.get("model.base_dtype") is not None and {"*", "layers"} & set(options.get("trainable", [])):
        conversion.remove("model.base_dtype", "weights that train are not stored in fewer bits")


def _defaults(conversion: Conversion, trainer: Trainer, *, adapters: bool) -> None:
    """Sets each option that was not given to the trainer's default, where this engine's own differs."""
    for name, default in trainer.defaults.items():
        if name in DERIVED or name in conversion.options or not isinstance(default, Default):
            continue
        if conversion.facts.get("no_warmup") and name in ("optim.warmup_steps", "optim.warmup_ratio"):
            continue
        answers = conversion.options.get("objective.name", "language_modeling") != "language_modeling"
        own = name.startswith("lora.") and not adapters
        if (
            own
            or not conversion.has(name)
            or (name.startswith("objective.") and name != "objective.name" and not answers)
        ):
            continue
        value = default.of(conversion)
        if value != engine_default(name):
            conversion.set_default(f"{trainer.name}'s default", default.where, name, value)


def _dropout(conversion: Conversion, trainer: Trainer) -> None:
    """Sets adapters' dropout to 0 where the trainer switches it off, whatever lora_dropout is."""
    answers = conversion.options.get("objective.name", "language_modeling") not in ("language_modeling", "grpo")
    off = conversion.facts.get("no_dropout", answers and not trainer.dropout_with_answers)
    if off and conversion.options.get("lora.dropout"):
        conversion.take(Given(source="derived", key="disable_dropout", value=True), "lora.dropout", 0.0)


def _length(conversion: Conversion) -> None:
    """Sets the run's length, in steps where these are given, and the row length: of question and answer together."""
    options, facts = conversion.options, conversion.facts
    if "source_length" in facts and "target_length" in facts:
        both = facts["source_length"] + facts["target_length"]
        conversion.set_default("derived", "source_max_len + target_max_len", "data.seq_length", both)
    if "train.steps" in options and "train.epochs" in options:
        conversion.remove("train.epochs", "the number of steps counts")
    if "train.steps" in options:
        options["train.epochs"] = None


def _saving(conversion: Conversion, trainer: Trainer) -> None:
    facts = conversion.facts
    default = trainer.defaults.get("checkpoint.every")
    kind = facts.get("save_strategy", "steps")
    if kind == "no":
        conversion.set_default("derived", "save_strategy", "checkpoint.every", 0, "saved at the end alone")
    elif kind == "steps":
        every = facts.get("save_steps")
        if every is not None and every < 1:
            conversion.to_fill.append(f"checkpoint.every: {every:g} of all steps")
        elif every is not None:
            conversion.set_default("derived", "save_steps", "checkpoint.every", int(every))
        elif isinstance(default, Default) and default.of(conversion) != 0:
            conversion.set_default(
                f"{trainer.name}'s default", default.where, "checkpoint.every", default.of(conversion)
            )
    elif not facts.get("saves_per_epoch"):
        conversion.to_fill.append(
            "checkpoint.every: a checkpoint an epoch; without it the run is saved at its end alone"
        )


def _lowest_rate(conversion: Conversion) -> None:
    share, rate = conversion.facts.get("min_lr_share"), conversion.options.get("optim.lr")
    if share is not None and rate is not None:
        lowest = float(f"{share * rate:.12g}")  # 1e-6, not 1.0000000000000002e-06
        conversion.set_default("derived", "share of the highest rate", "optim.min_lr", lowest, f"{share:g} x {rate:g}")


def _model_ranks(conversion: Conversion) -> int:
    """Returns the ranks that hold one copy of the model.

    Raises:
        UserError: one of the sizes is below 1.
    """
    sizes = {name: int(conversion.options.get(f"parallel.{name}", 1)) for name in ("tensor", "pipeline", "context")}
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"parallel.{name} would be {size}, but at least 1 rank is expected: correct it there.")
    return prod(sizes.values())


def _batch(conversion: Conversion, trainer: Trainer, processes: int, *, said: bool) -> None:
    facts, options = conversion.facts, conversion.options
    model_ranks = _model_ranks(conversion)
    if processes % model_ranks:
        raise UserError(
            f"{processes} processes do not divide into copies of the model over {model_ranks} ranks each: give "
            "--ranks with a multiple of it."
        )
    copies = processes // model_ranks
    default = trainer.defaults.get("train.global_batch_size")
    usual = default.of(conversion) if isinstance(default, Default) else 1
    accumulation = int(facts.get("accumulation", usual or 1))
    known_batch = options.get("train.global_batch_size")
    if known_batch and not conversion.given(*_MICRO):
        if "train.micro_batch_size" in options:
            conversion.remove("train.micro_batch_size", "the batch is given")
        micro = max(1, int(known_batch) // (copies * accumulation))
    else:
        micro = int(options.get("train.micro_batch_size") or 1)
    conversion.set_default("derived", "rows of one pass", "train.micro_batch_size", micro)
    note = f"{micro} a pass x {accumulation} accumulated x {copies} data-parallel"
    if not known_batch and not said:
        rows = micro * accumulation
        conversion.to_fill.append(
            "--ranks: the number of processes is not given, and the batch is "
            f"{rows} row{'' if rows == 1 else 's'} for each"
        )
    conversion.set_default(
        "derived", "rows of one update", "train.global_batch_size", micro * accumulation * copies, note
    )
    members = options.get("rollout.num_generations", engine_default("rollout.num_generations"))
    rows = options["train.global_batch_size"]
    if options.get("objective.name") == "grpo" and members and rows % members:
        conversion.to_fill.append(
            f"train.global_batch_size: {rows} completions are no whole groups of rollout.num_generations {members}"
        )


_MICRO = (
    "per_device_train_batch_size", "micro_batch_size", "batch_size", "train_micro_batch_size_per_gpu",
    "deepspeed_config.train_micro_batch_size_per_gpu",
)  # fmt: skip


def _evaluation(conversion: Conversion, processes: int) -> None:
    """Sets when the run is evaluated: TrainingArguments has eval_steps at logging_steps, 500, where they are absent."""
    facts, options = conversion.facts, conversion.options
    kind = facts.get("eval_strategy", "steps" if "eval_every" in facts else "no")
    usual = options.get("log.every") or (facts.get("logging_steps", 500) if "eval_strategy" in facts else None)
    every = facts.get("eval_every") or (facts.get("eval_steps") or usual if kind == "steps" else None)
    if kind == "epoch":
        conversion.to_fill.append(
            "train.eval_every: an evaluation an epoch; without it there is one at the start and the end"
        )
        _require_validation(conversion)
    elif "eval_steps" in facts and kind == "no":
        conversion.notes.append(
            "eval_steps is given without an eval_strategy, whose default is no: nothing is evaluated"
        )
    _needs_evaluation(conversion, known=bool(every))
    if not every or facts.get("eval_iters") == 0:
        return
    if every < 1:
        conversion.to_fill.append(f"train.eval_every: {every:g} of all steps")
    else:
        conversion.set_default("derived", "evaluations", "train.eval_every", int(every))
    if facts.get("eval_iters"):
        rows = facts.get("eval_batch") or options.get("train.micro_batch_size", 1)
        copies = processes // int(options.get("parallel.tensor", 1))
        samples = facts["eval_iters"] * (
            (facts.get("eval_batch") and rows * copies) or options["train.global_batch_size"]
        )
        conversion.set_default("derived", "eval_iters x rows of one iteration", "train.eval_samples", samples)
    _require_validation(conversion)


def _needs_evaluation(conversion: Conversion, *, known: bool) -> None:
    """Completes or withdraws early stopping and keep_best, which need evaluations."""
    options = conversion.options
    if options.get("train.early_stopping_patience") and not known:
        patience = options["train.early_stopping_patience"]
        conversion.remove("train.early_stopping_patience", "no number of steps says when there are evaluations")
        conversion.to_fill.append(f"train.early_stopping_patience: {patience}, once train.eval_every is known")
    if options.get("train.early_stopping_patience") or options.get("checkpoint.keep_best"):
        _require_validation(conversion)


def _betas(conversion: Conversion, trainer: Trainer) -> None:
    facts = conversion.facts
    default = trainer.defaults.get("optim.betas")
    usual = default.of(conversion) if isinstance(default, Default) else engine_default("optim.betas")
    betas = [facts.get("beta1", usual[0]), facts.get("beta2", usual[1])]
    if (
        betas != engine_default("optim.betas")
        and isinstance(default, Default)
        and not {"beta1", "beta2"} & facts.keys()
    ):
        conversion.set_default(f"{trainer.name}'s default", default.where, "optim.betas", betas)
    elif betas != engine_default("optim.betas"):
        conversion.set_default("flags", "adam_beta1, adam_beta2", "optim.betas", betas)


def _weights_in_host_memory(conversion: Conversion) -> None:
    options = conversion.options
    if options.get("memory.offload_weights") and options.get("lora.rank") == 0:
        conversion.remove("memory.offload_weights", "weights that train stay on the device, spread by parallel.shard")
    if options.get("memory.offload_weights") and options.get("parallel.shard") == "parameters":
        given = Given(source="derived", key="ZeRO-3 with parameters in host memory", value="both")
        conversion.take(given, "parallel.shard", "gradients", "weights are kept in host memory, so not on other ranks")


def _trackers(conversion: Conversion) -> None:
    """Sets the trackers that get the figures beside the run's folder."""
    facts = conversion.facts
    trackers = facts.get("trackers", [])
    if "tensorboard" in trackers:
        conversion.set_default("derived", "report_to", "log.tensorboard", True)
    if "wandb" in trackers or facts.get("use_wandb"):
        project = facts.get("wandb_project", "huggingface")
        conversion.set_default(
            "derived",
            "report_to",
            "log.wandb_project",
            project,
            "TrainingArguments.project" if project == "huggingface" else "",
        )
    if "mlflow" in trackers or facts.get("use_mlflow"):
        conversion.set_default(
            "derived", "report_to", "log.mlflow_experiment", facts.get("mlflow_experiment", "Default")
        )


def _places(conversion: Conversion, trainer: Trainer) -> None:
    """Adds placeholders for paths that were not given, and notes on these and on this engine's own defaults."""
    for name in ("model.path", "data.train"):
        _require_place(conversion, name)
    options = conversion.options
    for which in ("data.train", "data.validation"):
        named = conversion.facts.get(f"{which} of the hub")
        if named and options.get(which) == PLACES[which]:
            conversion.to_fill.append(f"{which}: {named} has to be a file .jsonl, .json or .txt here")
    rank = conversion.options.get("lora.rank", engine_default("lora.rank"))
    for name in ("data.seq_length", "optim.lr", *(("lora.alpha",) if rank else ())):
        if name not in options and not isinstance(trainer.defaults.get(name), Default):
            conversion.notes.append(f"{name} was not given; {engine_default(name):g} is this engine's default")
    if options.get("train.epochs", 0) is None:
        del options["train.epochs"]


def _require_validation(conversion: Conversion) -> None:
    if conversion.options.get("data.validation_split") is None:
        _require_place(conversion, "data.validation")


def _require_place(conversion: Conversion, name: str) -> None:
    if name not in conversion.options:
        hub_data.take(conversion, name)
    if name not in conversion.options:
        conversion.options[name] = PLACES[name]
        known = any(line.startswith(name) for line in conversion.to_fill) or f"{name} of the hub" in conversion.facts
        if not known:
            conversion.to_fill.append(f"{name}: not in the input; {PLACES[name]} is a placeholder")
