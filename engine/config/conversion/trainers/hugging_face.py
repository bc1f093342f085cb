"""Hugging Face's Trainer, and scripts built on it and PEFT. The trainers made from it start from these tables."""

from __future__ import annotations

from engine.config.conversion.conversion import (
    Conversion,
    Rule,
    dropped,
    dtype_switch,
    fact,
    named_file,
    number,
    option,
    text,
    truth,
    whole,
    whole_numbers,
)
from engine.config.conversion.trainer import Default, Ours, Trainer
from engine.config.conversion.trainers import shared

RULES: dict[str, Rule] = {
    "model_name_or_path": option("model.path", text),
    "model_path": option("model.path", text),
    "model_name": option("model.path", text),
    "model_id": option("model.path", text),
    "tokenizer_name_or_path": option("data.tokenizer", text),
    "tokenizer_name": option("data.tokenizer", text),
    "data_path": shared.dataset,
    "train_file": shared.dataset,
    "train_data_path": shared.dataset,
    "train_files": shared.dataset,
    "eval_data_path": shared.dataset,
    "validation_file": shared.dataset,
    "eval_file": shared.dataset,
    "dataset_path": shared.dataset,
    "dataset_name": shared.dataset,
    "dataset": shared.dataset,
    "eval_dataset": shared.dataset,
    "max_seq_len": option("data.seq_length", whole),
    "max_seq_length": option("data.seq_length", whole),
    "model_max_length": option("data.seq_length", whole),
    "max_length": option("data.seq_length", whole),
    "seq_length": option("data.seq_length", whole),
    "block_size": option("data.seq_length", whole),
    "packing": option("data.packing", truth),
    "bf16": dtype_switch("bfloat16"),
    "fp16": dtype_switch("float16"),
    "torch_dtype": shared.dtype,
    "dtype": shared.dtype,
    "logging_steps": option("log.every", lambda given: max(1, round(number(given)))),
    "eval_steps": fact("eval_steps", number, "train.eval_every"),
    "save_steps": fact("save_steps", number, "checkpoint.every"),
    "save_total_limit": option("checkpoint.keep", whole),
    "output_dir": option("checkpoint.dir", text),
    "per_device_train_batch_size": option("train.micro_batch_size", whole),
    "gradient_accumulation_steps": fact("accumulation", whole, "train.global_batch_size"),
    "lr_scheduler_type": shared.schedule,
    "lr_scheduler_kwargs.min_lr": shared.min_lr,
    "lr_scheduler_kwargs.min_lr_rate": Rule(shared.share_of_lr, ("optim.min_lr",)),
    "lr_scheduler_kwargs.num_cycles": shared.off_or_lack("cosine has half a cycle"),
    "lr_scheduler_kwargs": shared.off_or_lack("optim.schedule and optim.min_lr are all there is"),
    "learning_rate": option("optim.lr", number),
    "weight_decay": option("optim.weight_decay", number),
    "warmup_ratio": option("optim.warmup_ratio", number),
    "warmup_steps": shared.warmup_steps,
    "num_warmup_steps": shared.warmup_steps,
    "adam_beta1": fact("beta1", number, "optim.betas"),
    "adam_beta2": fact("beta2", number, "optim.betas"),
    "adam_epsilon": option("optim.eps", number),
    "max_grad_norm": shared.max_grad_norm,
    "source_max_len": fact("source_length", whole, "data.seq_length"),
    "target_max_len": fact("target_length", whole, "data.seq_length"),
    "full_finetune": Rule(shared.full_finetune, ("lora.rank", "trainable")),
    "lr_scheduler": shared.schedule,
    "lr_warmup_steps": shared.warmup_steps,
    "max_train_steps": shared.steps,
    "pretrained_model_name_or_path": option("model.path", text),
    "train_on_source": option("data.mask_prompt", lambda given: not truth(given)),
    "checkpointing_steps": fact("save_steps", number, "checkpoint.every"),
    "use_gradient_checkpointing": shared.recompute,
    "gradient_checkpointing": shared.recompute,
    "use_peft_lora": shared.use_lora,
    "use_lora": shared.use_lora,
    "use_peft": shared.use_lora,
    "lora_enable": shared.use_lora,
    "lora_r": option("lora.rank", whole),
    "lora_rank": option("lora.rank", whole),
    "lora_alpha": option("lora.alpha", number),
    "lora_dropout": option("lora.dropout", number),
    "lora_target_modules": shared.targets,
    "target_modules": shared.targets,
    "lora_modules": shared.targets,
    "trainable": shared.targets,
    "load_in_kbits": shared.quantization_bits,
    "train_file_path": shared.dataset,
    "lora_modules_to_save": shared.modules_to_save,
    "modules_to_save": shared.modules_to_save,
    "use_rslora": option("lora.rslora", truth),
    "use_dora": option("lora.dora", truth),
    "lora_bias": shared.only("none", "biases of the base stay frozen"),
    "lora_init_weights": shared.only(True, "lora.init is kaiming, or gaussian"),
    "lora_weight_path": shared.off_or_lack("name the folder of the adapter in lora.init_from"),
    "layers_to_transform": option("lora.layers", whole_numbers),
    "max_steps": shared.steps,
    "num_train_epochs": option("train.epochs", number),
    "num_epochs": option("train.epochs", number),
    "seed": option("train.seed", whole),
    "report_to": shared.report_to,
    "use_wandb": shared.use_wandb,
    "wandb_project": shared.wandb_project,
    "wandb_project_name": shared.wandb_project,
    "WANDB_PROJECT": shared.wandb_project,
    "project": shared.wandb_project,
    "use_mlflow": Rule(
        lambda conversion, given: conversion.know(given, "use_mlflow", truth(given), "log.mlflow_experiment"),
        ("log.mlflow_experiment",),
    ),
    "mlflow_experiment_name": shared.mlflow_experiment,
    "use_4bit_quantization": shared.quantize("nf4"),
    "use_4bit_qunatization": shared.quantize("nf4"),
    "load_in_4bit": shared.quantize("nf4"),
    "use_8bit_quantization": shared.quantize("int8"),
    "use_8bit_qunatization": shared.quantize("int8"),
    "load_in_8bit": shared.quantize("int8"),
    "q_lora": shared.quantize("nf4"),
    "bits": shared.quantization_bits,
    "bnb_4bit_quant_type": shared.only("nf4", "4 bits are nf4"),
    "quant_type": shared.only("nf4", "4 bits are nf4"),
    "dataloader_num_workers": option("data.num_workers", whole),
    "evaluation_strategy": shared.strategy,
    "eval_strategy": shared.strategy,
    "save_strategy": shared.strategy,
    "logging_strategy": shared.strategy,
    "optim": Rule(shared.optimizer),
    "optimizer": Rule(shared.optimizer),
    "deepspeed": Rule(named_file, ("parallel.shard",)),
    "deepspeed_config": Rule(named_file, ("parallel.shard",)),
    "fsdp": Rule(shared.fsdp, ("parallel.shard",)),
    "resume_from_checkpoint": shared.resume,
    "neftune_noise_alpha": shared.off_or_lack("no noise is added to embeddings"),
    "label_smoothing_factor": shared.off_or_lack("labels are not smoothed"),
    "label_smoothing": shared.off_or_lack("labels are not smoothed"),
    "ignore_data_skip": shared.off_or_lack("a resumed run goes on at its next sample"),
    "val_set_size": shared.holdout,
    "validation_split_percentage": option("data.validation_split", lambda given: number(given) / 100),
    "early_stopping_patience": shared.patience,
    "load_best_model_at_end": shared.best_model,
    "auto_find_batch_size": shared.off_or_lack("the batch is what it says; tools/plan.py memory finds one that fits"),
    "optim_args": shared.off_or_lack("optim.betas, optim.eps and optim.weight_decay are all there is"),
    "train_on_prompt": option("data.mask_prompt", lambda given: not truth(given)),
    "torch_compile": dropped("no compiler is used; kernels are chosen by model.kernels"),
    "group_by_length": dropped("data.packing fills rows"),
    "predict_with_generate": shared.off_or_lack("evaluations give the loss; tools/generate.py writes answers"),
    "do_predict": shared.off_or_lack("evaluations give the loss; tools/generate.py writes answers"),
}
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
RULES |= shared.every("use_unsloth use_liger use_liger_kernel liger_kernel_config.*", why=shared.KERNELS)
RULES |= shared.every("tf32", why="torch's own setting of products in float32 is kept")
RULES |= shared.every(
    """
    gradient_checkpointing_kwargs gradient_checkpointing_kwargs.* use_reentrant
    """,
    why="memory.recompute says what is kept",
)
RULES |= shared.every(
    """
    dataloader_pin_memory do_train dataloader_persistent_workers dataloader_prefetch_factor
    average_tokens_across_devices shuffle
    """,
    why=shared.ALWAYS,
)
RULES |= shared.every("data_seed", why="train.seed is that of the data too")
RULES |= shared.every("overwrite_output_dir", why="a folder that holds a run goes on with it")
RULES |= shared.every("logging_dir", why="TensorBoard's files lie in the run's folder")
RULES |= shared.every(
    """
    remove_unused_columns dataset_text_field text_column label_names lazy_preprocess preprocessing_num_workers
    dataset_num_proc dataset_config dataset_config_name dataset_kwargs.* append_concat_token add_special_tokens
    overwrite_cache
    """,
    why="records are read field by field: data.format, data.mask_prompt",
)
RULES |= shared.every("prediction_loss_only", why="evaluations give the loss")
RULES |= shared.every("do_eval", why="data.validation says whether")
RULES |= shared.every("ddp_find_unused_parameters", why="guards.liveness_steps names what has no gradient")
RULES |= shared.every("ddp_timeout ddp_backend", why="train.collective_timeout says how long ranks wait")
RULES |= shared.every(
    """
    ddp_bucket_cap_mb ddp_broadcast_buffers torch_empty_cache_steps low_cpu_mem_usage device_map max_memory_MB
    use_cache fp16_opt_level half_precision_backend torch_compile_backend torch_compile_mode
    """,
    why=shared.SPEED,
)
RULES |= shared.every(
    """
    log_level log_level_replica log_on_each_node logging_first_step disable_tqdm run_name
    include_num_input_tokens_seen include_tokens_per_second logging_nan_inf_filter plot_loss
    metric_for_best_model greater_is_better with_tracking tracker_project_name verbose
    """,
    why=shared.REPORT,
)
RULES |= shared.every(
    """
    wandb_entity wandb_run_name wandb_name wandb_watch wandb_log_model wandb_run_id
    wandb_mode use_swanlab swanlab_project swanlab_run_name mlflow_tracking_uri
    mlflow_run_name hf_mlflow_log_artifacts use_comet comet_project_name use_trackio
    trackio_project_name trackio_run_name trackio_space_id
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
    mm_* image_* vision_* tune_mm_* pretrain_mm_* tune_mm_mlp_adapter freeze_mm_mlp_adapter pretrain_mm_mlp_adapter
    group_by_modality_length unfreeze_mm_vision_tower
    """,
    why="the language model is trained; images are not read",
)
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
    why="tools/convert.py export writes a model or an adapter",
)
RULES |= shared.every(
    """
    task_type lora_task_type inference_mode fan_in_fan_out peft_type
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
    why="each layer is gathered by itself",
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

DEFAULTS: dict[str, Default | Ours] = {
    "model.path": Ours("the model has to be named"),
    "model.dtype": Default("float32", "TrainingArguments.bf16 and fp16 = False"),
    "model.base_dtype": Default(None, "BitsAndBytesConfig.load_in_4bit and load_in_8bit = False"),
    "data.train": Ours("the data has to be named"),
    "data.validation": Ours("the data has to be named"),
    "data.tokenizer": Default(None, "AutoTokenizer.from_pretrained(model)"),
    "data.seq_length": Ours("each script has a length of its own, and which one is not in what was given"),
    "data.packing": Default(False, "Trainer: one sample a row"),
    "data.mask_prompt": Ours("each script has labels of its own, and which ones is not in what was given"),
    "data.num_workers": Ours("changes how fast it goes, not what is computed"),
    "optim.lr": Default(5e-5, "TrainingArguments.learning_rate"),
    "optim.schedule": Default("linear", "TrainingArguments.lr_scheduler_type"),
    "optim.min_lr": Default(0.0, "get_linear_schedule_with_warmup"),
    "optim.warmup_steps": Default(0, "TrainingArguments.warmup_steps"),
    "optim.warmup_ratio": Default(None, "TrainingArguments.warmup_steps = 0"),
    "optim.weight_decay": Default(0.0, "TrainingArguments.weight_decay"),
    "optim.betas": Default([0.9, 0.999], "TrainingArguments.adam_beta1 and adam_beta2"),
    "optim.eps": Default(1e-8, "TrainingArguments.adam_epsilon"),
    "optim.clip_grad_norm": Default(1.0, "TrainingArguments.max_grad_norm"),
    "train.micro_batch_size": Default(8, "TrainingArguments.per_device_train_batch_size"),
    "train.global_batch_size": Default(1, "TrainingArguments.gradient_accumulation_steps"),
    "train.steps": Default(None, "TrainingArguments.max_steps = -1"),
    "train.epochs": Default(3.0, "TrainingArguments.num_train_epochs"),
    "train.seed": Default(42, "TrainingArguments.seed"),
    "train.eval_every": Default(0, "TrainingArguments.eval_strategy = no"),
    "memory.recompute": Default("selective", "TrainingArguments.gradient_checkpointing = None"),
    "memory.offload_optimizer": Default(False, "TrainingArguments.deepspeed = None"),
    "memory.offload_weights": Default(False, "TrainingArguments.fsdp = None"),
    "parallel.shard": Default("none", "TrainingArguments.fsdp and deepspeed = None"),
    "parallel.tensor": Default(1, "TrainingArguments.parallelism_config = None"),
    "parallel.pipeline": Default(1, "TrainingArguments.parallelism_config = None"),
    "parallel.context": Default(1, "TrainingArguments.parallelism_config = None"),
    "parallel.sequence": Ours("changes how fast it goes, not what is computed"),
    "checkpoint.dir": Ours("the run's folder has to be named"),
    "checkpoint.every": Default(500, "TrainingArguments.save_steps"),
    "checkpoint.keep": Default(0, "TrainingArguments.save_total_limit = None"),
    "checkpoint.resume": Ours("a folder that holds a run goes on with it, and a fresh one starts afresh"),
    "log.every": Ours("what is reported changes nothing that is computed"),
    "log.wandb_project": Default(None, "TrainingArguments.report_to = none"),
    "log.mlflow_experiment": Default(None, "TrainingArguments.report_to = none"),
    "checkpoint.keep_best": Default(False, "TrainingArguments.load_best_model_at_end"),
    "data.validation_split": Default(None, "Trainer: eval_dataset is given apart"),
    "train.early_stopping_patience": Default(None, "EarlyStoppingCallback is not among the default callbacks"),
    "train.last_batch": Default("short", "TrainingArguments.dataloader_drop_last = False"),
    "log.tensorboard": Default(False, "TrainingArguments.report_to = none"),
    "trainable": Default([], "LoraConfig.modules_to_save = None"),
    "lora.rank": Default(8, "LoraConfig.r"),
    "lora.alpha": Default(8.0, "LoraConfig.lora_alpha"),
    "lora.dropout": Default(0.0, "LoraConfig.lora_dropout"),
    "lora.targets": Default(["q_proj", "v_proj"], "LoraConfig.target_modules = None, of Llama, Qwen, Mistral, Gemma"),
    "lora.fused": Default("auto", "LoraConfig.target_modules: modules as the checkpoint has them"),
    "lora.layers": Default(None, "LoraConfig.layers_to_transform"),
    "lora.rslora": Default(False, "LoraConfig.use_rslora"),
    "lora.dora": Default(False, "LoraConfig.use_dora"),
}
"""What transformers' TrainingArguments and PEFT's LoraConfig have; a script's own arguments may have other defaults."""

_ADAPTER_KEYS = (
    "lora_r",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "target_modules",
    "lora_modules",
    "q_lora",
    "lora_task_type",
    "lora_bias",
    "bits",
    "use_dora",
    "use_rslora",
)


def adapters(conversion: Conversion) -> bool:
    """A script trains adapters where it is told so, or given their size."""
    return bool(conversion.facts.get("lora", conversion.given(*_ADAPTER_KEYS)))


def _finish(conversion: Conversion) -> None:
    """A script may have arguments of its own, whose defaults only the script has."""
    if "data.mask_prompt" not in conversion.options:
        conversion.notes.append(
            "what the loss is taken on is the script's: data.mask_prompt true, the default, takes it on answers alone"
        )
    own = [name for name in ("lora.rank", "lora.alpha", "lora.targets") if name not in conversion.options]
    if adapters(conversion) and own:
        conversion.notes.append(f"{', '.join(own)} are PEFT's defaults here; the script may have others")


HUGGING_FACE = Trainer(name="Hugging Face's Trainer", rules=RULES, defaults=DEFAULTS, adapters=adapters, finish=_finish)
