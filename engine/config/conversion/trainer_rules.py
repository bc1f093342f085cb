"""Flags of training scripts (Hugging Face's Trainer, SAT and Megatron, MiniMind): what each becomes."""

from __future__ import annotations

from engine.config.conversion.conversion import (
    DTYPES,
    Conversion,
    Rule,
    dropped,
    fact,
    number,
    option,
    sets,
    text,
    truth,
    whole,
)
from engine.config.conversion.launcher_rules import dtype_switch, set_dtype
from engine.config.conversion.reading import Given
from engine.errors import UserError

_ARCHITECTURE = "the model's own config.json says it"
_CLIENT = "there is no client for it: log.metrics, log.tensorboard"
_VISION = "the language model is trained; images are not read"
_EVAL = "the evaluation takes train.micro_batch_size rows"
_ALWAYS = "always so"
_INFERENCE = "for generating text, not for training"


_FUSED_TARGETS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules of one matrix -> the targets that they are here."""


@sets("model.dtype")
def _dtype(conversion: Conversion, given: Given) -> None:
    if str(given.value) not in DTYPES:
        raise UserError(f"{given.source} gives {given.key} as {given.value!r}: write bfloat16, float16 or float32.")
    set_dtype(conversion, given, DTYPES[str(given.value)])


@sets("lora.targets", "lora.fused")
def _targets(conversion: Conversion, given: Given) -> None:
    written = given.value if isinstance(given.value, list) else str(given.value).split(",")
    names = [str(name).strip() for name in written]
    if len(names) == 1 and names[0] == "all-linear":
        conversion.drop(given, "the default of lora.targets: all linears of the layers")
        return
    fused = [name for name in names if name in _FUSED_TARGETS]
    plain: list[str] = []
    for name in names:
        # MiniCPM-V's language model is named llm in the whole; here it is the whole
        plain += _FUSED_TARGETS.get(name, (name.removeprefix("llm\\.").removeprefix("llm."),))
    renamed = not fused and plain != names
    conversion.take(given, "lora.targets", plain, "the language model is the whole here" if renamed else "")
    if fused:
        kinds = {"gate_up" if name == "gate_up_proj" else "qkv" for name in fused}
        kind = kinds.pop() if len(kinds) == 1 else "all"
        conversion.take(given, "lora.fused", kind, f"one adapter for {' and one for '.join(fused)}")


@sets("trainable")
def _modules_to_save(conversion: Conversion, given: Given) -> None:
    written = given.value if isinstance(given.value, list) else str(given.value).split(",")
    conversion.take(given, "trainable", [str(name).strip() for name in written])


@sets("lora.rank", "trainable")
def _use_lora(conversion: Conversion, given: Given) -> None:
    if truth(given):
        conversion.know(given, "lora", True, "lora.rank above 0")
    else:
        conversion.take(given, "lora.rank", 0, "no adapters")
        conversion.imply(given.source, given.key, "trainable", ["*"], "everything trains")


@sets("trainable")
def _tune_language(conversion: Conversion, given: Given) -> None:
    if truth(given):
        conversion.take(given, "trainable", ["*"])
    else:
        conversion.know(given, "tune_llm", False, "the language model stays frozen under its adapters")


@sets()
def _vision(conversion: Conversion, given: Given) -> None:
    conversion.drop(given, _VISION)


@sets("optim.schedule")
def _schedule(conversion: Conversion, given: Given) -> None:
    kinds = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
    if str(given.value) in kinds:
        conversion.take(given, "optim.schedule", kinds[str(given.value)])
    else:
        conversion.drop(given, f"{given.value} has no counterpart: optim.schedule is constant, linear or cosine")


@sets("log.tensorboard")
def _report_to(conversion: Conversion, given: Given) -> None:
    names = given.value if isinstance(given.value, list) else [given.value]
    if any(str(name) in ("tensorboard", "all") for name in names):
        conversion.take(given, "log.tensorboard", True)
    else:
        conversion.drop(given, _CLIENT if str(given.value) != "none" else "nothing is reported outside by itself")


@sets("optim.clip_grad_norm")
def _max_grad_norm(conversion: Conversion, given: Given) -> None:
    value = number(given)
    configured = conversion.facts.get("deepspeed_clipping")
    if configured is not None and configured != value:
        conversion.drop(given, f"DeepSpeed clips at its own gradient_clipping, {configured:g}, whatever this says")
        return
    ignored = conversion.facts.get("distributed_type") == "DEEPSPEED" and configured is None
    note = "applied here; DeepSpeed without gradient_clipping ignored it" if ignored else ""
    conversion.take(given, "optim.clip_grad_norm", value, note)


@sets("train.steps")
def _steps(conversion: Conversion, given: Given) -> None:
    if whole(given) <= 0:
        conversion.drop(given, "not a number of steps; epochs end the run")
        return
    conversion.take(given, "train.steps", whole(given))


@sets()
def _strategy(conversion: Conversion, given: Given) -> None:
    if str(given.value) == "no":
        conversion.facts[f"no_{given.key}"] = True
    conversion.drop(given, "steps are the unit: train.eval_every, checkpoint.every, log.every")


@sets("train.target_eval_loss")
def _target_loss(conversion: Conversion, given: Given) -> None:
    conversion.facts["mlperf"] = True
    if conversion.has("train.target_eval_loss"):
        conversion.take(given, "train.target_eval_loss", number(given))
    else:
        conversion.drop(given, "the run ends at train.steps; evaluations are in the metrics")


@sets("checkpoint.resume")
def _resume(conversion: Conversion, given: Given) -> None:
    if str(given.value).lower() in ("0", "false", "none"):
        conversion.drop(given, "checkpoint.resume auto starts afresh in a fresh folder")
    elif isinstance(given.value, bool) or str(given.value) == "1":
        conversion.take(given, "checkpoint.resume", "auto")
    else:
        conversion.drop(given, f"{given.value} is a checkpoint of the other trainer")


@sets()
def _named_file(conversion: Conversion, given: Given) -> None:
    if given.file_read:
        conversion.know(given, "deepspeed_file", given.value, "a DeepSpeed file, converted key by key above")
    else:
        conversion.miss(given, "no such file beside this one: put it there, or convert it alone")


@sets("memory.recompute")
def _recompute(conversion: Conversion, given: Given) -> None:
    conversion.take(given, "memory.recompute", "full" if truth(given) else "selective")


_TRAINER: dict[str, Rule] = {
    "model_name_or_path": option("model.path", text),
    "model_path": option("model.path", text),
    "model_name": option("model.path", text),
    "tokenizer_name_or_path": option("data.tokenizer", text),
    "data_path": option("data.train", text),
    "train_file": option("data.train", text),
    "eval_data_path": option("data.validation", text),
    "validation_file": option("data.validation", text),
    "dataset_path": fact(
        "dataset", text, "data.train", "data.validation", became="data.train and data.validation: name its files"
    ),
    "dataset_name": fact(
        "dataset", text, "data.train", "data.validation", became="data.train and data.validation: name its files"
    ),
    "max_seq_len": option("data.seq_length", whole),
    "max_seq_length": option("data.seq_length", whole),
    "model_max_length": option("data.seq_length", whole),
    "max_length": option("data.seq_length", whole),
    "cutoff_len": option("data.seq_length", whole),
    "seq_length": option("data.seq_length", whole),
    "packing": option("data.packing", truth),
    "bf16": dtype_switch("bfloat16"),
    "fp16": dtype_switch("float16"),
    "tf32": dropped("torch's own setting of products in float32 is kept"),
    "bf16_full_eval": dropped("evaluations have the arithmetic of training"),
    "fp16_full_eval": dropped("evaluations have the arithmetic of training"),
    "logging_steps": option("log.every", whole),
    "eval_steps": fact("eval_every", whole, "train.eval_every"),
    "save_steps": option("checkpoint.every", whole),
    "save_total_limit": option("checkpoint.keep", whole),
    "output_dir": option("checkpoint.dir", text),
    "overwrite_output_dir": dropped("a folder that holds a run goes on with it"),
    "per_device_train_batch_size": fact("micro", whole, "train.micro_batch_size"),
    "per_device_eval_batch_size": dropped(_EVAL),
    "gradient_accumulation_steps": fact("accumulation", whole, "train.global_batch_size"),
    "lr_scheduler_type": _schedule,
    "learning_rate": option("optim.lr", number),
    "weight_decay": option("optim.weight_decay", number),
    "warmup_ratio": fact("warmup_ratio", number, "optim.warmup_steps"),
    "warmup_steps": option("optim.warmup_steps", whole),
    "adam_beta1": fact("beta1", number, "optim.betas"),
    "adam_beta2": fact("beta2", number, "optim.betas"),
    "adam_epsilon": option("optim.eps", number),
    "max_grad_norm": _max_grad_norm,
    "use_gradient_checkpointing": _recompute,
    "gradient_checkpointing": _recompute,
    "gradient_checkpointing_kwargs": dropped("memory.recompute says what is kept"),
    "target_eval_loss": _target_loss,
    "use_peft_lora": _use_lora,
    "use_lora": _use_lora,
    "lora_r": option("lora.rank", whole),
    "lora_rank": option("lora.rank", whole),
    "lora_alpha": option("lora.alpha", number),
    "lora_dropout": option("lora.dropout", number),
    "lora_target_modules": _targets,
    "lora_modules_to_save": _modules_to_save,
    "modules_to_save": _modules_to_save,
    "max_steps": _steps,
    "num_train_epochs": fact("epochs", number, "train.epochs"),
    "use_flash_attn": dropped("the fastest attention that can run is taken, and said in the log"),
    "attn_implementation": dropped("the fastest attention that can run is taken, and said in the log"),
    "seed": option("train.seed", whole),
    "data_seed": dropped("train.seed is that of the data too"),
    "report_to": _report_to,
    "use_4bit_quantization": option("model.base_dtype", lambda g: "nf4" if truth(g) else None),
    "use_8bit_quantization": option("model.base_dtype", lambda g: "int8" if truth(g) else None),
    "use_4bit_qunatization": option("model.base_dtype", lambda g: "nf4" if truth(g) else None),
    "use_8bit_qunatization": option("model.base_dtype", lambda g: "int8" if truth(g) else None),
    "q_lora": option("model.base_dtype", lambda g: "nf4" if truth(g) else None),
    "dataloader_num_workers": option("data.num_workers", whole),
    "dataloader_pin_memory": dropped(_ALWAYS),
    "ddp_find_unused_parameters": dropped("guards.liveness_steps names what has no gradient"),
    "remove_unused_columns": dropped("records are read field by field"),
    "label_names": dropped("data.mask_prompt says what the loss is taken on"),
    "prediction_loss_only": dropped("evaluations give the loss"),
    "do_train": dropped(_ALWAYS),
    "do_eval": dropped("data.validation says whether"),
    "evaluation_strategy": _strategy,
    "eval_strategy": _strategy,
    "save_strategy": _strategy,
    "logging_strategy": _strategy,
    "logging_dir": dropped("TensorBoard's files lie in the run's folder"),
    "group_by_length": dropped("data.packing fills rows"),
    "optim": dropped("AdamW is the optimizer; optim.backend auto takes its fastest code"),
    "deepspeed": _named_file,
    "deepspeed_config": _named_file,
    "llm_type": dropped("the model's own chat template is used"),
    "max_slice_nums": dropped(_VISION),
    "tune_vision": _vision,
    "tune_llm": _tune_language,
    "resume_from_checkpoint": _resume,
    "push_to_hub": dropped("nothing is uploaded"),
    "hub_model_id": dropped("nothing is uploaded"),
    "cache_dir": dropped("nothing is downloaded"),
    "trust_remote_code": dropped("no code of a checkpoint is run"),
    "use_unsloth": dropped("model.kernels chooses kernels"),
}

_SAT: dict[str, Rule] = {
    "experiment_name": dropped("checkpoint.dir names the run"),
    "mode": dropped("training is what is done"),
    "train_iters": _steps,
    "resume_dataloader": dropped("a run goes on at its next sample"),
    "from_pretrained": option("model.path", text),
    "local_tokenizer": option("data.tokenizer", text),
    "version": dropped("the model's own chat template is used"),
    "train_data": option("data.train", text),
    "valid_data": option("data.validation", text),
    "lr_decay_style": _schedule,
    "lr": option("optim.lr", number),
    "min_lr": option("optim.min_lr", number),
    "warmup": fact("warmup_ratio", number, "optim.warmup_steps"),
    "lr_decay_iters": dropped("the schedule ends with the run"),
    "clip_grad": option("optim.clip_grad_norm", number),
    "batch_size": fact("micro", whole, "train.micro_batch_size"),
    "micro_batch_size": fact("micro", whole, "train.micro_batch_size"),
    "global_batch_size": option("train.global_batch_size", whole),
    "checkpoint_activations": _recompute,
    "checkpoint_num_layers": dropped("each layer is made again by itself"),
    "vit_checkpoint_activations": dropped(_VISION),
    "vit_no_grad": dropped(_VISION),
    "image_length": dropped(_VISION),
    "eva_args": dropped(_VISION),
    "save_interval": option("checkpoint.every", whole),
    "eval_interval": fact("eval_every", whole, "train.eval_every"),
    "save": option("checkpoint.dir", text),
    "load": dropped("checkpoint.resume takes this engine's checkpoints"),
    "eval_iters": fact("eval_iters", whole, "train.eval_samples"),
    "eval_batch_size": fact("eval_batch", whole, "train.eval_samples"),
    "strict_eval": dropped("evaluations go through all of data.validation, or train.eval_samples of it"),
    "split": dropped("data.train and data.validation are files of their own"),
    "skip_init": dropped("weights that are read are not drawn first"),
    "use_qlora": option("model.base_dtype", lambda g: "nf4" if truth(g) else None),
    "layer_range": option("lora.layers", lambda g: g.value if isinstance(g.value, list) else [whole(g)]),
    "ignore_pad_token_for_loss": dropped(_ALWAYS),
    "log_interval": option("log.every", whole),
    "SAT_HOME": dropped("nothing is downloaded"),
}

_MINIMIND: dict[str, Rule] = {
    "save_dir": option("checkpoint.dir", text),
    "save_weight": dropped("tools/convert.py export names the result"),
    "lora_name": dropped("tools/convert.py export names the result"),
    "epochs": fact("epochs", number, "train.epochs"),
    "dtype": _dtype,
    "device": dropped("a GPU is used where torch sees one"),
    "num_workers": option("data.num_workers", whole),
    "accumulation_steps": fact("accumulation", whole, "train.global_batch_size"),
    "grad_clip": option("optim.clip_grad_norm", number),
    "from_weight": fact(
        "weight", text, "model.path", became="model.path: name the Hugging Face folder of these weights"
    ),
    "from_resume": _resume,
    "beta": option("objective.beta", number),
    "use_wandb": dropped(_CLIENT),
    "wandb_project": dropped(_CLIENT),
    "use_compile": dropped("no compiler is used; kernels are chosen by model.kernels"),
    "ddp": dropped("torchrun starts the ranks"),
    "local_rank": dropped("torchrun sets it"),
}
_MINIMIND |= {
    key: dropped(_ARCHITECTURE)
    for key in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "use_moe", "vocab_size",
        "dim", "n_layers", "inference_rope_scaling", "num_layers", "max_position_embeddings",
    )
}  # fmt: skip
_MINIMIND |= {key: dropped(_INFERENCE) for key in ("temperature", "top_p", "top_k", "max_new_tokens")}
_ENVIRONMENT = "an environment variable: set it for torchrun as well"


def rule_for(key: str) -> Rule | None:
    """Of a flag, or of a variable that a script sets for its command."""
    if key.startswith(("NCCL_", "CUDA_", "OMP_", "TORCH_", "GLOO_", "HF_", "PYTORCH_")):
        return dropped(_ENVIRONMENT)
    return (_TRAINER | _SAT | _MINIMIND).get(key)
