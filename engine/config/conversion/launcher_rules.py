"""Keys of accelerate's and DeepSpeed's files and of the launchers: what each becomes."""

from __future__ import annotations

from engine.config.conversion.conversion import (
    Conversion,
    Rule,
    dropped,
    fact,
    number,
    option,
    sets,
    truth,
    whole,
)
from engine.config.conversion.reading import Given
from engine.config.model import ModelOptions
from engine.errors import UserError

SHARDS = {0: "none", 1: "optimizer", 2: "gradients", 3: "parameters"}

_RENDEZVOUS = "torchrun finds the other processes: --nnodes, --node-rank, --rdzv-endpoint"
_BUCKETS = "one size for all buckets here, parallel.bucket_mb; its default is kept"
_OVERLAP = "reductions always go on beside the backward pass"
_EAGER = "nothing of the kind is needed: ranks read their own slices of the checkpoint"


def set_dtype(conversion: Conversion, given: Given, dtype: str) -> None:
    """The arithmetic, where this engine has it; a 16-bit dtype it does not have becomes bfloat16."""
    try:
        ModelOptions(path="model", dtype=dtype)  # type: ignore[arg-type]
    except UserError:
        conversion.take(given, "model.dtype", "bfloat16", f"{dtype} is not to be had here")
        return
    conversion.take(given, "model.dtype", dtype)


def dtype_switch(dtype: str) -> Rule:
    """For a key that switches an arithmetic on."""

    def rule(conversion: Conversion, given: Given) -> None:
        if truth(given):
            set_dtype(conversion, given, dtype)
        else:
            conversion.drop(given, "switched off")

    return Rule(rule, ("model.dtype",))


def _dtype_or_auto(dtype: str) -> Rule:
    switch = dtype_switch(dtype)

    def rule(conversion: Conversion, given: Given) -> None:
        if given.value == "auto":
            conversion.drop(given, "the command line says it")
        else:
            switch.apply(conversion, given)

    return Rule(rule, switch.options)


@sets("model.dtype")
def _mixed_precision(conversion: Conversion, given: Given) -> None:
    names = {"bf16": "bfloat16", "fp16": "float16", "no": "float32", "False": "float32", "fp8": "bfloat16"}
    if str(given.value) not in names:
        raise UserError(f"{given.source} gives {given.key} as {given.value!r}: write no, bf16 or fp16.")
    set_dtype(conversion, given, names[str(given.value)])


@sets("parallel.shard")
def _stage(conversion: Conversion, given: Given) -> None:
    stage = whole(given)
    if stage not in SHARDS:
        raise UserError(f"{given.source} gives {given.key} as {stage}, but ZeRO has stages 0 to 3: use one of them.")
    conversion.take(given, "parallel.shard", SHARDS[stage], f"ZeRO stage {stage}")


def _offload(option_name: str) -> Rule:
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
def _clipping(conversion: Conversion, given: Given) -> None:
    if given.value == "auto":
        conversion.drop(given, "the command line says it")
        return
    conversion.facts["deepspeed_clipping"] = number(given)
    conversion.take(given, "optim.clip_grad_norm", number(given))


def _auto_or(rule: Rule) -> Rule:
    """DeepSpeed's "auto" leaves a value to the trainer's flags."""

    def either(conversion: Conversion, given: Given) -> None:
        if given.value == "auto":
            conversion.drop(given, "auto, the command line says it")
        else:
            rule.apply(conversion, given)

    return Rule(either, rule.options)


@sets()
def _distributed_type(conversion: Conversion, given: Given) -> None:
    kind = str(given.value).upper()
    if kind in ("DEEPSPEED", "FSDP", "MULTI_GPU", "MULTI_CPU", "NO", "MEGATRON_LM"):
        conversion.facts["distributed_type"] = kind
        conversion.drop(given, "one launcher for all, torchrun; parallel.shard says what is spread")
    else:
        conversion.drop(given, f"{given.value} has no counterpart")


@sets()
def _optimizer_type(conversion: Conversion, given: Given) -> None:
    name = str(given.value).lower()
    if name in ("adamw", "adam", "fusedadam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "cpuadam"):
        conversion.drop(given, "AdamW is the optimizer; optim.backend auto takes its fastest code")
    else:
        conversion.drop(given, f"{given.value} is not to be had: AdamW is the optimizer")


@sets("optim.schedule")
def _schedule_type(conversion: Conversion, given: Given) -> None:
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if str(given.value) in kinds:
        conversion.take(given, "optim.schedule", kinds[str(given.value)])
    else:
        conversion.drop(given, f"{given.value} has no counterpart: optim.schedule is constant, linear or cosine")


@sets("optim.betas")
def _betas(conversion: Conversion, given: Given) -> None:
    if not isinstance(given.value, list) or len(given.value) != 2:
        raise UserError(f"{given.source} gives {given.key} as {given.value!r}, but two numbers are expected.")
    conversion.take(given, "optim.betas", [float(value) for value in given.value])


@sets()
def _named_file(conversion: Conversion, given: Given) -> None:
    if given.file_read:
        conversion.drop(given, "read, and converted key by key")
    else:
        conversion.miss(given, "no such file beside this one: put it there, or convert it alone")


def _mesh(name: str) -> Rule:
    return option(f"parallel.{name}", whole)


FSDP_SHARDS = {"FULL_SHARD": "parameters", "SHARD_GRAD_OP": "gradients", "NO_SHARD": "none", "1": "parameters",
               "2": "gradients", "3": "none"}  # fmt: skip


@sets("parallel.shard")
def _fsdp(conversion: Conversion, given: Given) -> None:
    level = FSDP_SHARDS.get(str(given.value).upper())
    if level is None:
        conversion.drop(given, f"{given.value} has no counterpart: set parallel.shard")
    else:
        conversion.take(given, "parallel.shard", level)


_ACCELERATE: dict[str, Rule] = {
    "compute_environment": dropped("the machine at hand; nothing is asked of a cloud"),
    "debug": dropped("a hang is reported with every rank's place: train.hang_report_after"),
    "deepspeed_multinode_launcher": dropped(_RENDEZVOUS),
    "deepspeed_config_file": _named_file,
    "config_file": _named_file,
    "distributed_type": _distributed_type,
    "downcast_bf16": dropped("an option for TPUs"),
    "dynamo_backend": dropped("no compiler is used; kernels are chosen by model.kernels"),
    "enable_cpu_affinity": dropped("torchrun and numactl bind processes"),
    "gpu_ids": dropped("CUDA_VISIBLE_DEVICES chooses devices"),
    "machine_rank": dropped("torchrun --node-rank"),
    "main_process_ip": dropped(_RENDEZVOUS),
    "main_process_port": dropped(_RENDEZVOUS),
    "main_training_function": dropped("tools/pretrain_lora.py is started"),
    "mixed_precision": _mixed_precision,
    "num_machines": fact("machines", whole, became="torchrun --nnodes"),
    "num_processes": fact("processes", whole, became="torchrun --nproc-per-node, times --nnodes"),
    "rdzv_backend": dropped(_RENDEZVOUS),
    "same_network": dropped(_RENDEZVOUS),
    "tpu_env": dropped("an option for TPUs"),
    "tpu_use_cluster": dropped("an option for TPUs"),
    "tpu_use_sudo": dropped("an option for TPUs"),
    "use_cpu": dropped("a GPU is used where torch sees one; CUDA_VISIBLE_DEVICES= hides it"),
    "use_deepspeed": dropped("parallel.shard says what is spread"),
    "commands": dropped("an option for TPUs"),
    "fsdp_sharding_strategy": _fsdp,
    "fsdp_offload_params": option("memory.offload_weights", truth),
    "fsdp_activation_checkpointing": option("memory.recompute", lambda g: "full" if truth(g) else "selective"),
    "zero_stage": _stage,
    "zero3_init_flag": dropped(_EAGER),
    "zero3_save_16bit_model": dropped("checkpoints keep what training changed; tools/convert.py export writes a model"),
    "offload_optimizer_device": _offload("memory.offload_optimizer"),
    "offload_param_device": _offload("memory.offload_weights"),
    "gradient_clipping": _clipping,
    "gradient_accumulation_steps": _auto_or(fact("accumulation", whole, "train.global_batch_size")),
}

_DEEPSPEED: dict[str, Rule] = {
    "train_batch_size": _auto_or(option("train.global_batch_size", whole)),
    "train_micro_batch_size_per_gpu": _auto_or(fact("micro", whole, "train.micro_batch_size")),
    "steps_per_print": _auto_or(option("log.every", whole)),
    "wall_clock_breakdown": dropped("always in the run's folder telemetry, see tools/report.py"),
    "dump_state": dropped("the run's folder has config.yaml"),
    "zero_allow_untested_optimizer": dropped("every level of parallel.shard is tested with AdamW"),
    "zero_force_ds_cpu_optimizer": dropped("offloaded state is updated on the device"),
    "zero_optimization.stage": _stage,
    "zero_optimization.offload_optimizer.device": _offload("memory.offload_optimizer"),
    "zero_optimization.offload_param.device": _offload("memory.offload_weights"),
    "zero_optimization.offload_optimizer.pin_memory": dropped("copies are always pinned"),
    "zero_optimization.offload_param.pin_memory": dropped("copies are always pinned"),
    "zero_optimization.cpu_offload": option("memory.offload_optimizer", truth),
    "zero_optimization.contiguous_gradients": dropped("gradients always lie in one buffer"),
    "zero_optimization.overlap_comm": dropped(_OVERLAP),
    "zero_optimization.reduce_scatter": dropped("parallel.shard gradients and parameters reduce-scatter"),
    "zero_optimization.round_robin_gradients": dropped("each rank owns an equal part of each bucket"),
    "zero_optimization.gather_16bit_weights_on_model_save": dropped("tools/convert.py export writes a model"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": dropped("tools/convert.py export writes a model"),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": dropped("tools/convert.py export writes a model"),
    "bf16.enabled": _dtype_or_auto("bfloat16"),
    "bfloat16.enabled": _dtype_or_auto("bfloat16"),
    "fp16.enabled": _dtype_or_auto("float16"),
    "amp.enabled": dropped("model.dtype says in which arithmetic"),
    "optimizer.type": _optimizer_type,
    "optimizer.params.lr": _auto_or(option("optim.lr", number)),
    "optimizer.params.betas": _auto_or(_betas),
    "optimizer.params.eps": _auto_or(option("optim.eps", number)),
    "optimizer.params.weight_decay": _auto_or(option("optim.weight_decay", number)),
    "optimizer.params.torch_adam": dropped("optim.backend auto takes the fastest code"),
    "optimizer.params.adam_w_mode": dropped("weight decay is always decoupled"),
    "scheduler.type": _schedule_type,
    "scheduler.params.warmup_min_lr": dropped("the warm-up begins at 0"),
    "scheduler.params.warmup_max_lr": _auto_or(option("optim.lr", number)),
    "scheduler.params.warmup_num_steps": _auto_or(option("optim.warmup_steps", whole)),
    "scheduler.params.total_num_steps": _auto_or(dropped("the schedule ends with the run: train.steps")),
    "tensorboard.enabled": option("log.tensorboard", truth),
    "activation_checkpointing.partition_activations": dropped("memory.recompute says what is kept"),
    "communication_data_type": dropped("gradients are always summed in fp32"),
    "gradient_predivide_factor": dropped("gradients are divided by the global batch's tokens"),
    "prescale_gradients": dropped("gradients are divided by the global batch's tokens"),
    "sparse_gradients": dropped("there are none"),
    "wandb.enabled": dropped("there is no client for it: log.metrics, log.tensorboard"),
}

_BUCKET_KEYS = (
    "allgather_bucket_size", "reduce_bucket_size", "stage3_prefetch_bucket_size", "sub_group_size",
    "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "allgather_partitions", "load_from_fp32_weights", "elastic_checkpoint", "prefetch_bucket_size",
    "cpu_offload_params", "cpu_offload_use_pin_memory",
)  # fmt: skip
_DEEPSPEED |= {f"zero_optimization.{key}": dropped(_BUCKETS) for key in _BUCKET_KEYS}
_SCALING = "loss scaling belongs to float16"
_DEEPSPEED |= {
    f"fp16.{key}": dropped(_SCALING)
    for key in (
        "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale", "auto_cast",
        "consecutive_hysteresis",
    )
}  # fmt: skip

_LAUNCHERS: dict[str, Rule] = {
    "nproc_per_node": fact("processes_per_node", whole, became="torchrun --nproc-per-node"),
    "num_gpus": fact("processes_per_node", whole, became="torchrun --nproc-per-node"),
    "NUM_GPUS_PER_WORKER": fact("processes_per_node", whole, became="torchrun --nproc-per-node"),
    "LOCAL_WORLD_SIZE": dropped("torchrun sets it"),
    "nnodes": fact("machines", whole, became="torchrun --nnodes"),
    "NUM_WORKERS": fact("machines", whole, became="torchrun --nnodes"),
    "MP_SIZE": option("parallel.tensor", whole),
    "model_parallel_size": option("parallel.tensor", whole),
    "tensor_model_parallel_size": _mesh("tensor"),
    "pipeline_model_parallel_size": _mesh("pipeline"),
    "context_parallel_size": _mesh("context"),
    "standalone": dropped(_RENDEZVOUS),
    "distributed_backend": dropped("NCCL on GPUs, Gloo on CPUs"),
    "include": dropped("CUDA_VISIBLE_DEVICES chooses devices"),
    "module": dropped("tools/pretrain_lora.py is started"),
    "local_rank": dropped("torchrun sets it"),
}
_LAUNCHERS |= {
    key: dropped(_RENDEZVOUS)
    for key in (
        "node_rank", "master_addr", "master_port", "hostfile", "rdzv_id", "rdzv_endpoint", "rdzv_conf",
        "main_process_ip", "num_nodes", "HOST_FILE_PATH", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK",
    )
}  # fmt: skip

RULES: dict[str, Rule] = _ACCELERATE | _DEEPSPEED | _LAUNCHERS


def rule_for(key: str) -> Rule | None:
    """Of a key as it was read; what accelerate nests as deepspeed_config.* and fsdp_config.* is found too."""
    for prefix in ("deepspeed_config.", "fsdp_config.", ""):
        if key.startswith(prefix) and key.removeprefix(prefix) in RULES:
            return RULES[key.removeprefix(prefix)]
    return None
