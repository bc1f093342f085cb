"""Rules for Megatron-LM's flags."""

from __future__ import annotations

from engine.errors import UserError
from rankfold.migrating import rates
from rankfold.migrating.conversion import (
    Conversion,
    Rule,
    dropped,
    dtype_switch,
    fact,
    number,
    option,
    sets,
    text,
    truth,
    whole,
)
from rankfold.migrating.given import PROGRAM, Given
from rankfold.migrating.trainer import Default, Ours, Trainer
from rankfold.migrating.trainers import megatron_experts, shared
from rankfold.migrating.trainers.megatron_flags import NO_COUNTERPART

_SHAPE = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "rotary_base": "rope_theta",
    "norm_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "init_method_std": "initializer_range",
    "padded_vocab_size": "vocab_size",
}
"""Flag of the model's shape -> the key of a Hugging Face config.json that says the same."""


def _shape(conversion: Conversion, given: Given) -> None:
    key = _SHAPE[given.key]
    conversion.know(given, f"shape {key}", given.value, f"{key} in the config.json of model.path")


@sets("data.train", "data.mix", "data.validation")
def data_path(conversion: Conversion, given: Given) -> None:
    """Converts a data path: one prefix, several, or weights and prefixes in turn; a prefix's data is the .bin file."""
    words = given.value if isinstance(given.value, list) else str(given.value).split()
    which = "data.validation" if given.key.startswith(("valid", "test")) else "data.train"
    weighted = len(words) > 1 and len(words) % 2 == 0 and all(_is_number(word) for word in words[::2])
    files = [_bin(str(word)) for word in (words[1::2] if weighted else words)]
    if not files:
        conversion.drop(given, "empty")
        return
    conversion.take(given, which, files[0])
    if len(files) > 1 and which == "data.train":
        weights = [float(word) for word in words[::2]] if weighted else [1.0] * len(files)
        # data.train has weight 1
        mix = [f"{name}={weight / weights[0]:.6g}" for name, weight in zip(files[1:], weights[1:], strict=True)]
        note = "relative to data.train's 1" if weighted else "Megatron weighs prefixes without weights by their sizes"
        conversion.take(given, "data.mix", mix, note)
    elif len(files) > 1:
        conversion.notes.append(f"{given.key}: only the first of {len(files)} is evaluated, {files[0]}")


def _is_number(word: object) -> bool:
    try:
        float(str(word))
    except ValueError:
        return False
    return True


def _bin(prefix: str) -> str:
    return prefix if prefix.endswith(shared.FILES) else f"{prefix}.bin"


def split(conversion: Conversion, given: Given) -> None:
    """Converts the shares of documents for training, validation and test."""
    shares = [float(part) for part in str(given.value).split(",") if _is_number(part)]
    if len(shares) < 2 or not shares[1] > 0 or not sum(shares) < float("inf"):
        conversion.drop(given, "all of the data is trained on")
        return
    conversion.take(given, "data.validation_split", float(f"{shares[1] / sum(shares):.6g}"), "rows, not documents")
    if len(shares) > 2 and shares[2] > 0:
        conversion.notes.append(
            f"split leaves {shares[2] / sum(shares):.2%} of the documents for a test; here they are trained on"
        )


@sets("optim.schedule")
def decay_style(conversion: Conversion, given: Given) -> None:
    shared.schedule.apply(conversion, given)
    conversion.facts["no_warmup"] = False  # here a constant rate has its warm-up, too


@sets("model.path", "model.init")
def load(conversion: Conversion, given: Given) -> None:
    conversion.know(given, "load", str(given.value), "the weights that the run starts from")


@sets("memory.recompute")
def recompute(conversion: Conversion, given: Given) -> None:
    name = str(given.value).lower()
    kinds = {"full": "full", "selective": "attention", "true": "attention"}
    if name in kinds:
        conversion.take(given, "memory.recompute", kinds[name])
    else:
        conversion.drop(given, "switched off")


@sets("data.tokenizer")
def tokenizer_model(conversion: Conversion, given: Given) -> None:
    conversion.take(given, "data.tokenizer", str(given.value))


@sets("lora.rank", "trainable")
def peft(conversion: Conversion, given: Given) -> None:
    conversion.know(given, "lora", str(given.value).lower() == "lora", f"adapters: {given.value}")


def _samples(name: str) -> Rule:
    """Returns the rule of a number of samples, which becomes steps of the global batch."""
    options = {"steps": ("train.steps",), "warmup": ("optim.warmup_steps",), "decay": ()}[name]
    return fact(
        f"{name}_samples", whole, *options, became=f"{' '.join(options) or 'the schedule'}: over the global batch"
    )


def _fraction(conversion: Conversion, given: Given) -> None:
    conversion.take(given, "optim.warmup_ratio", number(given))


RULES: dict[str, Rule] = {
    "train_iters": shared.steps,
    "train_samples": _samples("steps"),
    "lr_warmup_samples": _samples("warmup"),
    "lr_decay_samples": _samples("decay"),
    "train_tokens": fact("steps_tokens", whole, "train.steps"),
    "lr_warmup_tokens": fact("warmup_tokens", whole, "optim.warmup_steps"),
    "lr_decay_tokens": fact("decay_tokens", whole, became="the schedule ends with the run"),
    "micro_batch_size": option("train.micro_batch_size", whole),
    "global_batch_size": option("train.global_batch_size", whole),
    "rampup_batch_size": shared.off_or_lack("the batch keeps its size"),
    "lr": option("optim.lr", number),
    "min_lr": option("optim.min_lr", number),
    "lr_decay_style": decay_style,
    "lr_decay_iters": fact("decay_steps", whole, became="the schedule ends with the run"),
    "lr_warmup_iters": option("optim.warmup_steps", whole),
    "lr_warmup_fraction": Rule(_fraction, ("optim.warmup_ratio",)),
    "lr_warmup_init": shared.off_or_lack("the warm-up begins at 0"),
    "weight_decay": option("optim.weight_decay", number),
    "start_weight_decay": shared.off_or_lack("weight decay is constant"),
    "end_weight_decay": shared.off_or_lack("weight decay is constant"),
    "weight_decay_incr_style": shared.only("constant", "weight decay is constant"),
    "adam_beta1": fact("beta1", number, "optim.betas"),
    "adam_beta2": fact("beta2", number, "optim.betas"),
    "adam_eps": option("optim.eps", number),
    "clip_grad": option("optim.clip_grad_norm", number),
    "optimizer": Rule(shared.optimizer),
    "initial_loss_scale": option("optim.loss_scale", lambda given: min(number(given), 2.0**24)),
    "loss_scale_window": option("optim.loss_scale_window", whole),
    "loss_scale": shared.off_or_lack("the loss scale finds its own size: optim.loss_scale"),
    "bf16": dtype_switch("bfloat16"),
    "fp16": dtype_switch("float16"),
    "seed": option("train.seed", whole),
    "seq_length": option("data.seq_length", whole),
    "encoder_seq_length": option("data.seq_length", whole),
    "data_path": data_path,
    "train_data_path": data_path,
    "valid_data_path": data_path,
    "test_data_path": data_path,
    "dataset": data_path,
    "valid_data_path_list": data_path,
    "split": Rule(split, ("data.validation_split",)),
    "wandb_project": option("log.wandb_project", text),
    "mock_data": shared.off_or_lack("train.synthetic_steps warms up; data.train names the training data"),
    "num_workers": option("data.num_workers", whole),
    "tokenizer_model": tokenizer_model,
    "vocab_file": shared.off_or_lack("data.tokenizer is a folder or a .model file"),
    "reset_position_ids": fact("documents_apart", truth, "data.packing"),
    "reset_attention_mask": fact("documents_apart", truth, "data.packing"),
    "eod_mask_loss": shared.off_or_lack("the end of a document is trained on"),
    "save": option("checkpoint.dir", text),
    "save_interval": option("checkpoint.every", whole),
    "load": load,
    "pretrained_checkpoint": load,
    "finetune": fact("finetune", truth, became="a fresh optimizer and schedule, as a new run has"),
    "eval_interval": fact("eval_every", whole, "train.eval_every"),
    "eval_iters": fact("eval_iters", whole, "train.eval_samples"),
    "log_interval": option("log.every", whole),
    "tensorboard_dir": option("log.tensorboard", lambda given: True),
    "tensor_model_parallel_size": option("parallel.tensor", whole),
    "model_parallel_size": option("parallel.tensor", whole),
    "pipeline_model_parallel_size": option("parallel.pipeline", whole),
    "context_parallel_size": option("parallel.context", whole),
    "sequence_parallel": option("parallel.sequence", truth),
    "num_layers_per_virtual_pipeline_stage": fact("virtual_layers", whole, "parallel.virtual"),
    "num_virtual_stages_per_pipeline_rank": option("parallel.virtual", whole),
    "virtual_pipeline_model_parallel_size": option("parallel.virtual", whole),
    "cp_comm_type": option("parallel.context_method", lambda given: "ulysses" if "a2a" in str(given.value) else "ring"),
    "use_distributed_optimizer": option("parallel.shard", lambda given: "optimizer" if truth(given) else "none"),
    "data_parallel_sharding_strategy": option(
        "parallel.shard",
        lambda given: {"optim": "optimizer", "optim_grads": "gradients", "optim_grads_params": "parameters"}.get(
            str(given.value), "none"
        ),
    ),
    "use_torch_fsdp2": option("parallel.shard", lambda given: "parameters" if truth(given) else "none"),
    "recompute_activations": recompute,
    "recompute_granularity": recompute,
    "checkpoint_activations": recompute,
    "deepspeed_activation_checkpointing": recompute,
    "activations_checkpoint_method": dropped("each layer is recomputed separately"),
    "recompute_num_layers": fact("recompute_layers", whole, "memory.recompute_layers"),
    "recompute_method": fact("recompute_method", text, "memory.recompute_layers"),
    "optimizer_cpu_offload": option("memory.offload_optimizer", truth),
    "cpu_offloading": option("memory.offload_activations", truth),
    "distributed_timeout_minutes": option("train.collective_timeout", lambda given: 60.0 * number(given)),
    "peft": peft,
    "lora_rank": option("lora.rank", whole),
    "lora_alpha": option("lora.alpha", number),
    "lora_dropout": option("lora.dropout", number),
    "lora_target_modules": shared.targets,
    "attention_dropout": shared.off_or_lack("the base has no dropout"),
    "hidden_dropout": shared.off_or_lack("the base has no dropout"),
    "label_smoothing": shared.off_or_lack("labels are not smoothed"),
    "mtp_num_layers": shared.off_or_lack("the model predicts the next token"),
    "decoupled_lr": rates.rate_of("embed_tokens", "lm_head"),
    "decoupled_min_lr": shared.off_or_lack("all learning rates fall by the same factor: optim.min_lr"),
    "mos": shared.off_or_refuse("a student of another model"),
    "kd": shared.off_or_refuse("a student of another model"),
    "kd_*": dropped("part of what has no counterpart"),
    "curriculum_*": shared.off_or_lack("each sample is read as often as the others"),
    "data_efficiency_*": shared.off_or_lack("each sample is read as often as the others"),
    "random_ltd": shared.off_or_lack("each layer sees every token"),
    "disable_bias_linear": dropped("the model's config.json says it"),
    "exit_duration_in_mins": dropped("a scheduler's SIGTERM saves and stops the run"),
    "profile": dropped("log.profile_steps says which steps are traced"),
    "check_for_nan_in_loss_and_grad": dropped("a step that is not finite is never taken"),
    "train_data_exact_num_epochs": option("train.epochs", number),
}
RULES |= {key: Rule(_shape) for key in _SHAPE}
RULES |= NO_COUNTERPART | megatron_experts.RULES


def _random(conversion: Conversion) -> str:
    facts, save = conversion.facts, conversion.options.get("checkpoint.dir")
    starts = facts.get("load")
    if starts is None and conversion.given("load", "pretrained_checkpoint"):  # only the script knows which
        return "checkpoint" if facts.get("finetune") else "random"
    return "random" if starts is None or (starts == save and not facts.get("finetune")) else "checkpoint"


def _split(conversion: Conversion) -> float | None:
    """Returns Megatron's default share of validation data, where data_path is given and split is not."""
    return 0.03 if conversion.given("data_path") and not conversion.given("split", "valid_data_path") else None


_EXPERTS = "expert_model_parallel_size"
DEFAULTS: dict[str, Default | Ours] = {
    "model.path": Ours("the model has to be named"),
    "model.init": Default(_random, "CheckpointConfig.load = None, or the folder that the run saves to"),
    "model.dtype": Default("float32", "TransformerConfig.bf16 and fp16 = False"),
    "data.train": Ours("the data has to be named"),
    "data.mix": Ours("all prefixes are named"),
    "data.validation": Ours("Megatron takes a part of data_path, this engine a file"),
    "data.tokenizer": Ours("the data is tokenised already"),
    "data.seq_length": Ours("Megatron refuses a run without seq_length"),
    "data.packing": Default("concatenate", "GPTDataset: documents end to end, cut into rows"),
    "data.num_workers": Ours("changes the speed, not what is computed"),
    "optim.lr": Ours("Megatron refuses a run without lr"),
    "optim.schedule": Default("linear", "SchedulerConfig.lr_decay_style"),
    "optim.min_lr": Default(0.0, "OptimizerConfig.min_lr"),
    "optim.warmup_steps": Default(0, "SchedulerConfig.lr_warmup_iters"),
    "optim.warmup_ratio": Default(None, "SchedulerConfig.lr_warmup_fraction"),
    "optim.weight_decay": Default(0.01, "OptimizerConfig.weight_decay"),
    "optim.betas": Default([0.9, 0.999], "OptimizerConfig.adam_beta1 and adam_beta2"),
    "optim.eps": Default(1e-8, "OptimizerConfig.adam_eps"),
    "optim.clip_grad_norm": Default(1.0, "OptimizerConfig.clip_grad"),
    "optim.loss_scale": Ours("2^32 in OptimizerConfig.initial_loss_scale, which halves to 2^16 within 16 steps"),
    "optim.loss_scale_window": Default(1000, "OptimizerConfig.loss_scale_window"),
    "train.micro_batch_size": Ours("Megatron refuses a run without micro_batch_size"),
    "train.global_batch_size": Default(1, "TrainingConfig.global_batch_size = micro_batch_size x data-parallel ranks"),
    "train.steps": Ours("Megatron refuses a run without train_iters or train_samples"),
    "train.epochs": Ours("steps end a run of Megatron's"),
    "train.seed": Default(1234, "RNGConfig.seed"),
    "train.eval_every": Default(0, "ValidationConfig.eval_interval = None"),
    "train.eval_samples": Default(None, "ValidationConfig.eval_iters, where there is an eval_interval"),
    "train.collective_timeout": Default(600.0, "DistributedInitConfig.distributed_timeout_minutes = 10"),
    "memory.recompute": Default("selective", "TransformerConfig.recompute_granularity = None"),
    "memory.recompute_layers": Default(None, "TransformerConfig.recompute_num_layers"),
    "memory.offload_optimizer": Default(False, "OptimizerConfig.optimizer_cpu_offload"),
    "memory.offload_weights": Default(False, "no such option"),
    "memory.offload_activations": Default(False, "TransformerConfig.cpu_offloading"),
    "parallel.shard": Default("none", "DistributedDataParallelConfig.use_distributed_optimizer"),
    "parallel.tensor": Default(1, "ModelParallelConfig.tensor_model_parallel_size"),
    "parallel.pipeline": Default(1, "ModelParallelConfig.pipeline_model_parallel_size"),
    "parallel.virtual": Default(None, "ModelParallelConfig.virtual_pipeline_model_parallel_size"),
    "parallel.context": Default(1, "ModelParallelConfig.context_parallel_size"),
    "parallel.context_method": Default("ring", "TransformerConfig.cp_comm_type = p2p"),
    "train.router_aux_loss_coef": Default(0.0, "TransformerConfig.moe_aux_loss_coeff"),
    "parallel.expert": Default(1, "ModelParallelConfig.expert_model_parallel_size"),
    "parallel.expert_tensor": Default(
        lambda conversion: conversion.options.get("parallel.tensor") if conversion.given(_EXPERTS) else None,
        "ModelParallelConfig.expert_tensor_parallel_size = tensor_model_parallel_size",
    ),
    "parallel.sequence": Default(
        lambda conversion: False if conversion.options.get("parallel.tensor", 1) > 1 else None,
        "ModelParallelConfig.sequence_parallel",
    ),
    "objective.name": Default("language_modeling", "pretrain_gpt.py: loss_func"),
    "checkpoint.dir": Ours("the run's folder has to be named"),
    "checkpoint.every": Default(0, "CheckpointConfig.save_interval = None"),
    "checkpoint.keep": Default(0, "CheckpointConfig.most_recent_k = -1"),
    "log.every": Ours("what is reported changes nothing that is computed"),
    "log.wandb_project": Default(None, "LoggerConfig.wandb_project"),
    "data.validation_split": Default(_split, "arguments.py: legacy_default_split_value = 969, 30, 1"),
    "train.last_batch": Default("full", "GPTDataset: rows continue over the ends of epochs"),
    "log.tensorboard": Default(False, "LoggerConfig.tensorboard_dir = None"),
    "trainable": Ours("without adapters everything trains"),
    "optim.lr_pattern": Default(None, "arguments.py: --decoupled-lr = None"),
    "lora.rank": Ours("forks of Megatron that have adapters name their size"),
    "lora.alpha": Ours("forks of Megatron that have adapters name their size"),
    "lora.dropout": Ours("forks of Megatron that have adapters name it"),
    "lora.targets": Ours("forks of Megatron that have adapters name them"),
    "lora.fused": Default("auto", "LoraConfig.target_modules: modules as the checkpoint has them"),
}


def _adapters(conversion: Conversion) -> bool:
    return bool(conversion.facts.get("lora", conversion.given("lora_rank")))


def _finish(conversion: Conversion) -> None:
    facts, options = conversion.facts, conversion.options
    batch = options.get("train.global_batch_size")
    for name, became in (("steps_samples", "train.steps"), ("warmup_samples", "optim.warmup_steps")):
        if name in facts and batch:
            conversion.imply("derived", name.replace("_", " "), became, max(0, facts[name] // batch), "over the batch")
        elif name in facts:
            conversion.to_fill.append(f"{became}: {facts[name]} samples over a global batch that was not given")
    row = options.get("data.seq_length")
    if batch and row:  # the fork of DeepSpeed counts tokens, and ends at what comes first
        if "steps_tokens" in facts:
            steps = facts["steps_tokens"] // (batch * row)
            options["train.steps"] = min(steps, options.get("train.steps", steps))
        if "warmup_tokens" in facts:
            conversion.imply("derived", "tokens", "optim.warmup_steps", facts["warmup_tokens"] // (batch * row))
        if "decay_tokens" in facts:
            facts["decay_steps"] = facts["decay_tokens"] // (batch * row)
    steps = options.get("train.steps")
    decay = facts.get("decay_steps") or (
        facts["decay_samples"] // batch if batch and "decay_samples" in facts else None
    )
    if decay and steps and decay != steps and options.get("optim.schedule") != "constant":
        conversion.notes.append(
            f"the schedule is over {decay} steps and the run takes {steps}: here it ends with the run, so the "
            "learning rate differs on the way"
        )
    fraction = options.get("optim.warmup_ratio")
    if fraction is not None and decay and steps and decay != steps:
        conversion.withdraw("optim.warmup_ratio", "a share of lr_decay_iters")
        conversion.imply(
            "derived", "lr_warmup_fraction", "optim.warmup_steps", int(fraction * decay), "of its schedule"
        )
    if facts.get("documents_apart"):
        conversion.imply("derived", "reset_attention_mask", "data.packing", True, "attention stays inside a document")
        conversion.imply("derived", "reset_attention_mask", "data.overlong", "cut", "long documents in pieces")
    if options.get("memory.recompute") == "full" and facts.get("recompute_method") == "block":
        conversion.imply("derived", "recompute_num_layers", "memory.recompute_layers", facts.get("recompute_layers"))
    if "virtual_layers" in facts and "shape num_hidden_layers" in facts:
        stages = (
            int(facts["shape num_hidden_layers"]) // int(options.get("parallel.pipeline", 1)) // facts["virtual_layers"]
        )
        conversion.imply("derived", "num_layers_per_virtual_pipeline_stage", "parallel.virtual", stages)
    megatron_experts.finish(conversion)
    silent = [key for key in ("hidden_dropout", "attention_dropout") if not conversion.given(key)]
    if silent:
        conversion.notes.append(
            f"{' and '.join(silent)} {'was' if len(silent) == 1 else 'were'} not given, and Megatron drops 0.1 "
            "(TransformerConfig); the base has no dropout here, and the run will differ"
        )
    _model(conversion)


def _model(conversion: Conversion) -> None:
    """Reports what model.path must be, since Megatron's own checkpoints are not read."""
    facts = conversion.facts
    if _random(conversion) == "random":
        shape = {key.removeprefix("shape "): value for key, value in facts.items() if key.startswith("shape ")}
        said = ", ".join(f"{key} {value}" for key, value in shape.items())
        conversion.to_fill.append(
            f"model.path: weights are drawn, so a folder with a config.json is enough{f': {said}' if said else ''}"
        )
    else:
        conversion.to_fill.append(
            f"model.path: {facts.get('load')} is Megatron's checkpoint, which is not read; name the model's Hugging "
            "Face folder"
        )
    programs = [str(row.given.value) for row in conversion.rows if row.given.key == PROGRAM]
    if any(name.startswith(_OTHER_MODELS) for name in programs):
        raise UserError(
            f"{programs[-1]} trains another kind of model, and only decoders are trained from Megatron's flags: give "
            "the flags of pretrain_gpt.py."
        )


_OTHER_MODELS = (
    "pretrain_bert", "pretrain_t5", "pretrain_mamba", "pretrain_hybrid", "pretrain_vlm", "pretrain_ict",
    "pretrain_retro", "pretrain_vision",
)  # fmt: skip

MEGATRON = Trainer(name="Megatron", rules=RULES, defaults=DEFAULTS, adapters=_adapters, finish=_finish)
