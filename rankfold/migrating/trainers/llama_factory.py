"""Rules for LLaMA-Factory's files and flags."""

from __future__ import annotations

from engine.errors import UserError
from rankfold.migrating import rates
from rankfold.migrating.conversion import (
    Conversion,
    Rule,
    dropped,
    fact,
    names,
    number,
    option,
    other_objective,
    sets,
    text,
    truth,
    whole,
)
from rankfold.migrating.given import Given
from rankfold.migrating.trainer import Default, Ours, Trainer
from rankfold.migrating.trainers import hugging_face as hf
from rankfold.migrating.trainers import images, shared
from rankfold.migrating.trainers.trl import reference

_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_STAGES = ("pt", "sft", "dpo", "kto")
_METHODS = ("lora", "full", "freeze")


@sets("objective.name")
def stage(conversion: Conversion, given: Given) -> None:
    name = str(given.value)
    if name not in _STAGES:
        raise other_objective(given, {"rm": "a reward model", "ppo": "PPO"}.get(name, "another stage"))
    conversion.know(given, "stage", name, f"objective.name: {'language_modeling' if name in ('pt', 'sft') else name}")


@sets("objective.name")
def pref_loss(conversion: Conversion, given: Given) -> None:
    if str(given.value) not in _LOSSES:
        raise other_objective(given, "another loss")
    conversion.know(given, "pref_loss", _LOSSES[str(given.value)], "objective.name, where the stage is dpo")


@sets("lora.rank", "trainable")
def finetuning_type(conversion: Conversion, given: Given) -> None:
    name = str(given.value)
    if name == "oft":
        raise UserError(
            f"{given.source} gives finetuning_type as oft, but orthogonal adapters are not supported: give lora."
        )
    if name not in _METHODS:
        raise UserError(f"{given.source} gives finetuning_type as {name!r}: write lora, full or freeze.")
    conversion.know(given, "finetuning_type", name, f"trains {'adapters' if name == 'lora' else name}")


@sets("data.packing")
def neat_packing(conversion: Conversion, given: Given) -> None:
    if truth(given):
        conversion.take(given, "data.packing", True, "attention stays inside each sample")
    else:
        conversion.drop(given, "switched off")


def packing(conversion: Conversion, given: Given) -> None:
    conversion.know(given, "packing", truth(given) if given.value is not None else None, "data.packing")


@sets("data.train", "data.validation")
def dataset(conversion: Conversion, given: Given) -> None:
    which = "data.validation" if given.key == "eval_dataset" else "data.train"
    conversion.know(
        given, f"{which} of the hub", given.value, f"{which}: the files that dataset_info.json names for it"
    )


_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
}
"""Formatting of dataset_info.json -> its columns, as they are called by default."""


@sets("data.train", "data.mix", "data.validation")
def registered(conversion: Conversion, given: Given) -> None:
    """Converts entries of dataset_info.json: those that are files become data.train and data.mix."""
    which = "data.validation" if given.key.startswith("eval") else "data.train"
    entries = [one for one in given.value if isinstance(one, dict)] if isinstance(given.value, list) else []
    files = [f"{one.get('folder', 'data')}/{one['file_name']}" for one in entries if one.get("file_name")]
    if not files or len(files) < len(entries) or not all(file.endswith(shared.FILES) for file in files):
        conversion.drop(given, "not all are files: save them as files and name these")
        return
    counts = [one.get("records") for one in entries]
    limit = next((row.given.value for row in conversion.rows if row.given.key == "max_samples"), None)
    known = [min(one, limit) if isinstance(limit, int) else one for one in counts if isinstance(one, int)]
    shared.files(conversion, given, which, files, known if len(known) == len(files) else None)
    for entry in entries:
        usual = _COLUMNS.get(str(entry.get("formatting", "alpaca")), {})
        columns = entry["columns"] if isinstance(entry.get("columns"), dict) else {}
        other = [
            f"{key} {name}" for key, name in columns.items() if key in usual and name not in (usual[key], key, "text")
        ]
        if other:
            conversion.notes.append(
                f"{entry['file_name']} has other fields ({', '.join(other)}): data.format says which are read"
            )
        if entry.get("num_samples"):
            conversion.notes.append(
                f"num_samples {entry['num_samples']} of {entry['file_name']}: shorten the file to as many"
            )


RULES: dict[str, Rule] = hf.RULES | {
    "dataset_info": registered,
    "eval_dataset_info": registered,
    "stage": stage,
    "finetuning_type": finetuning_type,
    "cutoff_len": option("data.seq_length", whole),
    "template": shared.template,
    "dataset": dataset,
    "eval_dataset": dataset,
    "lora_target": shared.targets,
    "additional_target": shared.modules_to_save,
    "adapter_name_or_path": option("lora.init_from", text),
    "create_new_adapter": shared.off_or_lack("the adapter that is named continues training"),
    "quantization_bit": shared.quantization_bits,
    "quantization_type": shared.only("nf4", "4 bits are nf4"),
    "quantization_method": shared.only("bnb", "model.base_dtype encodes the weights as they are read"),
    "pure_bf16": fact("pure_bf16", truth, "model.dtype", became="model.dtype: bfloat16; masters stay float32"),
    "disable_gradient_checkpointing": option("memory.recompute", lambda given: "selective" if truth(given) else "full"),
    "packing": Rule(packing, ("data.packing",)),
    "neat_packing": neat_packing,
    "mask_history": shared.off_or_lack("every answer of a conversation is trained on"),
    "freeze_trainable_layers": fact("freeze_layers", whole, "trainable"),
    "freeze_trainable_modules": fact("freeze_modules", names, "trainable"),
    "freeze_extra_modules": fact("freeze_extra", names, "trainable"),
    "pref_beta": option("objective.beta", number),
    "pref_loss": pref_loss,
    "dpo_label_smoothing": option("objective.label_smoothing", number),
    "simpo_gamma": option("objective.margin", number),
    "kto_chosen_weight": option("objective.desirable_weight", number),
    "kto_rejected_weight": option("objective.undesirable_weight", number),
    "pref_bco_weight": shared.off_or_refuse("a further term of the loss"),
    "ld_alpha": shared.off_or_refuse("tokens that weigh by their position"),
    "enable_thinking": shared.only(True, "every turn shows its reasoning: data.chat_template"),
    "preserve_thinking": shared.off_or_lack("every turn shows its reasoning: data.chat_template"),
    "block_diag_attn": dropped("attention stays inside each sample: data.packing"),
    "add_tokens": shared.off_or_lack("the embedding keeps its size"),
    "pref_ftx": shared.off_or_refuse("a further term of the loss"),
    "train_from_scratch": option("model.init", lambda given: "random" if truth(given) else "checkpoint"),
    "val_size": shared.holdout,
    "early_stopping_steps": shared.patience,
    "mix_strategy": shared.only("concat", "data.mix weighs files against each other"),
    "interleave_probs": shared.off_or_lack("data.mix weighs files against each other"),
    "rope_scaling": shared.off_or_lack("config.json says how positions are scaled"),
    "resize_vocab": shared.off_or_lack("the embedding keeps its size"),
    "new_special_tokens": shared.off_or_lack("the embedding keeps its size"),
    "tokenized_path": shared.off_or_lack("rankfold preprocess makes a folder that data.train can be"),
    "default_system": shared.off_or_lack("records have their own system message"),
    "ref_model": shared.off_or_lack("the reference is the model as it starts: objective.reference"),
    "ref_model_adapters": shared.off_or_lack("the reference is the model as it starts: objective.reference"),
    "reward_model": shared.off_or_refuse("PPO"),
    "moe_aux_loss_coef": option("train.router_aux_loss_coef", number),
    "tensor_model_parallel_size": option("parallel.tensor", whole),
    "pipeline_model_parallel_size": option("parallel.pipeline", whole),
    "expert_model_parallel_size": option("parallel.expert", whole),
    "sequence_parallel": option("parallel.sequence", truth),
    "virtual_pipeline_model_parallel_size": option("parallel.virtual", whole),
    "recompute_granularity": option("memory.recompute", text),
}
RULES |= {
    key: shared.off_or_lack(why)
    for why, keys in (
        ("AdamW is the optimizer", ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon")),
        ("adapters start as PEFT's do", ("pissa_init", "pissa_convert", "mixture_of_depths")),
        ("every so many layers train, not the last: name them in trainable", ("use_llama_pro",)),
        ("attention sees all of a row", ("shift_attn",)),
        ("model.base_dtype stores the base in 8 bits", ("fp8",)),
    )
    for key in keys
}
RULES |= {
    key: shared.off_or_refuse("another loss than the cross-entropy")
    for key in ("use_dft_loss", "use_asft_loss", "use_eaft_loss")
}
RULES |= {
    f"{start}_*": dropped("part of what has no counterpart")
    for start in ("galore", "apollo", "badam", "asft", "eaft", "pissa", "loraplus", "oft", "fp8")
}
RULES |= {
    "media_dir": option("data.image_folder", text),
    "freeze_vision_tower": images.switch("freeze_vision_tower", "the tower stays frozen"),
    "freeze_multi_modal_projector": images.switch("freeze_projector", "the projector stays frozen"),
    "freeze_language_model": images.switch("freeze_language_model", "the language model stays frozen"),
    "train_mm_proj_only": images.switch("projector_only", "the projector alone trains"),
    "loraplus_lr_ratio": rates.multiple_of_lr("lora_B"),
    **{key: Rule(lambda conversion, given: conversion.lack(given, images.SIZES))
       for key in ("image_max_pixels", "image_min_pixels", "image_resolution")},
    **{key: shared.off_or_lack(images.PROCESSOR) for key in ("image_do_pan_and_scan", "crop_to_patches")},
    **shared.every(
        "video_max_pixels video_min_pixels video_fps video_maxlen video_resolution use_audio_in_video",
        why=images.VIDEOS,
    ),
}  # fmt: skip
RULES |= shared.every(
    """
    dataset_dir buffer_size streaming data_shared_file_system preprocessing_batch_size ignore_pad_token_for_loss
    eval_on_each_dataset tool_format split_special_tokens
    """,
    why="records are read field by field: data.format, data.mask_prompt",
)
RULES |= shared.every(
    """
    use_v1_kernels enable_liger_kernel use_unsloth_gc use_reentrant_gc double_quantization
    quantization_device_map upcast_layernorm upcast_lmhead_output use_kv_cache offload_folder print_param_status
    use_kt use_mca use_hyper_parallel use_ray moe_grouped_gemm
    moe_token_dispatcher_type bias_activation_fusion apply_rope_fusion use_distributed_optimizer
    overlap_param_gather overlap_grad_reduce include_effective_tokens_per_second compute_accuracy
    disable_shuffling
    """,
    why=shared.SPEED,
)
RULES |= shared.every(
    """
    ray_run_name ray_storage_path ray_num_workers resources_per_worker placement_strategy ray_init_kwargs
    master_addr master_port
    """,
    why="torchrun starts the ranks",
)
RULES |= shared.every(
    """
    infer_backend infer_dtype vllm_maxlen vllm_gpu_util vllm_enforce_eager export_dir export_size export_device
    max_new_tokens temperature top_p top_k do_sample num_beams repetition_penalty
    """,
    why="for generating text, not for training",
)
RULES |= {
    "kt_optimize_rule": dropped(shared.SPEED),
    "kt_*": dropped(shared.SPEED),
    "kt_config.*": dropped(shared.SPEED),
    "chunk_size": dropped(shared.SPEED),
    "cpu_infer": dropped(shared.SPEED),
    "mode": dropped(shared.SPEED),
    "calculate_per_token_loss": dropped(shared.ALWAYS),
    "reward_model_type": dropped("there is no PPO"),
    "global_batch_size": option("train.global_batch_size", whole),
    **shared.every("messages formatting role_tag content_tag user_tag assistant_tag", why="data.format says it"),
}


def _preference(conversion: Conversion) -> str:
    """Returns the objective; pref_loss counts with stage dpo alone."""
    kinds = {"dpo": conversion.facts.get("pref_loss", "dpo"), "kto": "kto"}
    return str(kinds.get(conversion.facts.get("stage", "sft"), "language_modeling"))


DEFAULTS: dict[str, Default | Ours] = hf.DEFAULTS | {
    "model.dtype": Default("bfloat16", "ModelArguments.compute_dtype = None: infer_optim_dtype, of most checkpoints"),
    "model.init": Default("checkpoint", "ModelArguments.train_from_scratch"),
    "data.mix": Ours("all datasets are named"),
    "data.seq_length": Default(2048, "DataArguments.cutoff_len"),
    "data.packing": Default(
        lambda conversion: "concatenate" if conversion.facts.get("stage") == "pt" else False,
        "DataArguments.packing = None, which is true for pt",
    ),
    "data.mask_prompt": Default(True, "DataArguments.train_on_prompt"),
    "data.chat_template": Default(None, "DataArguments.template"),
    "data.chat_arguments": Ours("the template's own"),
    "memory.recompute": Default("full", "ModelArguments.disable_gradient_checkpointing = False"),
    "lora.rank": Default(8, "LoraArguments.lora_rank"),
    "lora.alpha": Default(
        lambda conversion: 2.0 * float(conversion.options["lora.rank"]),
        "FinetuningArguments.lora_alpha = 2 x lora_rank",
    ),
    "lora.dropout": Default(0.0, "LoraArguments.lora_dropout"),
    "lora.targets": Default(["all-linear"], "LoraArguments.lora_target = all"),
    "lora.init_from": Default(None, "ModelArguments.adapter_name_or_path"),
    "objective.name": Default(_preference, "FinetuningArguments.stage"),
    "objective.beta": Default(0.1, "RLHFArguments.pref_beta"),
    "objective.label_smoothing": Default(0.0, "RLHFArguments.dpo_label_smoothing"),
    "objective.margin": Default(
        lambda conversion: 0.5 if conversion.options.get("objective.name") == "simpo" else 0.0,
        "RLHFArguments.simpo_gamma",
    ),
    "objective.desirable_weight": Default(1.0, "RLHFArguments.kto_chosen_weight"),
    "objective.undesirable_weight": Default(1.0, "RLHFArguments.kto_rejected_weight"),
    "train.router_aux_loss_coef": Default(0.0, "ModelArguments.moe_aux_loss_coef = None"),
    "objective.reference": Default(
        lambda conversion: reference(conversion, _adapters(conversion)), "create_ref_model: none beside an adapter"
    ),
    "parallel.virtual": Ours("its plug-in for Megatron alone has it"),
    "parallel.expert": Ours("its plug-in for Megatron alone has it"),
}


def _adapters(conversion: Conversion) -> bool:
    """Returns whether adapters train: FinetuningArguments.finetuning_type is lora by default."""
    return bool(conversion.facts.get("finetuning_type", "lora") == "lora")


def _refuse_without_training(conversion: Conversion) -> None:
    """Refuses files for chats, exports and predictions."""
    given = {row.given.key: row.given for row in conversion.rows}
    other = next(
        (key for key in ("export_dir", "infer_backend", "do_predict") if key in given and given[key].value), None
    )
    if other is not None and not (given["do_train"].value if "do_train" in given else False):
        raise UserError(
            f"{given[other].source} has {other} and no do_train, so that it does not train: give a file that does."
        )


def _finish(conversion: Conversion) -> None:
    facts, options = conversion.facts, conversion.options
    _refuse_without_training(conversion)
    if facts.get("pure_bf16"):
        options["model.dtype"] = "bfloat16"
    packed = facts.get("packing")
    if packed and facts.get("stage") == "pt":
        conversion.imply("derived", "packing", "data.packing", "concatenate", "text end to end")
    elif packed:
        conversion.imply("derived", "packing", "data.packing", True)
        conversion.notes.append(
            "packing without neat_packing lets the samples of a row see each other; here attention stays inside each"
        )
    elif packed is False:
        conversion.imply("derived", "packing", "data.packing", False)
    if facts.get("finetuning_type") == "freeze":
        _freeze(conversion)
    _images(conversion)


_IMAGES = (
    "media_dir", "image_max_pixels", "image_min_pixels", "freeze_vision_tower", "freeze_multi_modal_projector",
    "freeze_language_model", "train_mm_proj_only",
)  # fmt: skip


def _images(conversion: Conversion) -> None:
    """Sets what trains of a vision-language model: by default the language model alone. Full training says
    so of every model, because nothing given tells which has a vision model."""
    facts = conversion.facts
    frozen = {part: facts.get(f"freeze_{part}", part != "language_model") for part in _PARTS}
    if facts.get("projector_only"):
        frozen = {part: part != "projector" for part in _PARTS}
    facts["full training"] = [] if frozen["language_model"] else list(images.LANGUAGE_MODEL)
    trained = [name for part, name in _PARTS.items() if name and not frozen[part]]
    if facts.get("finetuning_type", "lora") == "full" and trained:
        conversion.to_fill.append(
            f"trainable: {' and '.join(trained)} train too; add the names they have in this model, or vision for both"
        )
    elif not frozen["vision_tower"]:
        conversion.to_fill.append(
            "lora.targets: freeze_vision_tower false puts adapters into the tower too; add names of its linears, as "
            r"'vision_tower\..*' or 'visual\.blocks\..*'"
        )
    if conversion.given(*_IMAGES) and not conversion.given("image_max_pixels"):
        conversion.notes.append(
            "LLaMA-Factory makes images of more than 589,824 pixels smaller (image_max_pixels); here they keep their "
            "size until the model's own processor cuts them"
        )


_PARTS = {"vision_tower": "the tower", "projector": "the projector", "language_model": ""}
"""Parts of a vision-language model that may be frozen -> what they are called where they train in full."""


def _freeze(conversion: Conversion) -> None:
    """Sets the layers that train; the last ones have numbers only once the model is known."""
    layers, modules = facts_of(conversion)
    source = "FinetuningArguments.finetuning_type = freeze"
    inside = [f".{name}" for name in modules] or [""]
    extra = conversion.facts.get("freeze_extra", [])
    if layers < 0:
        chosen = [f"layers.{number}{name}" for number in range(-layers) for name in inside]
    else:
        chosen = [f"layers.LAST-{back}{name}" for back in range(layers) for name in inside]
        conversion.to_fill.append(
            f"trainable: the last {layers} layers train; write their numbers, from config.json's num_hidden_layers"
        )
    conversion.imply(source, "freeze_trainable_layers", "trainable", [*chosen, *extra])
    conversion.imply(source, "freeze_trainable_layers", "lora.rank", 0)


def facts_of(conversion: Conversion) -> tuple[int, list[str]]:
    """Returns layers and modules of freeze training; FreezeArguments has 2 and all by default."""
    modules = conversion.facts.get("freeze_modules", ["all"])
    return conversion.facts.get("freeze_layers", 2), [] if modules == ["all"] else modules


LLAMA_FACTORY = Trainer(
    name="LLaMA-Factory", rules=RULES, defaults=DEFAULTS, adapters=_adapters, finish=_finish, dropout_with_answers=False
)
