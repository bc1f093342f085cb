"""Keys of DeepSpeed's files: what each becomes."""

from __future__ import annotations

from engine.errors import UserError
from rankfold.migrating.conversion import (
    Conversion,
    Rule,
    dropped,
    dtype_switch,
    number,
    option,
    sets,
    truth,
    whole,
)
from rankfold.migrating.given import Given

SHARDS = {0: "none", 1: "optimizer", 2: "gradients", 3: "parameters"}

_BUCKETS = "one size for all buckets here, parallel.bucket_mb; its default is kept"
_OVERLAP = "reductions always overlap with the backward pass"


def _dtype_or_auto(dtype: str) -> Rule:
    switch = dtype_switch(dtype)

    def rule(conversion: Conversion, given: Given) -> None:
        if given.value == "auto":
            conversion.drop(given, "the command line sets it")
        else:
            switch.apply(conversion, given)

    return Rule(rule, switch.options)


@sets("parallel.shard")
def stage(conversion: Conversion, given: Given) -> None:
    stage = whole(given)
    if stage not in SHARDS:
        raise UserError(f"{given.source} gives {given.key} as {stage}, but ZeRO has stages 0 to 3: use one of them.")
    conversion.take(given, "parallel.shard", SHARDS[stage], f"ZeRO stage {stage}")


def offload(option_name: str) -> Rule:
    def rule(conversion: Conversion, given: Given) -> None:
        place = str(given.value).lower()
        if place in ("none", "null", "false"):
            conversion.take(given, option_name, False)
        elif place in ("cpu", "nvme"):
            conversion.take(given, option_name, True, "in host memory, there is no NVMe" if place == "nvme" else "")
        else:
            raise UserError(f"{given.source} gives {given.key} as {given.value!r}: write none or cpu.")

    return Rule(rule, (option_name,))


@sets("optim.clip_grad_norm")
def clipping(conversion: Conversion, given: Given) -> None:
    if given.value == "auto":
        conversion.drop(given, "the command line sets it")
        return
    conversion.facts["deepspeed_clipping"] = number(given)
    conversion.take(given, "optim.clip_grad_norm", number(given))


def auto_or(rule: Rule) -> Rule:
    """Returns the rule that skips "auto", which leaves a value to the trainer's flags, and applies `rule` otherwise."""

    def either(conversion: Conversion, given: Given) -> None:
        if given.value == "auto":
            conversion.drop(given, "auto: the command line sets it")
        else:
            rule.apply(conversion, given)

    return Rule(either, rule.options)


@sets()
def _optimizer_type(conversion: Conversion, given: Given) -> None:
    name = str(given.value).lower()
    if name in (
        "adamw",
        "adam",
        "fusedadam",
        "deepspeedcpuadam",
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_hf",
        "cpuadam",
    ):
        conversion.drop(given, "AdamW is the optimizer; optim.backend auto takes its fastest code")
    else:
        conversion.lack(given, "AdamW is the optimizer")


SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""DeepSpeed's schedulers -> the schedule here."""


@sets("optim.schedule")
def _schedule_type(conversion: Conversion, given: Given) -> None:
    conversion.facts["deepspeed_schedule"] = str(given.value)
    if str(given.value) in SCHEDULES:
        conversion.take(given, "optim.schedule", SCHEDULES[str(given.value)])
    else:
        conversion.lack(given, "optim.schedule is constant, linear or cosine")


@sets("optim.betas")
def _betas(conversion: Conversion, given: Given) -> None:
    if not isinstance(given.value, list) or len(given.value) != 2:
        raise UserError(f"{given.source} gives {given.key} as {given.value!r}, but two numbers are expected.")
    conversion.take(given, "optim.betas", [float(value) for value in given.value])


def mesh(name: str) -> Rule:
    return option(f"parallel.{name}", whole)


def _warmup_type(conversion: Conversion, given: Given) -> None:
    conversion.know(given, "warmup_type", str(given.value), "the warm-up is linear")


RULES: dict[str, Rule] = {
    "train_batch_size": auto_or(option("train.global_batch_size", whole)),
    "train_micro_batch_size_per_gpu": auto_or(option("train.micro_batch_size", whole)),
    "steps_per_print": auto_or(option("log.every", whole)),
    "wall_clock_breakdown": dropped("always in the run's folder telemetry, see rankfold report"),
    "dump_state": dropped("the run's folder has config.yaml"),
    "zero_allow_untested_optimizer": dropped("every level of parallel.shard is tested with AdamW"),
    "zero_force_ds_cpu_optimizer": dropped("offloaded state is updated on the device"),
    "zero_optimization.stage": stage,
    "zero_optimization.offload_optimizer.device": offload("memory.offload_optimizer"),
    "zero_optimization.offload_param.device": offload("memory.offload_weights"),
    "zero_optimization.offload_optimizer.pin_memory": dropped("copies are always pinned"),
    "zero_optimization.offload_param.pin_memory": dropped("copies are always pinned"),
    "zero_optimization.cpu_offload": option("memory.offload_optimizer", truth),
    "zero_optimization.cpu_offload_params": option("memory.offload_weights", truth),
    "zero_optimization.contiguous_gradients": dropped("gradients are always in one buffer"),
    "zero_optimization.overlap_comm": dropped(_OVERLAP),
    "zero_optimization.reduce_scatter": dropped("parallel.shard gradients and parameters reduce-scatter"),
    "zero_optimization.round_robin_gradients": dropped("each rank owns an equal part of each bucket"),
    "zero_optimization.gather_16bit_weights_on_model_save": dropped("rankfold convert export writes a model"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": dropped("rankfold convert export writes a model"),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": dropped("rankfold convert export writes a model"),
    "bf16.enabled": _dtype_or_auto("bfloat16"),
    "bfloat16.enabled": _dtype_or_auto("bfloat16"),
    "fp16.enabled": _dtype_or_auto("float16"),
    "amp.enabled": dropped("model.dtype sets the precision"),
    "optimizer.type": _optimizer_type,
    "optimizer.params.lr": auto_or(option("optim.lr", number)),
    "optimizer.params.betas": auto_or(_betas),
    "optimizer.params.eps": auto_or(option("optim.eps", number)),
    "optimizer.params.weight_decay": auto_or(option("optim.weight_decay", number)),
    "optimizer.params.torch_adam": dropped("optim.backend auto takes the fastest code"),
    "optimizer.params.adam_w_mode": dropped("weight decay is always decoupled"),
    "scheduler.type": _schedule_type,
    "scheduler.params.warmup_type": Rule(_warmup_type),
    "scheduler.params.warmup_ratio": auto_or(option("optim.warmup_ratio", number)),
    "scheduler.params.last_batch_iteration": dropped("a run resumes where it stopped"),
    "scheduler.params.warmup_min_lr": dropped("the warm-up begins at 0"),
    "scheduler.params.warmup_max_lr": auto_or(option("optim.lr", number)),
    "scheduler.params.warmup_num_steps": auto_or(option("optim.warmup_steps", whole)),
    "scheduler.params.total_num_steps": auto_or(dropped("the schedule ends with the run: train.steps")),
    "tensorboard.enabled": option("log.tensorboard", truth),
    "activation_checkpointing.partition_activations": dropped("memory.recompute says what is kept"),
    "communication_data_type": dropped("gradients are always summed in fp32"),
    "gradient_predivide_factor": dropped("gradients are divided by the global batch's tokens"),
    "prescale_gradients": dropped("gradients are divided by the global batch's tokens"),
    "sparse_gradients": dropped("there are none"),
    "wandb.enabled": dropped("log.wandb_project and log.mlflow_experiment name where figures go"),
}

_BUCKET_KEYS = (
    "allgather_bucket_size",
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "allgather_partitions",
    "load_from_fp32_weights",
    "elastic_checkpoint",
    "prefetch_bucket_size",
    "cpu_offload_use_pin_memory",
)
RULES |= {f"zero_optimization.{key}": dropped(_BUCKETS) for key in _BUCKET_KEYS}
_SCALING = "loss scaling belongs to float16"
RULES |= {
    f"fp16.{key}": dropped(_SCALING)
    for key in (
        "loss_scale",
        "loss_scale_window",
        "initial_scale_power",
        "hysteresis",
        "min_loss_scale",
        "auto_cast",
        "consecutive_hysteresis",
    )
}

_OBSERVED = "telemetry, log.metrics and rankfold report show it"
RULES |= {
    "zero_optimization.*": dropped(_BUCKETS),
    "zero_optimization.zenflow.*": dropped("each update is made before the next step"),
    "zero_optimization.offload_optimizer.*": dropped("two slots of pinned memory"),
    "zero_optimization.offload_param.*": dropped("two layers are on the device at a time"),
    "bf16.*": dropped("masters, gradients and optimizer state are always float32"),
    "optimizer.params.*": dropped("optim.betas, optim.eps and optim.weight_decay are all there is"),
    "scheduler.params.cos_min_ratio": Rule(
        lambda conversion, given: conversion.know(given, "min_lr_share", number(given), "optim.min_lr"),
        ("optim.min_lr",),
    ),
    "autotuning.*": dropped("rankfold plan memory searches layouts"),
    "compile.*": dropped("no compiler is used"),
    "flops_profiler.*": dropped(_OBSERVED),
    "comms_logger.*": dropped(_OBSERVED),
    "monitor_config.*": dropped(_OBSERVED),
    "comms_config.*": dropped(_OBSERVED),
    "csv_monitor.*": dropped(_OBSERVED),
    "tensorboard.*": dropped(_OBSERVED),
    "memory_breakdown": dropped(_OBSERVED),
    "wandb.*": dropped(_OBSERVED),
    "timers.*": dropped(_OBSERVED),
    "activation_checkpointing.*": dropped("memory.recompute says what is kept"),
    "aio.*": dropped("there is no NVMe"),
    "elasticity.*": dropped("a run resumes on any number of ranks"),
    "data_types.*": dropped("gradients are always summed in fp32"),
    "disable_allgather": dropped(_BUCKETS),
    "hybrid_engine.*": dropped("rankfold generate writes text"),
    "compression_training.*": dropped("weights are not compressed while they train"),
    "data_efficiency.*": dropped("each sample is read as often as the others"),
    "curriculum_learning.*": dropped("each sample is read as often as the others"),
    "tensor_parallel.autotp_size": mesh("tensor"),
    "tensor_parallel.*": dropped("each linear is cut by what it is"),
    "sequence_parallel_size": mesh("context"),
    "pipeline.*": dropped("parallel.layers_per_stage cuts the model"),
    "seq_parallel_communication_data_type": dropped("keys and values are sent in model.dtype"),
    "checkpoint.*": dropped("checkpoints are this engine's own"),
    "moe.*": dropped("options for experts are not converted"),
    "_comment": dropped("a comment"),
    "use_data_before_expert_parallelism": dropped("neighbouring ranks share experts"),
    "dataloader_drop_last": dropped("train.global_batch_size rows make a step"),
}
