"""Megatron-LM's flags that need no counterpart here, each group with the reason."""

from __future__ import annotations

from rankfold.migrating.conversion import Rule
from rankfold.migrating.trainers import shared

_NO_SHAPE = "a model's config.json says its shape; this one is not of a decoder that is supported"

NO_COUNTERPART: dict[str, Rule] = {}
NO_COUNTERPART |= shared.every(
    """
    swiglu rope_type export_force_local_attention disable_bf16_reduced_precision_matmul
    num_dataset_builder_threads group_query_attention normalization position_embedding_type
    use_rotary_position_embeddings rotary_percent untie_embeddings_and_output_weights apply_layernorm_1p
    qk_layernorm add_qkv_bias make_vocab_size_divisible_by extra_vocab_size use_rope_scaling rope_scaling_factor
    rotary_seq_len_interpolation_factor squared_relu openai_gelu quick_geglu no_position_embedding
    multi_latent_attention glu_linear_offset activation_func_clamp_value softmax_type window_size
    window_attn_skip_freq vocab_extra_ids enable_gpt_oss use_rmsnorm norm_type attention_softmax_in_fp32
    apply_query_key_layer_scaling no_query_key_layer_scaling no_rope_freq rotary_interleaved layernorm_epsilon
    layernorm_zero_centered_gamma n_head_kv use_alibi_mask use_alibi_position_embeddings embed_layernorm
    glu_activation yarn_* rotary_scaling_factor transformer_type intermediate_size
    use_llama2_rotary_position_embeddings position_encoding_2d apply_residual_connection_post_layernorm mscale
    mscale_all_dim position_embedding rotary_dim use_rotary_emb
    """,
    why="the model's config.json says it",
)
NO_COUNTERPART |= shared.every(
    """
    encoder_num_layers decoder_num_layers decoder_seq_length hybrid_layer_pattern spec hybrid_override_pattern
    is_hybrid_model mamba_state_dim bert_embedder_type masked_softmax_fusion
    """,
    why=_NO_SHAPE,
)
NO_COUNTERPART |= shared.every(
    """
    tokenizer_type merge_file tiktoken_pattern legacy_tokenizer tokenizer_name patch_tokenizer_type
    hf_tokenizer_path tokenizer_hf_include_special_tokens
    """,
    why="the tokenizer's own files say how it works: data.tokenizer",
)
NO_COUNTERPART |= shared.every(
    """
    use_mcore_models use_legacy_models transformer_impl attention_backend use_flash_attn overlap_grad_reduce
    overlap_param_gather overlap_param_gather_with_optimizer_step defer_embedding_wgrad_compute
    wgrad_deferral_limit overlap_p2p_communication_warmup_flush tp_comm_overlap no_masked_softmax_fusion
    no_bias_gelu_fusion no_bias_swiglu_fusion no_bias_dropout_fusion no_gradient_accumulation_fusion
    no_rope_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl apply_rope_fusion
    empty_unused_memory_level ddp_bucket_size ddp_average_in_collective ddp_num_buckets
    ddp_pad_buckets_for_high_nccl_busbw grad_reduce_in_bf16 accumulate_allreduce_grads_in_fp32
    no_create_attention_mask_in_dataloader manual_gc manual_gc_interval no_mmap_bin_files enable_cuda_graph
    cuda_graph_impl cuda_graph_scope external_cuda_graph delay_wgrad_compute use_precision_aware_optimizer
    exp_avg_dtype exp_avg_sq_dtype main_grads_dtype main_params_dtype fp8_recipe fp8_amax_history_len
    fp8_amax_compute_algo fp8_param_gather  hysteresis deepspeed no_pipeline_parallel membind
    fsdp_manual_registration first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    fp8_margin fp8_interval use_megatron_fsdp calculate_per_token_loss use_tp_pp_dp_mapping
    init_model_with_meta_device fsdp_double_buffer use_nccl_ub gradient_reduce_div_fusion
    no_check_for_nan_in_loss_and_grad account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    high_priority_stream_groups decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    use_cpu_initialization dataloader_type data_cache_path dataloader_save distributed_backend
    use_ring_exchange_p2p align_grad_reduce use_fused_rmsnorm use_te recompute_modules keep_fp8_transpose_cache
    cpu_offloading_num_layers optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d
    use_torch_optimizer_for_cpu_offload pin_cpu_params pin_cpu_grads te_rng_tracker offload_optimizer_states
    DDP_impl vocab_path distribute_saved_activations no_async_tensor_model_parallel_allreduce
    attention_dropout_fusion
    """,
    why=shared.SPEED,
)
NO_COUNTERPART |= shared.every(
    """
    ckpt_format dist_ckpt_format auto_detect_ckpt_format async_save no_load_optim no_load_rng no_save_optim
    no_save_rng use_checkpoint_args use_dist_ckpt ckpt_fully_parallel_load ckpt_fully_parallel_save
    ckpt_assume_constant_structure dist_ckpt_strictness exit_on_missing_checkpoint override_opt_param_scheduler
    use_checkpoint_opt_param_scheduler dist_ckpt_optim_fully_reshardable use_mp_args_from_checkpoint_args
    use_tokenizer_model_from_checkpoint_args no_ckpt_fully_parallel_save save_retain_interval
    non_persistent_save_interval ckpt_convert_format mmap_warmup data_impl exit_interval checkpoint_in_cpu
    transfer_hf_to_mg no_initialization checkpoint_store_legacy
    """,
    why="checkpoints are this engine's own; a run resumes from its newest",
)
NO_COUNTERPART |= shared.every(
    """
    log_* log_throughput no_log_loss_scale_to_tensorboard no_log_learnig_rate_to_tensorboard s trace
    force_overwrite capture_range capture_range_end exit_signal_handler trigger_path log_params_norm
    log_num_zeros_in_grad log_timers_to_tensorboard log_progress log_memory_to_tensorboard
    log_validation_ppl_to_tensorboard log_batch_size_to_tensorboard timing_log_option
    log_optimizer_states_to_tensorboard log_energy log_loss_scale_to_tensorboard log_straggler
    log_world_size_to_tensorboard tensorboard_queue_size tensorboard_log_interval timing_log_level
    profile_step_start profile_step_end profile_ranks logging_level print_interval use_pytorch_profiler
    record_memory_history memory_snapshot_path disable_straggler_on_startup straggler_minmax_count
    """,
    why=shared.REPORT,
)
NO_COUNTERPART |= shared.every("wandb_exp_name wandb_save_dir wandb_entity wandb_mode", why=shared.CLIENT)
NO_COUNTERPART |= shared.every("trust_remote_code", why="no code of a checkpoint is run")
NO_COUNTERPART |= shared.every(
    """
    sft train_mode finetune_task keep_last train_data valid_data eod_id iter_per_epoch source_seq_len
    target_seq_len input_len out_seq_length text_generate_output_file top_p top_k temperature repetition_penalty
    flash skip_train epochs_as_samples max_padding_length generation_length text_generate_input_file
    """,
    why="data.format and data.mask_prompt say what records have and what of them is trained on",
)
NO_COUNTERPART |= shared.every(
    """
    inference_* mamba_* use_legacy_static_engine decode_only_cuda_graphs enable_chunked_prefill cache_mla_latents
    max_tokens_to_oom num_speculative_tokens output_bert_embeddings refit_method
    """,
    why="for generating text, not for training",
)
NO_COUNTERPART |= shared.every(
    """
    bert_* biencoder_* ict_* dino_* swin_* vision_* img_h img_w num_channels num_classes patch_dim classes_fraction
    data_per_class_fraction block_data_path embedding_path evidence_data_path indexer_* query_in_block_prob
    retriever_* titles_data_path use_one_sent_docs head_lr_mult mask_factor mask_prob mask_type short_seq_prob
    sample_rate no_data_sharding heterogeneous_* linear_attention_freq relative_attention_* yarn_*
    no_yarn_correction_range_round_to_int
    """,
    why=_NO_SHAPE,
)
NO_COUNTERPART |= shared.every(
    """
    inprocess_* ft_* enable_ft_package calc_ft_timeouts adlr_autoresume adlr_autoresume_interval kitchen_*
    enable_msc disable_msc one_logger_* no_one_logger app_tag_* otel_* run_workload_inspector_server
    object_storage_cache_path result_rejected_tracker_filename dump_param_to_param_group_map
    """,
    why="of the cluster that it ran on",
)
NO_COUNTERPART |= shared.every(
    """
    megatron_fsdp_* fsdp_db_use_persist_buf_on_alloc_fail torch_fsdp2_* enable_full_sharding_in_hsdp gtp_*
    outer_dp_sharding_strategy num_distributed_optimizer_instances suggested_communication_unit_size
    disable_symmetric_registration create_all_gather_group use_sharp ddp_* tp_comm_* fp4_param_gather
    reuse_grad_buf_for_mxfp8_param_ag no_align_param_gather no_gradient_reduce_div_fusion no_persist_layer_norm
    no_overlap_p2p_communication no_pin_cpu_* no_use_layer_wise_param_layout mla_down_proj_fusion cuda_graph_modules
    optimizer_cuda_graph pipeline_model_parallel_layout dataloader_* mid_level_dataset_surplus
    per_dataset_sequences_path fp16_lm_cross_entropy onnx_safe enable_experimental fake_process_group
    te_precision_config_file output_logit_dtype min_loss_scale
    """,
    why=shared.SPEED,
)
NO_COUNTERPART |= shared.every(
    "ckpt_drop_redundant_extra_state dist_ckpt_workers override_ckpt_iteration",
    why="checkpoints are this engine's own; a run resumes from its newest",
)
NO_COUNTERPART |= shared.every("allow_ambiguous_pad_tokens sft_tokenizer_prompt_format", why="data.chat_template")
NO_COUNTERPART |= shared.every("check_for_large_grads", why="guards.spike_policy")
NO_COUNTERPART |= {
    key: shared.off_or_lack(why)
    for keys, why in {
        "fp8_format fp8_hybrid fp8_e4m3": "products are in model.dtype; model.base_dtype stores a frozen base in FP8",
        "muon_* lion_* sgd_momentum": "the optimizer is AdamW",
        "fim_*": "no text is filled in the middle",
        "freeze_all_layers": "lora.rank and trainable say what trains",
        "init_method_xavier_uniform": "random weights are normal: model.init",
        "apply_wd_to_qk_layernorm no_weight_decay_cond_type": "vectors have no weight decay, but DoRA's magnitudes",
        "phase_transition_iterations": "one run has one configuration",
        "data_args_path per_split_data_args_path": "name the files in data.train and data.mix",
        "yaml_cfg": "give that file to this command",
        "use_same_sampling_seed_across_dp_ranks": "train.seed is that of all ranks",
    }.items()
    for key in keys.split()
}
NO_COUNTERPART |= {
    key: shared.off_or_refuse(what)
    for keys, what in {
        "perform_rl_step rl_* grpo_* langrl_*": "reinforcement learning",
        "logits_*": "a student of another model",
        "task": "a task of another program than pretrain_gpt.py",
    }.items()
    for key in keys.split()
}
