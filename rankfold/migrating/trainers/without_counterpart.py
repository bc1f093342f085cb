"""Keys of transformers' TrainingArguments, of PEFT's LoraConfig and of scripts around them that set no option here:
they change nothing, or ask for something that is not available, which is reported."""

from __future__ import annotations

from rankfold.migrating.conversion import Rule, dropped
from rankfold.migrating.trainers import images, shared

RULES: dict[str, Rule] = {}
RULES |= shared.every("bf16_full_eval fp16_full_eval", why="evaluations have the arithmetic of training")
RULES |= shared.every(
    """
    per_device_eval_batch_size eval_accumulation_steps eval_on_start eval_delay max_eval_samples
    eval_dataset_size
    """,
    why=shared.EVAL,
)
RULES |= shared.every(
    """
    use_flash_attn use_flash_attention_2 attn_implementation flash_attn use_flash_attention
    """,
    why=shared.ATTENTION,
)
RULES |= shared.every(
    "use_unsloth use_liger use_liger_kernel liger_kernel_config liger_kernel_config.*", why=shared.KERNELS
)
RULES |= shared.every("tf32", why="torch's own setting of products in float32 is kept")
RULES |= shared.every(
    """
    gradient_checkpointing_kwargs gradient_checkpointing_kwargs.* activation_checkpointing_kwargs
    activation_checkpointing_kwargs.* use_reentrant
    """,
    why="memory.recompute says what is kept",
)
RULES |= shared.every(
    """
    dataloader_pin_memory do_train dataloader_persistent_workers dataloader_prefetch_factor
    average_tokens_across_devices shuffle dataloader_in_order dataloader_multiprocessing_context
    """,
    why=shared.ALWAYS,
)
RULES |= shared.every("data_seed", why="train.seed is that of the data too")
RULES |= shared.every("overwrite_output_dir", why="a folder that holds a run is resumed")
RULES |= shared.every("logging_dir", why="TensorBoard's files are in the run's folder")
RULES |= shared.every(
    """
    remove_unused_columns dataset_text_field text_column label_names lazy_preprocess preprocessing_num_workers
    dataset_num_proc dataset_config dataset_config_name dataset_kwargs dataset_kwargs.*
    append_concat_token add_special_tokens overwrite_cache
    """,
    why="records are read field by field: data.format, data.mask_prompt",
)
RULES |= shared.every(
    """
    prediction_loss_only eval_do_concat_batches eval_use_gather_object include_for_metrics batch_eval_metrics
    """,
    why="evaluations give the loss",
)
RULES |= shared.every("do_eval", why="data.validation says whether")
RULES |= shared.every("ddp_find_unused_parameters", why="guards.liveness_steps names what has no gradient")
RULES |= shared.every("ddp_timeout ddp_backend", why="train.collective_timeout says how long ranks wait")
RULES |= shared.every(
    """
    ddp_bucket_cap_mb ddp_broadcast_buffers torch_empty_cache_steps low_cpu_mem_usage device_map max_memory_MB
    ddp_static_graph use_cache fp16_opt_level half_precision_backend torch_compile_backend torch_compile_mode
    """,
    why=shared.SPEED,
)
RULES |= shared.every(
    """
    log_level log_level_replica log_on_each_node logging_first_step disable_tqdm run_name
    include_num_input_tokens_seen include_tokens_per_second logging_nan_inf_filter plot_loss
    skip_memory_metrics debug metric_for_best_model greater_is_better with_tracking tracker_project_name verbose
    """,
    why=shared.REPORT,
)
RULES |= shared.every(
    """
    wandb_entity wandb_run_name wandb_name wandb_watch wandb_log_model wandb_run_id
    wandb_mode use_swanlab swanlab_project swanlab_run_name mlflow_tracking_uri
    mlflow_run_name hf_mlflow_log_artifacts use_comet comet_project_name use_trackio
    trackio_project_name trackio_run_name trackio_space_id trackio_bucket_id trackio_static_space_id
    """,
    why=shared.CLIENT,
)
RULES |= shared.every(
    """
    push_to_hub hub_model_id hub_token hub_strategy hub_private_repo hub_model_revision hub_revision
    hub_always_push
    """,
    why=shared.HUB,
)
RULES |= shared.every(
    """
    cache_dir model_revision revision token use_auth_token hf_hub_token preprocessing_only
    """,
    why=shared.LOCAL,
)
RULES |= shared.every("chat_template_format", why="the model's own chat template is used")
RULES |= shared.every(
    """
    splits split dataset_split dataset_splits dataset_format test_size
    """,
    why="data.train and data.validation are files of their own",
)
RULES |= shared.every(
    """
    do_mmlu_eval mmlu_split do_mmlu evaluation_steps num_validation_images
    """,
    why="evaluations give the loss",
)
RULES |= shared.every(
    """
    max_new_tokens do_sample top_p top_k temperature num_beams repetition_penalty
    """,
    why="for generating text, not for training",
)
RULES |= shared.every(
    """
    mm_* image_* vision_*
    """,
    why=images.PROCESSOR,
)
RULES |= shared.every("group_by_modality_length", why="each epoch has an order of its own")
RULES |= {
    key: shared.off_or_lack("trainable says what of a vision model trains")
    for key in ("tune_mm_*", "tune_mm_mlp_adapter", "freeze_mm_mlp_adapter", "unfreeze_mm_vision_tower")
}
RULES |= {
    key: shared.off_or_lack("projectors are read with the model: model.path")
    for key in ("pretrain_mm_*", "pretrain_mm_mlp_adapter")
}
RULES |= shared.every("version prompt_template prompt_template_name", why="the model's own chat template is used")
RULES |= shared.every("eval_size", why="data.validation is a file of its own")
RULES |= shared.every("data_cache_dir", why=shared.LOCAL)
RULES |= {
    key: shared.off_or_lack("adapters start as PEFT's do: lora.init")
    for key in ("eva_config", "loftq_config", "corda_config", "lora_ga_config", "monteclora_config", "kasa_config")
}
RULES |= {
    key: shared.off_or_lack("adapters are LoRA's or DoRA's")
    for key in ("alora_invocation_tokens", "use_qalora", "arrow_config", "use_bdlora", "trainable_token_indices")
}
RULES |= shared.every(
    "llm_int8_threshold llm_int8_has_fp16_weight llm_int8_skip_modules qalora_group_size runtime_config",
    why=shared.SPEED,
)
RULES |= shared.every("project_name swanlab_*", why=shared.CLIENT)
RULES |= shared.every("trust_remote_code", why="no code of a checkpoint is run")
RULES |= shared.every(
    """
    use_fast_tokenizer tokenizer_use_fast use_fast
    """,
    why="the tokenizer's own files say how it works",
)
RULES |= shared.every(
    """
    save_safetensors save_only_model save_on_each_node export_to_gguf
    """,
    why="rankfold convert export writes a model or an adapter",
)
RULES |= {
    key: shared.only_or_refuse("CAUSAL_LM", "another task than the next token")
    for key in ("task_type", "lora_task_type")
}
RULES |= {
    "mlm_probability": shared.off_or_refuse("a masked language model"),
    "peft_type": shared.only_or_refuse("LORA", "another kind of adapter"),
}
RULES |= shared.every(
    """
    inference_mode fan_in_fan_out auto_mapping peft_version
    megatron_config megatron_core
    """,
    why="adapters of a language model",
)
RULES |= shared.every(
    """
    double_quant use_nested_quant use_bnb_nested_quant bnb_4bit_use_double_quant
    """,
    why="scales are stored in float32",
)
RULES |= shared.every(
    """
    bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_storage_dtype
    """,
    why="weights are decoded to model.dtype",
)
RULES |= shared.every(
    """
    fsdp_config fsdp_config.* fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params
    """,
    why="each layer is gathered separately",
)
RULES |= {
    key: shared.off_or_lack("data.train is read as it is: shorten the file")
    for key in ("max_train_samples", "max_samples")
}
RULES |= shared.every(
    """
    accelerator_config accelerator_config.* deepspeed_plugin local_rank ddp device jit_mode_eval use_cpu no_cuda
    """,
    why="torchrun starts the ranks, each with its device",
)
RULES |= shared.every(
    "enable_jit_checkpoint restore_callback_states_from_checkpoint",
    why="a stop signal saves, and a run resumes from there",
)
RULES |= {
    "optim_target_modules": shared.off_or_lack("the optimizer is AdamW for all that trains"),
    "parallelism_config": shared.off_or_lack("set parallel.tensor, parallel.context and parallel.shard"),
    "dataloader_drop_last": shared.off_or_lack("an epoch trains every row: train.last_batch"),
    "train_sampling_strategy": shared.only("random", "rows are shuffled by train.seed; data.packing fills them"),
    "length_column_name": dropped("lengths are counted"),
    "full_determinism": shared.off_or_lack("set train.deterministic"),
    "exclude_modules": shared.off_or_lack("set lora.exclude"),
    "rank_pattern": shared.off_or_lack("set lora.rank_pattern"),
    "alpha_pattern": shared.off_or_lack("set lora.alpha_pattern"),
    "layers_pattern": shared.off_or_lack("layers are counted from 0: lora.layers"),
    "layer_replication": shared.off_or_lack("layers are those of the model"),
    "velora_config": shared.off_or_lack("adapters are LoRA's or DoRA's"),
    "model_init_kwargs": shared.off_or_lack("set model.dtype and model.base_dtype"),
}
