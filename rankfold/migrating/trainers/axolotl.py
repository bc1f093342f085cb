"""Rules for Axolotl's files."""

from __future__ import annotations

from typing import Any

from engine.errors import UserError
from rankfold.migrating import experts, rates
from rankfold.migrating.conversion import (
    Conversion,
    Rule,
    dropped,
    fact,
    number,
    option,
    other_objective,
    set_dtype,
    sets,
    text,
    truth,
    whole,
)
from rankfold.migrating.given import Given
from rankfold.migrating.trainer import Default, Ours, Trainer
from rankfold.migrating.trainers import hugging_face as hf
from rankfold.migrating.trainers import images, shared, trl_grpo
from rankfold.migrating.trainers.trl import reference

_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text", "pretrain": "text"}
_RL = {"dpo": "dpo", "ipo": "ipo", "orpo": "orpo", "kto": "kto", "simpo": "simpo", "grpo": "grpo", "gspo": "grpo"}


@sets("model.dtype")
def bf16(conversion: Conversion, given: Given) -> None:
    if str(given.value).lower() in ("auto", "true", "full"):
        note = "masters stay float32" if given.value == "full" else ""
        conversion.take(given, "model.dtype", "bfloat16", note)
    else:
        conversion.know(given, "no_bf16", True, "model.dtype: not bfloat16")


@sets("model.dtype")
def fp16(conversion: Conversion, given: Given) -> None:
    if given.value is not None and str(given.value).lower() != "auto" and truth(given):
        set_dtype(conversion, given, "float16")
    else:
        conversion.drop(given, "switched off")


@sets("lora.rank", "model.base_dtype", "trainable")
def adapter(conversion: Conversion, given: Given) -> None:
    name = str(given.value).lower() if given.value else ""
    conversion.know(given, "lora", name in ("lora", "qlora"), f"adapters: {name or 'none'}")
    if name not in ("", "lora", "qlora", "none"):
        raise UserError(f"{given.source} gives adapter as {name}, but adapters here are LoRA's: write lora or qlora.")


def as_list(given: Given) -> list[Any]:
    """Returns the values of a key that has one or several."""
    if isinstance(given.value, list):
        return given.value
    return [] if given.value in (None, "") else [given.value]


@sets("data.train", "data.mix", "data.validation", "data.format")
def datasets(conversion: Conversion, given: Given) -> None:
    """Converts a list of datasets: files become data.train and data.mix, names on the hub are reported."""
    entries = [one if isinstance(one, dict) else {"path": str(one)} for one in as_list(given)]
    which = "data.validation" if given.key == "test_datasets" else "data.train"
    files: list[str] = []
    for entry in entries:
        named = entry.get("data_files") or entry.get("path")
        named = named if isinstance(named, list) else [named]
        files += [str(one) for one in named if str(one).endswith(shared.FILES)]
    kinds = {str(entry.get("type")).partition(".")[0].partition(":")[0] for entry in entries if entry.get("type")}
    if files:
        shared.files(conversion, given, which, files)
    else:
        paths = ", ".join(str(entry.get("path")) for entry in entries)
        conversion.know(
            given, f"{which} of the hub", paths, f"{which}: save {paths or 'the data'} as a file and name it"
        )
    if len(kinds) == 1 and which == "data.train" and (kind := kinds.pop()) in _FORMATS:
        conversion.take(given, "data.format", _FORMATS[kind])
    for entry in entries:
        if "[" in str(entry.get("split")):
            conversion.notes.append(f"datasets: split {entry['split']} is a part of the data: shorten the file to it")
        for key in ("roles_to_train", "train_on_eos", "field_messages", "message_property_mappings"):
            if entry.get(key) not in (None, ["assistant"], "turn", "messages"):
                conversion.notes.append(f"datasets: {key} {entry[key]} is not read; data.format says what records have")
                break


@sets("data.packing")
def sample_packing(conversion: Conversion, given: Given) -> None:
    conversion.take(given, "data.packing", bool(given.value) and truth(given))


@sets("data.overlong")
def excess(conversion: Conversion, given: Given) -> None:
    kinds = {"drop": "drop", "truncate": "truncate", "raise": "error"}
    conversion.take(given, "data.overlong", kinds.get(str(given.value).lower(), "drop"))


@sets("lora.targets")
def target_linear(conversion: Conversion, given: Given) -> None:
    if given.value and truth(given):
        conversion.know(given, "all linears", True, "lora.targets: all-linear, beside those of lora_target_modules")
    else:
        conversion.drop(given, "switched off")


@sets("objective.name")
def rl(conversion: Conversion, given: Given) -> None:
    name = str(given.value).lower()
    if name in _RL:
        conversion.take(given, "objective.name", _RL[name])
        if name == "gspo":
            conversion.imply("Axolotl", "rl: gspo", "objective.ratio_level", "sequence")
    elif not given.value:
        conversion.drop(given, "none")
    else:
        raise other_objective(given, "another objective")


_DPO_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo"}


@sets("objective.name")
def dpo_loss_type(conversion: Conversion, given: Given) -> None:
    found = [str(one) for one in as_list(given)]
    if len(found) > 1 or any(one not in _DPO_LOSSES for one in found):
        raise other_objective(given, "another loss")
    for one in found:
        conversion.know(given, "dpo_loss", _DPO_LOSSES[one], "objective.name, where rl is dpo")


_PLUGINS = {"liger", "cut_cross_entropy", "kernels", "swanlab", "lm_eval", "expert_parallel"}
"""Plug-ins of Axolotl's own that change the speed or the report alone."""
_OBJECTIVES = {
    "kd": "a student of another model",
    "diffusion": "a model that denoises",
    "nemo_gym": "rollouts in an environment",
    "hatchery": "another trainer",
}


@sets("objective.name")
def plugins(conversion: Conversion, given: Given) -> None:
    """Converts the list of plug-ins, some of which have an objective of their own."""
    for one in as_list(given):
        name = str(one).removeprefix("axolotl.integrations.").partition(".")[0]
        if name in _OBJECTIVES:
            raise other_objective(given, _OBJECTIVES[name])
        if name not in _PLUGINS:
            conversion.notes.append(
                f"plugins {one} has no counterpart, and the run may differ: no code of a plug-in is run"
            )
    conversion.drop(given, "no code of a plug-in is run")


@sets("trainable")
def unfrozen(conversion: Conversion, given: Given) -> None:
    found = [str(one) for one in as_list(given)]
    conversion.drop(given, "expressions over parameters' names")
    conversion.to_fill.append(f"trainable: {', '.join(found)}; name these modules, with * as a wildcard")


_EMBEDDINGS = ("embed_tokens", "lm_head")


@sets("optim.lr_pattern")
def lr_groups(conversion: Conversion, given: Given) -> None:
    """Converts groups of modules; a parameter is in the first whose text stands anywhere in its name."""
    for group in as_list(given):
        if not isinstance(group, dict) or not isinstance(group.get("modules"), list):
            raise UserError(
                f"{given.source} gives {given.key} {group!r}, but groups of name, modules and lr are expected."
            )
        for module in group["modules"]:
            rate = Given(source=given.source, key=given.key, value=group.get("lr"))
            rates.know_rate(conversion, given, f"*{module}*", number(rate))


_OWN: dict[str, Rule] = {
    "base_model": option("model.path", text),
    "datasets": datasets,
    "test_datasets": datasets,
    "pretraining_dataset": datasets,
    "sequence_len": option("data.seq_length", whole),
    "sample_packing": sample_packing,
    "excess_length_strategy": excess,
    "micro_batch_size": option("train.micro_batch_size", whole),
    "batch_size": option("train.global_batch_size", whole),
    "num_epochs": option("train.epochs", number),
    "lr_scheduler": shared.schedule,
    "cosine_min_lr_ratio": Rule(shared.share_of_lr, ("optim.min_lr",)),
    "cosine_constant_lr_ratio": shared.off_or_lack("the schedule falls to its end"),
    "lr_quadratic_warmup": shared.off_or_lack("the warm-up is linear"),
    "bf16": bf16,
    "bfloat16": bf16,
    "fp16": fp16,
    "float16": fp16,
    "float32": shared.off_or_lack("masters are float32; model.dtype says the arithmetic"),
    "fp8": shared.off_or_lack("model.base_dtype stores the base in 8 bits"),
    "adam_eps": option("optim.eps", number),
    "adapter": adapter,
    "lora_target_linear": target_linear,
    "lora_model_dir": option("lora.init_from", text),
    "peft_use_dora": option("lora.dora", truth),
    "peft_use_rslora": option("lora.rslora", truth),
    "peft_ensure_weight_tying": hf.RULES["ensure_weight_tying"],
    "peft_layers_to_transform": hf.RULES["layers_to_transform"],
    "peft_init_lora_weights": shared.only(True, "lora.init is kaiming, or gaussian"),
    "lora_rank_pattern": option("lora.rank_pattern", lambda given: given.value),
    "lora_alpha_pattern": option("lora.alpha_pattern", lambda given: given.value),
    "loraplus_lr_ratio": rates.multiple_of_lr("lora_B"),
    "embedding_lr": rates.rate_of(*_EMBEDDINGS),
    "embedding_lr_scale": rates.multiple_of_lr(*_EMBEDDINGS),
    "lr_groups": lr_groups,
    "freeze_mm_modules": images.switch("freeze_mm_modules", "tower and projector stay frozen"),
    "image_size": Rule(lambda conversion, given: conversion.lack(given, images.SIZES)),
    "image_resize_algorithm": dropped("part of image_size"),
    "process_images": dropped("images that records name are read"),
    "load_in_8bit": shared.quantize("int8"),
    "load_in_4bit": shared.quantize("nf4"),
    "train_on_inputs": option("data.mask_prompt", lambda given: not truth(given)),
    "val_set_size": shared.holdout,
    "evals_per_epoch": fact("evals_per_epoch", number, "train.eval_every"),
    "saves_per_epoch": fact("saves_per_epoch", number, "checkpoint.every"),
    "chat_template": shared.template,
    "chat_template_jinja": shared.template,
    "rl": rl,
    "plugins": plugins,
    "rl_beta": option("objective.beta", number),
    "dpo_beta": option("objective.beta", number),
    "orpo_alpha": option("objective.beta", number),
    "simpo_gamma": option("objective.margin", number),
    "dpo_label_smoothing": option("objective.label_smoothing", number),
    "kto_desirable_weight": option("objective.desirable_weight", number),
    "kto_undesirable_weight": option("objective.undesirable_weight", number),
    "dpo_loss_type": dpo_loss_type,
    "cpo_alpha": fact("cpo_alpha", number, became="the weight of a further term"),
    "unfrozen_parameters": unfrozen,
    "reinit_weights": option("model.init", lambda given: "random" if truth(given) else "checkpoint"),
    "tensor_parallel_size": option("parallel.tensor", whole),
    "context_parallel_size": option("parallel.context", whole),
    "sequence_parallel_degree": option("parallel.context", whole),
    "use_tensorboard": option("log.tensorboard", truth),
    "relora": shared.off_or_lack("adapters are not merged while they train"),
    "jagged_restart_steps": shared.off_or_lack("the learning rate does not restart"),
    "lisa_n_layers": shared.off_or_lack("trainable says what trains"),
    "reward_model": shared.off_or_refuse("a reward model"),
    "process_reward_model": shared.off_or_refuse("a reward model"),
    "use_eaft": shared.off_or_refuse("another loss than the cross-entropy"),
    "ebft.*": shared.off_or_refuse("another objective"),
    "trl.beta": option("objective.beta", number),
    "trl.*": shared.off_or_lack("objective.name says what can be minimised"),
    "qat": shared.off_or_lack("weights are not rounded while they train"),
    "qat.*": shared.off_or_lack("weights are not rounded while they train"),
    "quantization.*": dropped("after training: rankfold convert export writes weights as they are"),
    "use_pose": shared.off_or_lack("positions are those of the text"),
    "diffusion.*": shared.off_or_refuse("a model that denoises"),
    "gptq": shared.off_or_lack("model.base_dtype encodes the weights as they are read"),
    "shrink_embeddings": shared.off_or_lack("the embedding keeps its size"),
    "resize_token_embeddings_to_32x": shared.off_or_lack("the embedding keeps its size"),
    "added_tokens_overrides": shared.off_or_lack("the tokenizer's own files say which tokens there are"),
    "eta_min": shared.min_lr,
    "full_finetune": Rule(shared.full_finetune, ("lora.rank", "trainable")),
    "lora_target_parameters": experts.target_parameters,
    **{
        f"{place}.{key}": rule
        for place in ("model_config", "overrides_of_model_config")
        for key, rule in experts.CONFIG_RULES.items()
    },
    "model_config.*": dropped("the model's own config.json says it"),
    "expert_parallel_size": option("parallel.expert", whole),
    "tokens.*": shared.off_or_lack("the tokenizer's own files say which tokens there are"),
    "relora_*": shared.off_or_lack("adapters are not merged while they train"),
    "jagged_*": shared.off_or_lack("the learning rate does not restart"),
    "dpo_use_weighting": shared.off_or_refuse("pairs that weigh by their probability"),
    "dpo_norm_loss": shared.off_or_refuse("a normalised loss"),
    "dpo_loss_weights": shared.off_or_refuse("a weighted sum of losses"),
    "rpo_alpha": shared.off_or_refuse("a further term of the loss"),
    "center_rewards_coefficient": shared.off_or_refuse("a reward model"),
    "trainer_cls": shared.off_or_refuse("a trainer of its own"),
    "scaling_softmax": shared.off_or_lack("attention's scores are scaled as the model's config.json says"),
    "noisy_embedding_alpha": shared.off_or_lack("no noise is added to embeddings"),
    "rope_scaling": shared.off_or_lack("config.json says how positions are scaled"),
    "kd_*": shared.off_or_refuse("a student of another model"),
    "lisa_*": dropped("part of what has no counterpart"),
    "eaft_*": dropped("part of what has no counterpart"),
    "vllm.*": dropped("objective.name says what can be minimised"),
    "llmcompressor.*": dropped("weights stay dense"),
    "swanlab_*": dropped(shared.CLIENT),
    "otel_*": dropped(shared.CLIENT),
    "use_otel_metrics": dropped(shared.CLIENT),
    "auto_resume_from_checkpoints": shared.resume,
    "peft.*": shared.off_or_lack("adapters start as PEFT's do: lora.init"),
    "optim_args.eps": option("optim.eps", number),
    "optim_args.*": shared.off_or_lack("optim.betas, optim.eps and optim.weight_decay are all there is"),
    "log_sweep_*": shared.off_or_lack("optim.schedule is constant, linear or cosine"),
    "lr_div_factor": shared.off_or_lack("the warm-up begins at 0"),
    "rl_adapter_ref_model": dropped("the reference is the model without its adapter: objective.reference"),
    "max_memory": dropped(shared.SPEED),
    "device_map.*": dropped(shared.SPEED),
    "dataset_shard_idx": dropped("all of data.train is read"),
    "eval_table_max_new_tokens": dropped("evaluations give the loss"),
    "tokens": shared.off_or_lack("the tokenizer's own files say which tokens there are"),
    "save_first_step": dropped("checkpoint.every says when"),
    "moe_*": dropped("options for experts are not converted"),
}
_OWN |= shared.every(
    """
    type_of_model model_type tokenizer_type tokenizer_config base_model_config is_llama_derived_model
    is_mistral_derived_model is_falcon_derived_model is_qwen_derived_model tokenizer_legacy special_tokens
    special_tokens.* eot_tokens default_system_message chat_template_kwargs.* tokenizer_use_mistral_common
    tokenizer_save_jinja_files base_model_ignore_patterns processor_type processor_kwargs.*
    overrides_of_model_config.* revision_of_model fix_untrained_tokens
    """,
    why="the model's and the tokenizer's own files say it",
)
_OWN |= shared.every(
    """
    strict use_kernels lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel liger_*
    liger_rope liger_rms_norm liger_glu_activation liger_swiglu liger_layer_norm
    liger_fused_linear_cross_entropy liger_cross_entropy cut_cross_entropy chunked_cross_entropy use_scattermoe
    use_sonicmoe tiled_mlp flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv
    flash_optimum use_dsv4_kernels dsv4_fp4_grouped_mode quantize_moe_experts experts_implementation
    llama4_linearized_experts fused_attn_kernel unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o
    unsloth_cross_entropy_loss unsloth_rms_norm unsloth_rope use_onebitllms
    """,
    why=shared.KERNELS,
)
_OWN |= shared.every(
    """
    flash_attention xformers_attention sdp_attention flex_attention flex_attn_compile_kwargs.* s2_attention
    eager_attention sage_attention gemma4_hybrid_attn_impl large_head_attention
    """,
    why=shared.ATTENTION,
)
_OWN |= shared.every(
    """
    dataset_prepared_path skip_prepare_dataset dataset_processes dataset_shard_num push_dataset_to_hub
    shuffle_merged_datasets dataset_exact_deduplication streaming streaming_multipack_buffer_size
    pretraining_sample_concatenation pretrain_multipack_attn min_sample_len dataset_keep_in_memory
    num_dataset_shards_to_save preprocess_iterable
    """,
    why="data.train and data.mix name files; rankfold preprocess prepares them",
)
_OWN |= shared.every(
    """
    pad_to_sequence_len eval_sample_packing sample_packing_group_size sample_packing_bin_size
    sample_packing_sequentially sample_packing_eff_est total_num_tokens multipack_real_batches
    max_packed_sequence_len eval_batch_size eval_sequence_len batch_flattening pad_to_multiple_of
    curriculum_sampling
    """,
    why="rows are packed as full as they can be",
)
_OWN |= shared.every(
    """
    activation_offloading layer_offloading selective_checkpointing.* gc_steps lora_on_cpu
    qlora_sharded_model_loading experimental_skip_move_to_device gpu_memory_limit deepcompile dp_shard_size
    dp_replicate_size heads_k_stride ring_attn_func fsdp_version torchdistx_path fsdp_final_state_dict_type
    model_quantization_config model_quantization_config_kwargs.* bnb_config_kwargs.* gptq_groupsize
    gptq_model_v1 gptq_disable_exllama mean_resizing_embeddings embeddings_skip_upcast dataloader_drop_last
    use_ray ray_num_workers resources_per_worker.* peft_autocast_adapter_dtype lora_fan_in_fan_out
    torch_compile_options.* fp32_norms fp8_enable_fsdp_float8_all_gather merge_method low_cpu_mem_usage
    seq_len_from_end
    """,
    why=shared.SPEED,
)
_OWN |= shared.every(
    """
    loss_watchdog_threshold loss_watchdog_patience
    """,
    why="guards.spike_policy says what a spike of the loss does",
)
_OWN |= shared.every(
    """
    eval_table_size eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval do_bench_eval bench_dataset
    generate_samples num_generation_samples generation_max_new_tokens generation_temperature
    generation_prompt_ratio generation_do_sample lm_eval_tasks lm_eval_*
    """,
    why="evaluations give the loss",
)
_OWN |= shared.every(
    """
    profiler_steps profiler_steps_start
    """,
    why="log.profile_steps says which steps are traced",
)
_OWN |= shared.every("hf_use_auth_token axolotl_config_path dataset_num_shards", why=shared.LOCAL)
_OWN |= shared.every("debug group_by_length include_tkps num_labels wandb_*", why=shared.REPORT)

RULES: dict[str, Rule] = {key: shared.unless_empty(rule) for key, rule in (hf.RULES | _OWN).items()}


DEFAULTS: dict[str, Default | Ours] = hf.DEFAULTS | {
    "model.dtype": Default(
        lambda conversion: "float32" if conversion.facts.get("no_bf16") else "bfloat16",
        "AxolotlInputConfig.bf16 = auto",
    ),
    "model.base_dtype": Default(
        lambda conversion: None, "LoraConfig.load_in_4bit and load_in_8bit = False, also with adapter: qlora"
    ),
    "model.init": Default("checkpoint", "AxolotlInputConfig.reinit_weights"),
    "train.router_aux_loss_coef": Ours("that of the model's config.json, where its output_router_logits is true"),
    "parallel.expert": Default(1, "AxolotlInputConfig.expert_parallel_size = None"),
    "data.mix": Ours("all datasets are named"),
    "data.format": Ours("each dataset has its type"),
    "data.seq_length": Default(512, "AxolotlInputConfig.sequence_len"),
    "data.packing": Default(False, "AxolotlInputConfig.sample_packing = None"),
    "data.overlong": Default(
        lambda conversion: "cut" if conversion.options.get("data.format") == "text" else "drop",
        "AxolotlInputConfig.excess_length_strategy = None; texts are cut into pieces of sequence_len",
    ),
    "data.mask_prompt": Default(True, "HyperparametersConfig.train_on_inputs"),
    "data.chat_template": Default(None, "AxolotlInputConfig.chat_template"),
    "data.chat_arguments": Ours("the template's own"),
    "train.micro_batch_size": Default(1, "HyperparametersConfig.micro_batch_size"),
    "train.epochs": Default(1.0, "HyperparametersConfig.num_epochs"),
    "optim.lr": Ours("Axolotl refuses a file without learning_rate"),
    "optim.schedule": Default("cosine", "HyperparametersConfig.lr_scheduler"),
    "optim.warmup_ratio": Default(
        lambda conversion: None if conversion.options.get("optim.warmup_steps") is not None else 0.03,
        "TrainerBuilderBase._configure_warmup_and_logging, at most 100 steps",
    ),
    "checkpoint.dir": Default("./model-out", "ModelOutputConfig.output_dir"),
    "checkpoint.every": Ours("once an epoch, whose steps are only known with the data"),
    "checkpoint.keep": Default(4, "TrainerBuilderBase._configure_save_and_eval_strategy"),
    "lora.rank": Ours("Axolotl refuses an adapter without lora_r"),
    "lora.alpha": Ours("Axolotl refuses an adapter without lora_alpha"),
    "lora.dropout": Default(0.0, "LoraConfig.lora_dropout"),
    "lora.targets": Ours("Axolotl refuses an adapter without targets"),
    "lora.init_from": Default(None, "LoraConfig.lora_model_dir"),
    "lora.rank_pattern": Default(None, "LoraConfig.lora_rank_pattern"),
    "lora.alpha_pattern": Default(None, "LoraConfig.lora_alpha_pattern"),
    "objective.name": Default("language_modeling", "AxolotlInputConfig.rl = None"),
    "objective.beta": Default(0.1, "DPOConfig.beta"),
    "objective.label_smoothing": Default(0.0, "DPOConfig.label_smoothing"),
    "objective.margin": Default(
        lambda conversion: 0.5 if conversion.options.get("objective.name") == "simpo" else 0.0, "CPOConfig.simpo_gamma"
    ),
    "objective.desirable_weight": Default(1.0, "HFRLTrainerBuilder: kto_desirable_weight or 1.0"),
    "objective.undesirable_weight": Default(1.0, "HFRLTrainerBuilder: kto_undesirable_weight or 1.0"),
    "objective.reference": Default(
        lambda conversion: reference(conversion, _adapters(conversion)),
        "HFRLTrainerBuilder: model_ref, none with an adapter",
    ),
}


def _adapters(conversion: Conversion) -> bool:
    """Returns whether adapters train: LoraConfig.adapter is None by default, and then everything does, whatever lora_r
    is.
    """
    return bool(conversion.facts.get("lora", False))


def _finish(conversion: Conversion) -> None:
    """Lists options that depend on an epoch's steps, and adds facts that other keys imply."""
    facts = conversion.facts
    experts.set_coefficient(conversion)
    if facts.get("all linears"):  # load_lora adds lora_target_modules, of which the embedding and head are no such
        named = [name for name in conversion.options.get("lora.targets", []) if name in _EMBEDDINGS]
        given = Given(source="derived", key="lora_target_linear", value=True)
        conversion.take(given, "lora.targets", ["all-linear", *named])
    if conversion.options.get("objective.name") == "dpo":
        conversion.options["objective.name"] = facts.get("dpo_loss", "dpo")
    if conversion.options.get("objective.name") == "simpo" and facts.get("cpo_alpha", 1.0):
        alpha = Given(source="CPOConfig", key="cpo_alpha", value=facts.get("cpo_alpha", 1.0))
        raise other_objective(alpha, "a further term of the chosen answer (cpo_alpha: 0 is SimPO without it)")
    if conversion.options.get("objective.name") == "grpo":
        trl_grpo.complete(conversion)
    for key, became in (("saves_per_epoch", "checkpoint.every"), ("evals_per_epoch", "train.eval_every")):
        if facts.get(key):
            conversion.to_fill.append(f"{became}: the steps of an epoch over {key} {facts[key]:g}")
    if "wandb_project" in facts:
        facts.setdefault("use_wandb", True)  # WandbConfig: a project switches it on
    facts.setdefault("save_strategy", "steps" if "save_steps" in facts else "epoch")
    if facts.get("freeze_mm_modules"):
        facts["full training"] = images.LANGUAGE_MODEL
    elif conversion.given("processor_type") and _adapters(conversion):
        conversion.to_fill.append(
            "lora.targets: names mean the language model here; where Axolotl's mean modules of the tower too, add them "
            r"as 'vision_tower\..*q_proj'"
        )
    if conversion.given("lr_groups", "embedding_lr", "embedding_lr_scale"):
        conversion.notes.append(
            "Axolotl's learning rates by module take weight decay from embeddings and the head; here they decay"
        )
    if "eval_steps" in facts:
        facts.setdefault("eval_strategy", "steps")


RULES |= {f"trl.{key}": rule for key, rule in trl_grpo.OWN.items()}
DEFAULTS |= {name: one for name, one in trl_grpo.OWN_DEFAULTS.items() if name not in DEFAULTS}

AXOLOTL = Trainer(
    name="Axolotl", rules=RULES, defaults=DEFAULTS, adapters=_adapters, finish=_finish, dropout_with_answers=False
)
