"""Keys of accelerate's files, and flags of the launchers: what each becomes."""

from __future__ import annotations

from engine.errors import UserError
from rankfold.migrating.conversion import (
    Conversion,
    Rule,
    dropped,
    fact,
    named_file,
    option,
    set_dtype,
    sets,
    truth,
    whole,
)
from rankfold.migrating.deepspeed_rules import auto_or, clipping, mesh, offload, stage
from rankfold.migrating.given import Given

_RENDEZVOUS = "torchrun finds the other processes: --nnodes, --node-rank, --rdzv-endpoint"
_EAGER = "not needed: ranks read their own slices of the checkpoint"


@sets("model.dtype")
def _mixed_precision(conversion: Conversion, given: Given) -> None:
    names = {"bf16": "bfloat16", "fp16": "float16", "no": "float32", "False": "float32", "fp8": "bfloat16"}
    if str(given.value) not in names:
        raise UserError(f"{given.source} gives {given.key} as {given.value!r}: write no, bf16 or fp16.")
    if names[str(given.value)] == "float32":  # a trainer that is switched to 16 bits itself stays so
        conversion.drop(given, "the trainer's own keys say the arithmetic; without them it is float32")
        return
    set_dtype(conversion, given, names[str(given.value)])


@sets()
def _distributed_type(conversion: Conversion, given: Given) -> None:
    kind = str(given.value).upper()
    if kind in ("DEEPSPEED", "FSDP", "MULTI_GPU", "MULTI_CPU", "NO", "MEGATRON_LM"):
        conversion.facts["distributed_type"] = kind
        conversion.drop(given, "one launcher for all, torchrun; parallel.shard says what is spread")
    else:
        conversion.drop(given, f"{given.value} has no counterpart")


FSDP_SHARDS = {"FULL_SHARD": "parameters", "SHARD_GRAD_OP": "gradients", "NO_SHARD": "none", "1": "parameters",
               "2": "gradients", "3": "none"}  # fmt: skip


@sets("parallel.shard")
def _fsdp(conversion: Conversion, given: Given) -> None:
    level = FSDP_SHARDS.get(str(given.value).upper())
    if level is None:
        conversion.lack(given, "set parallel.shard")
    else:
        conversion.take(given, "parallel.shard", level)


@sets("parallel.shard")
def _reshard(conversion: Conversion, given: Given) -> None:
    """Translates the resharding key: FSDP2 has true and false, early versions have FSDP1's names."""
    kinds = {"true": "parameters", "false": "gradients", **{name.lower(): FSDP_SHARDS[name] for name in FSDP_SHARDS}}
    level = kinds.get(str(given.value).lower())
    if level is None:
        conversion.lack(given, "set parallel.shard")
    else:
        conversion.take(given, "parallel.shard", level)


@sets("memory.offload_weights", "memory.offload_optimizer")
def _fsdp_offload(conversion: Conversion, given: Given) -> None:
    """Translates FSDP's CPUOffload, which keeps the states of the optimizer in host memory with the parameters."""
    conversion.take(given, "memory.offload_weights", truth(given))
    conversion.take(given, "memory.offload_optimizer", truth(given))


RULES: dict[str, Rule] = {
    "compute_environment": dropped("the machine at hand; nothing is asked of a cloud"),
    "debug": dropped("a hang is reported with every rank's place: train.hang_report_after"),
    "deepspeed_multinode_launcher": dropped(_RENDEZVOUS),
    "deepspeed_config_file": Rule(named_file),
    "config_file": Rule(named_file),
    "distributed_type": _distributed_type,
    "downcast_bf16": dropped("an option for TPUs"),
    "dynamo_backend": dropped("no compiler is used; kernels are chosen by model.kernels"),
    "enable_cpu_affinity": dropped("torchrun and numactl bind processes"),
    "gpu_ids": dropped("CUDA_VISIBLE_DEVICES chooses devices"),
    "machine_rank": dropped("torchrun --node-rank"),
    "main_process_ip": dropped(_RENDEZVOUS),
    "main_process_port": dropped(_RENDEZVOUS),
    "main_training_function": dropped("rankfold train is started"),
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
    "sharding_strategy": _fsdp,
    "fsdp_reshard_after_forward": _reshard,
    "reshard_after_forward": _reshard,
    "offload_params": _fsdp_offload,
    "activation_checkpointing": option("memory.recompute", lambda g: "full" if truth(g) else "selective"),
    "fsdp_offload_params": _fsdp_offload,
    "fsdp_activation_checkpointing": option("memory.recompute", lambda g: "full" if truth(g) else "selective"),
    "zero_stage": stage,
    "zero3_init_flag": dropped(_EAGER),
    "zero3_save_16bit_model": dropped("checkpoints keep what training changed; rankfold convert export writes a model"),
    "offload_optimizer_device": offload("memory.offload_optimizer"),
    "offload_param_device": offload("memory.offload_weights"),
    "gradient_clipping": clipping,
    "gradient_accumulation_steps": auto_or(fact("accumulation", whole, "train.global_batch_size")),
}

_FSDP = "each layer is gathered separately, and each rank reads its own part"
RULES |= {
    key: dropped(_FSDP)
    for key in (
        "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_cpu_ram_efficient_loading", "fsdp_version",
        "fsdp_sync_module_states", "fsdp_backward_prefetch", "fsdp_backward_prefetch_policy", "fsdp_forward_prefetch",
        "fsdp_use_orig_params", "fsdp_min_num_params", "fsdp_limit_all_gathers", "fsdp_ignored_modules",
        "auto_wrap_policy", "transformer_layer_cls_to_wrap", "cpu_ram_efficient_loading", "sync_module_states",
        "backward_prefetch", "forward_prefetch", "use_orig_params", "limit_all_gathers", "min_num_params",
    )
}  # fmt: skip
RULES |= {
    "fsdp_state_dict_type": dropped("checkpoints open on any layout; rankfold convert export writes a model"),
    "state_dict_type": dropped("checkpoints open on any layout; rankfold convert export writes a model"),
    "parallelism_config.parallelism_config_tp_size": mesh("tensor"),
    "parallelism_config.parallelism_config_cp_size": mesh("context"),
    "parallelism_config.parallelism_config_sp_size": mesh("context"),
    "parallelism_config.*": dropped("all ranks left over become data parallel"),
    "megatron_lm_config.megatron_lm_tp_degree": mesh("tensor"),
    "megatron_lm_config.megatron_lm_pp_degree": mesh("pipeline"),
    "megatron_lm_config.megatron_lm_gradient_clipping": clipping,
    "megatron_lm_config.megatron_lm_sequence_parallelism": option("parallel.sequence", truth),
    "megatron_lm_config.megatron_lm_recompute_activations": option(
        "memory.recompute", lambda g: "attention" if truth(g) else "selective"
    ),
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": option(
        "parallel.shard", lambda g: "optimizer" if truth(g) else "none"
    ),
    "megatron_lm_config.*": dropped("the number of micro-batches follows from the batch"),
    "fp8_config.*": dropped("model.base_dtype fp8 stores the base in 8 bits"),
    "dynamo_config.*": dropped("no compiler is used; kernels are chosen by model.kernels"),
    "deepspeed_config": dropped("empty"), "fsdp_config": dropped("empty"), "megatron_lm_config": dropped("empty"),
    "deepspeed_hostfile": dropped(_RENDEZVOUS), "deepspeed_exclusion_filter": dropped(_RENDEZVOUS),
    "deepspeed_inclusion_filter": dropped(_RENDEZVOUS), "mpirun_config.*": dropped(_RENDEZVOUS),
    "deepspeed_moe_layer_cls_names": dropped("models with experts are not supported"),
    "ipex_config.*": dropped("model.kernels chooses kernels"),
    "tpu_*": dropped("an option for TPUs"), "command_file": dropped("an option for TPUs"),
    "multi_gpu": dropped(_RENDEZVOUS), "dynamo_mode": dropped("no compiler is used"),
    "main_process_ip": dropped(_RENDEZVOUS), "num_cpu_threads_per_process": dropped("OMP_NUM_THREADS says it"),
}  # fmt: skip
RULES |= {
    key: dropped("the machine at hand; nothing is asked of a cloud")
    for key in ("ec2_instance_type", "iam_role_name", "image_uri", "py_version", "pytorch_version", "region", "profile",
                "transformers_version", "sagemaker_*", "additional_args", "base_job_name", "use_torchrun")
}  # fmt: skip
RULES |= {
    "nproc_per_node": fact("processes_per_node", whole, became="torchrun --nproc-per-node"),
    "num_gpus": fact("processes_per_node", whole, became="torchrun --nproc-per-node"),
    "NUM_GPUS_PER_WORKER": fact("processes_per_node", whole, became="torchrun --nproc-per-node"),
    "LOCAL_WORLD_SIZE": dropped("torchrun sets it"),
    "nnodes": fact("machines", whole, became="torchrun --nnodes"),
    "NUM_WORKERS": fact("machines", whole, became="torchrun --nnodes"),
    "MP_SIZE": option("parallel.tensor", whole),
    "model_parallel_size": option("parallel.tensor", whole),
    "tensor_model_parallel_size": mesh("tensor"),
    "pipeline_model_parallel_size": mesh("pipeline"),
    "context_parallel_size": mesh("context"),
    "standalone": dropped(_RENDEZVOUS),
    "distributed_backend": dropped("NCCL on GPUs, Gloo on CPUs"),
    "include": dropped("CUDA_VISIBLE_DEVICES chooses devices"),
    "module": dropped("rankfold train is started"),
    "local_rank": dropped("torchrun sets it"),
}
RULES |= {
    key: dropped(_RENDEZVOUS)
    for key in (
        "node_rank", "master_addr", "master_port", "hostfile", "rdzv_id", "rdzv_endpoint", "rdzv_conf",
        "main_process_ip", "num_nodes", "HOST_FILE_PATH", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK",
    )
}  # fmt: skip
RULES |= {
    key: dropped("the scheduler's own option, where the run is started by one")
    for key in (
        "container_image", "container_mounts", "container_workdir", "job_name", "nodes", "ntasks", "ntasks_per_node",
        "account", "partition", "gpus_per_task", "gpus_per_node", "gpus", "mem", "time", "uid", "error", "output",
        "cpus_per_task", "l", "u", "lu",
        "gres", "qos", "exclusive", "kill_on_bad_exit", "mpi", "wait",
    )
}  # fmt: skip
