"""Rules for Megatron-SWIFT, ms-swift's training with Megatron-Core: `megatron sft`, `megatron pt` and `megatron
rlhf`. Read in version 4.6.0, with the older names of 3.9 and 3.12 (max_epochs, save, save_interval, eval_interval,
log_interval).
"""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, Rule, dropped, fact, number, option, sets, text, whole
from rankfold.migrating.given import Given
from rankfold.migrating.trainer import Default, Ours, Trainer
from rankfold.migrating.trainers import megatron, megatron_experts, shared, swift

KEYS = frozenset({
    "micro_batch_size", "global_batch_size", "train_iters", "tensor_model_parallel_size", "lr", "mcore_model",
    "mcore_adapter", "lr_warmup_fraction", "lr_warmup_iters", "no_save_optim", "no_save_rng",
    "expert_model_parallel_size",
    "pipeline_model_parallel_size", "min_lr",
})  # fmt: skip
"""Keys by which it is told from ms-swift's other commands."""


@sets("model.path")
def mcore_model(conversion: Conversion, given: Given) -> None:
    """Reports weights in Megatron's own format, which are not read."""
    if given.value in (None, ""):
        conversion.drop(given, "none")
    else:
        conversion.know(given, "mcore", str(given.value), "model.path: the Hugging Face folder of these weights")


@sets("memory.recompute")
def recompute(conversion: Conversion, given: Given) -> None:
    if str(given.value).lower() == "none":
        conversion.take(given, "memory.recompute", "selective")
    else:
        megatron.recompute.apply(conversion, given)


RULES: dict[str, Rule] = megatron.RULES | {
    key: rule
    for key, rule in swift.RULES.items()
    if key not in ("seed", "lr_scheduler_type", "optimizer", "label_smoothing", "weight_decay", "warmup_ratio")
} | {
    key: megatron.RULES[key]
    for key in ("weight_decay", "adam_beta1", "adam_beta2", "clip_grad", "optimizer", "sequence_parallel", "seed",
                "context_parallel_size", "tensor_model_parallel_size", "recompute_method", "recompute_num_layers")
} | {
    "label_smoothing": option("objective.label_smoothing", number),
    "recompute_granularity": recompute,
    "recompute_modules": dropped("memory.recompute attention recomputes the core of attention"),
    "num_train_epochs": option("train.epochs", number),
    "max_epochs": option("train.epochs", number),
    "train_iters": shared.steps,
    "output_dir": option("checkpoint.dir", text),
    "save": option("checkpoint.dir", text),
    "save_steps": option("checkpoint.every", whole),
    "save_interval": option("checkpoint.every", whole),
    "eval_steps": fact("eval_steps", whole, "train.eval_every"),
    "eval_interval": fact("eval_steps", whole, "train.eval_every"),
    "eval_iters": fact("eval_iters_given", whole, "train.eval_samples"),
    "logging_steps": option("log.every", whole),
    "log_interval": option("log.every", whole),
    "dataloader_num_workers": option("data.num_workers", whole),
    "mcore_model": mcore_model, "mcore_ref_model": mcore_model, "load": mcore_model,
    "mcore_adapter": shared.off_or_lack("an adapter in Megatron's own format is not read"),
    "mcore_ref_adapter": shared.off_or_lack("an adapter in Megatron's own format is not read"),
    "perform_initialization": option("model.init", lambda given: "random" if given.value else "checkpoint"),
    "no_initialization": dropped("weights are read from the checkpoint"),
    "calculate_KL": dropped("the divergence is always measured"),
    "reference_free": shared.off_or_refuse("a loss without a reference"),
    "f_divergence_type": shared.only_or_refuse("reverse_kl", "another divergence"),
    "mtp_num_layers": shared.off_or_refuse("several tokens at a time"),
    "wandb_project": shared.wandb_project,
    "save_strategy": shared.strategy,
    "language_model_only": dropped("the tower stays frozen"),
    "linear_decoupled_in_proj": dropped("linears are those of the checkpoint"),
    "apply_wd_to_qk_layernorm": shared.off_or_lack("norms have no weight decay"),
    "megatron_extra_kwargs": shared.off_or_lack("options of Megatron's own are not read"),
    "fp4_format": shared.off_or_lack("model.base_dtype stores the base in fewer bits"),
    "fp8_format": shared.off_or_lack("model.base_dtype stores the base in 8 bits"),
    "lr_wsd_decay_style": dropped("of another schedule"),
    "lr_wsd_decay_iters": dropped("of another schedule"),
    "dsa_indexer_loss_coeff": shared.off_or_refuse("a further term of the loss"),
}  # fmt: skip
RULES |= shared.every(
    """
    save_safetensors no_save_optim no_save_rng no_load_optim no_load_rng async_save use_persistent_ckpt_worker
    dist_ckpt_* distrib_optim_* save_missing_weights finetune
    """,
    why="checkpoints are this engine's own",
)
RULES |= shared.every(
    """
    bridge_backend mlp_padding_free data_sharding te_rng_tracker data_parallel_random_init optimizer_offload_fraction
    optimizer_cuda_graph manual_gc_steps manual_gc_eval masked_softmax_fusion bias_dropout_fusion bias_activation_fusion
    gradient_accumulation_fusion strict_fsdp_dtensor_load overlap_p2p_comm batch_p2p_comm align_param_gather
    align_grad_reduce cp_partition_mode sequence_packing_scheduler nccl_comm_warmup microbatch_group_size_per_vp_stage
    skip_megatron_init use_fused_mhc mhc_recompute_layer_num csa_dense_mode apply_dsa_kernel_fusion
    dsa_indexer_use_sparse_loss fp4_recipe fp4_param_gather engram_tokenizer_map pipeline_model_parallel_layout
    offload_bridge """,
    why=shared.SPEED,
)
RULES |= shared.every("muon_*", why="of another optimizer")
RULES |= shared.every("sgd_momentum", why="of another optimizer")
RULES |= shared.every(
    "mtp_loss_scaling_factor mtp_decoder_input_detach mtp_shared_weights", why="part of mtp_num_layers"
)
RULES |= shared.every("tensorboard_queue_size wandb_exp_name", why=shared.CLIENT)


def _adapters(conversion: Conversion) -> bool:
    """Returns whether adapters train: MegatronTunerMixin.tuner_type is full by default, and lora where one is named."""
    return bool(conversion.facts.get("lora", False) or "adapters" in conversion.facts)


def _finish(conversion: Conversion) -> None:
    facts, options = conversion.facts, conversion.options
    facts.setdefault("lora", _adapters(conversion))
    facts.setdefault("wandb_project", "megatron-swift")
    facts["save_steps"] = options.get("checkpoint.every", 500)
    for key, name, usual in (
        ("micro_batch_size", "train.micro_batch_size", 1),
        ("global_batch_size", "train.global_batch_size", 16),
    ):
        conversion.imply("MegatronArguments", key, name, usual)
    swift.finish(conversion)
    facts.pop("save_steps")
    if facts.get("eval_iters_given", -1) >= 0:
        facts["eval_iters"] = facts["eval_iters_given"]
    if "mcore" in facts and "model.path" not in options:
        conversion.to_fill.append(
            f"model.path: {facts['mcore']} is Megatron's checkpoint, which is not read; name the model's Hugging "
            f"Face folder"
        )
    if facts.get("recompute_method") == "block" and options.get("memory.recompute") == "full":
        conversion.imply("derived", "recompute_num_layers", "memory.recompute_layers", facts.get("recompute_layers"))
    megatron_experts.finish(conversion)


DEFAULTS: dict[str, Default | Ours] = megatron.DEFAULTS | swift.DATA_DEFAULTS | {
    "model.init": Default("checkpoint", "MegatronArguments.perform_initialization = False"),
    "data.validation": Ours("the data has to be named"),
    "data.validation_split": Default(None, "DataArguments.split_dataset_ratio = 0"),
    "data.image_folder": Default(None, "records name images by their paths"),
    "data.tokenizer": Default(None, "that of the model"),
    "data.num_workers": Ours("changes the speed, not what is computed"),
    "optim.lr": Default(lambda conversion: 1e-4 if _adapters(conversion) else 1e-5, "MegatronArguments._set_default"),
    "optim.schedule": Default("cosine", "MegatronArguments.lr_decay_style"),
    "optim.min_lr": Default(0.0, "MegatronArguments.min_lr"),
    "optim.warmup_steps": Default(0, "MegatronArguments.lr_warmup_iters"),
    "optim.warmup_ratio": Default(None, "MegatronArguments.lr_warmup_fraction"),
    "optim.weight_decay": Default(0.1, "MegatronArguments.weight_decay"),
    "optim.betas": Default([0.9, 0.95], "MegatronArguments.adam_beta1 and adam_beta2"),
    "optim.eps": Default(1e-8, "MegatronArguments.adam_eps"),
    "optim.clip_grad_norm": Default(1.0, "MegatronArguments.clip_grad"),
    "train.micro_batch_size": Default(1, "MegatronArguments.micro_batch_size"),
    "train.global_batch_size": Default(1, "MegatronArguments.global_batch_size = 16"),
    "train.steps": Default(None, "MegatronArguments.train_iters"),
    "train.epochs": Ours("Megatron-SWIFT refuses a run without train_iters or num_train_epochs"),
    "train.seed": Default(42, "MegatronArguments.seed"),
    "train.eval_every": Default(0, "MegatronArguments.eval_steps = save_steps, where there is validation data"),
    "train.eval_samples": Default(None, "MegatronArguments.eval_iters = -1, which is all"),
    "train.early_stopping_patience": Default(None, "no such option by default"),
    "train.last_batch": Ours("what is left of an epoch is less than a batch"),
    "memory.recompute": Default("attention", "MegatronArguments.recompute_granularity = selective, of core_attn"),
    "parallel.shard": Default("optimizer", "MegatronArguments.use_distributed_optimizer"),
    "parallel.expert_tensor": Default(
        lambda conversion: 1 if conversion.given("expert_model_parallel_size") else None,
        "MegatronArguments.expert_tensor_parallel_size",
    ),
    "checkpoint.dir": Default("megatron_output", "MegatronSftArguments.output_dir, of a folder for each model"),
    "checkpoint.every": Default(500, "MegatronArguments.save_steps"),
    "checkpoint.keep": Default(0, "MegatronArguments.save_total_limit = None"),
    "checkpoint.keep_best": Default(False, "no such option"),
    "checkpoint.resume": Ours("a folder that holds a run is resumed, and a new one starts from the beginning"),
    "log.tensorboard": Default(True, "MegatronArguments.report_to"),
    "log.mlflow_experiment": Default(None, "MegatronArguments.report_to"),
    "lora.layers": Default(None, "no such option"),
    "lora.rslora": Default(False, "MegatronTunerMixin.use_rslora"),
    "lora.dora": Default(False, "no such option"),
    "lora.ensure_weight_tying": Default(False, "no such option"),
    "trainable": Default([], "MegatronTunerMixin.modules_to_save"),
}  # fmt: skip

MEGATRON_SWIFT = Trainer(name="Megatron-SWIFT", rules=RULES, defaults=DEFAULTS, adapters=_adapters, finish=_finish)
