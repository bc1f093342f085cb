"""Keys of ms-swift that set no option here: they change nothing, or ask for something that is not available."""

from __future__ import annotations

from rankfold.migrating.conversion import Rule, dropped
from rankfold.migrating.trainers import shared

_FILES = "data.train, data.mix and data.validation name files"
_TEMPLATE = "the model's own chat template is used"
_REASONING = "every turn shows its reasoning: data.chat_template"
_OTHER_TUNER = "of another tuner_type"
_SAMPLING = "for generating text, not for training"

NO_COUNTERPART: dict[str, Rule] = {}
NO_COUNTERPART |= shared.every(
    """
    model_type model_revision ref_model_type ref_model_revision use_hf hub_token load_args load_data_args
    local_repo_path model_kwargs download_mode reward_model_type reward_model_revision reward_template
    """,
    why=shared.LOCAL,
)
NO_COUNTERPART |= shared.every(
    """
    load_from_cache_file val_dataset_shuffle streaming stopping_strategy shuffle_buffer_size custom_dataset_info
    dataset_num_proc packing_num_proc lazy_tokenize strict
    """,
    why=_FILES,
)
NO_COUNTERPART |= shared.every(
    """
    attn_impl vit_attn_impl
    """,
    why=shared.ATTENTION,
)
NO_COUNTERPART |= shared.every(
    """
    tuner_backend experts_impl device_map max_memory enable_npu_model_patch padding_side padding_free packing_strategy
    vit_gradient_checkpointing vit_gradient_checkpointing_kwargs max_shard_size use_logits_to_keep
    ds3_gather_for_generation use_flash_ckpt zero_hpz_partition_size lora_dtype hqq_axis offload_teacher_model
    gradient_checkpointing_kwargs.* sleep_level move_model_batches offload_optimizer offload_model
    """,
    why=shared.SPEED,
)
NO_COUNTERPART |= shared.every(
    """
    enable_channel_loss logging_first_step callbacks check_model swift_version rank global_world_size local_world_size
    model_suffix model_info model_meta model_dir hub training_args evaluation_strategy_* log_completions
    """,
    why=shared.REPORT,
)
NO_COUNTERPART |= shared.every("swanlab_*", why=shared.CLIENT)
NO_COUNTERPART |= shared.every(
    """
    eval_dataset eval_metric eval_use_evalscope eval_dataset_args eval_limit eval_generation_config extra_eval_args
    metric """,
    why="evaluations give the loss",
)
NO_COUNTERPART |= shared.every("template_backend agent_template norm_bbox", why=_TEMPLATE)
NO_COUNTERPART |= shared.every("enable_thinking preserve_thinking add_non_thinking_prefix", why=_REASONING)
NO_COUNTERPART |= shared.every("disable_ignore_empty_think is_binary_loss_scale", why="part of loss_scale")
NO_COUNTERPART |= shared.every(
    """
    max_new_tokens temperature top_k top_p min_p repetition_penalty num_beams stream stop_words logprobs top_logprobs
    structured_outputs_regex response_prefix max_completion_length response_length vllm_* use_vllm
    """,
    why=_SAMPLING,
)
NO_COUNTERPART |= shared.every(
    """
    lora_ga_* fourier_* boft_* vera_* adapter_act adapter_length adalora_* llamapro_* reft_* galore_* lisa_step_interval
    """,
    why=_OTHER_TUNER,
)
NO_COUNTERPART |= shared.every(
    """
    discopop_tau num_ppo_epochs whiten_rewards kl_coef cliprange vf_coef cliprange_value gamma lam num_mini_batches
    local_rollout_forward_batch_size num_sample_generations missing_eos_penalty sft_alpha lmbda seq_kd gkd_logits_topk
    reward_adapters teacher_adapters teacher_model_type teacher_model_revision teacher_deepspeed teacher_tag_key
    center_rewards_coefficient teacher_kl_coef generation_batch_size steps_per_generation num_generations
    num_generations_eval importance_sampling_level tau_pos tau_neg real_tau fipo_* epsilon epsilon_high delta
    reward_weights cosine_* repetition_n_grams repetition_max_penalty soft_max_length soft_cache_length dynamic_sample
    max_resample_times overlong_filter scale_rewards advantage_estimator kl_in_reward wandb_log_unique_prompts
    rollout_importance_sampling_* log_rollout_offpolicy_metrics off_policy_sequence_mask_delta log_entropy
    top_entropy_quantile router_replay_mode reward_model_plugin ref_model_sync_steps ref_model_mixup_alpha
    async_generate multi_turn_scheduler max_turns completion_length_limit_scope use_gym_env gym_env num_iterations
    chord_* enable_flattened_weight_sync """,
    why="of another rlhf_type",
)
NO_COUNTERPART |= shared.every(
    "use_ray ray_exp_name device_groups device_groups.* ddp_timeout", why="torchrun starts the ranks"
)
NO_COUNTERPART |= shared.every("ignore_args_error", why="keys that are not known are reported")
NO_COUNTERPART |= shared.every(
    "safe_serialization create_checkpoint_symlink merge_lora save_only_model",
    why="rankfold convert export writes a model or an adapter",
)
NO_COUNTERPART |= shared.every("add_version", why="a run has the folder that checkpoint.dir names, without a version")
NO_COUNTERPART |= shared.every(
    "model_name model_author", why="names written into swift/self-cognition's records: write them into the file"
)
NO_COUNTERPART |= {
    "cached_dataset": shared.off_or_lack("rankfold preprocess makes a folder that data.train can be"),
    "cached_val_dataset": shared.off_or_lack("rankfold preprocess makes a folder that data.train can be"),
    "interleave_prob": shared.off_or_lack("data.mix weighs files against each other"),
    "columns": shared.off_or_lack("rename the fields of the records: data.format"),
    "disable_auto_column_mapping": dropped("data.format says what records have"),
    "dataset_shuffle": shared.only(True, "rows are shuffled by train.seed"),
    "train_dataloader_shuffle": shared.only(True, "rows are shuffled by train.seed"),
    "external_plugins": shared.off_or_lack("no code of a plugin is run"),
    "custom_register_path": shared.off_or_lack("no code of a plugin is run"),
    "new_special_tokens": shared.off_or_lack("the embedding keeps its size"),
    "rope_scaling": shared.off_or_lack("config.json says how positions are scaled"),
    "max_model_len": shared.off_or_lack("config.json says how positions are scaled"),
    "init_strategy": shared.off_or_lack("tensors that a checkpoint lacks are an error"),
    "freeze_parameters": shared.off_or_lack("trainable names what trains"),
    "freeze_parameters_regex": shared.off_or_lack("trainable names what trains"),
    "freeze_parameters_ratio": shared.off_or_lack("trainable names what trains"),
    "trainable_parameters": shared.off_or_lack("trainable names what trains"),
    "trainable_parameters_regex": shared.off_or_lack("trainable names what trains"),
    "vit_lr": shared.off_or_lack("set optim.lr_pattern for the modules of the tower"),
    "aligner_lr": shared.off_or_lack("set optim.lr_pattern for the modules of the projector"),
    "use_galore": shared.off_or_lack("AdamW is the optimizer"),
    "lisa_activated_layers": shared.off_or_lack("trainable says what trains"),
    "resume_only_model": dropped("a checkpoint of the other trainer is not read"),
    "max_epochs": shared.off_or_lack("train.steps or train.epochs ends the run, not both"),
    "acc_strategy": dropped(shared.REPORT),
    "sync_ref_model": shared.off_or_refuse("a reference that moves"),
    "teacher_model_server": shared.off_or_refuse("a student of another model"),
    "decision_*": shared.off_or_lack("records are read as they are"),
}
