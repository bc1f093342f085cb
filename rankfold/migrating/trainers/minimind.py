"""Rules for MiniMind's scripts, each with its own defaults."""

from __future__ import annotations

from typing import Any

from engine.errors import UserError
from rankfold.migrating.conversion import (
    DTYPES,
    Conversion,
    Rule,
    dropped,
    fact,
    number,
    option,
    set_dtype,
    sets,
    text,
    whole,
)
from rankfold.migrating.given import PROGRAM, Given
from rankfold.migrating.trainer import Default, Ours, Trainer
from rankfold.migrating.trainers import hugging_face as hf
from rankfold.migrating.trainers import shared

_ARCHITECTURE = "the model's own config.json says it"


@sets("model.dtype")
def dtype(conversion: Conversion, given: Given) -> None:
    if str(given.value) not in DTYPES:
        raise UserError(f"{given.source} gives {given.key} as {given.value!r}: write bfloat16, float16 or float32.")
    set_dtype(conversion, given, DTYPES[str(given.value)])


@sets("model.path", "model.init")
def from_weight(conversion: Conversion, given: Given) -> None:
    if str(given.value) == "none":
        conversion.take(given, "model.init", "random")
    else:
        conversion.know(given, "weight", text(given), "model.path: the Hugging Face folder of these weights")


RULES: dict[str, Rule] = hf.RULES | {
    "save_dir": option("checkpoint.dir", text),
    "save_weight": dropped("rankfold convert export names the result"),
    "lora_name": dropped("rankfold convert export names the result"),
    "epochs": option("train.epochs", number),
    "batch_size": option("train.micro_batch_size", whole),
    "dtype": dtype,
    "num_workers": option("data.num_workers", whole),
    "accumulation_steps": fact("accumulation", whole, "train.global_batch_size"),
    "grad_clip": option("optim.clip_grad_norm", number),
    "log_interval": option("log.every", whole),
    "save_interval": option("checkpoint.every", whole),
    "from_weight": from_weight,
    "from_resume": shared.resume,
    "beta": option("objective.beta", number),
    "use_compile": dropped("no compiler is used; kernels are chosen by model.kernels"),
}
RULES |= shared.every(
    """
    hidden_size num_hidden_layers num_attention_heads num_key_value_heads use_moe vocab_size dim n_layers
    inference_rope_scaling num_layers max_position_embeddings
    """,
    why=_ARCHITECTURE,
)
RULES |= shared.every("temperature top_p top_k max_new_tokens", why="for generating text, not for training")
RULES |= shared.every(
    """
    loss_type epsilon epsilon_high num_generations max_gen_len max_total_len reward_model_path thinking_ratio
    rollout_engine sglang_* debug_mode debug_interval debug_log_ratio critic_learning_rate clip_epsilon vf_coef
    kl_coef gamma lam cliprange_value ppo_update_iters early_stop_kl mini_batch_size student_* teacher_*
    from_student_weight from_teacher_weight alpha
    """,
    why="of a script that is not converted",
)
RULES |= shared.every("device", why="torchrun starts the ranks, each with its device")
_OTHERS = {"grpo": "GRPO", "ppo": "PPO", "agent": "reinforcement learning of tool calls", "distillation": "a student"}
"""Scripts that train something else, with rewards, critics or teachers of their own."""


def script(conversion: Conversion) -> str:
    """Returns the script that was started: dpo, full_sft, pretrain or lora."""
    programs = [str(row.given.value) for row in conversion.rows if row.given.key == PROGRAM]
    return programs[-1].removeprefix("train_").removesuffix(".py") if programs else "full_sft"


def _of(**values: Any) -> Any:
    return lambda conversion: values.get(script(conversion), values.get("other"))


def _tenth(conversion: Conversion) -> float:
    return float(conversion.options["optim.lr"]) / 10


DEFAULTS: dict[str, Default | Ours] = hf.DEFAULTS | {
    "model.init": Default(_of(pretrain="random", other="checkpoint"), "--from_weight"),
    "model.dtype": Default("bfloat16", "--dtype"),
    "data.seq_length": Default(_of(pretrain=340, lora=340, dpo=1024, other=768), "--max_seq_len"),
    "data.packing": Default(False, "SFTDataset: one sample a row"),
    "data.mask_prompt": Default(True, "SFTDataset: the loss is taken on the assistant's turns"),
    "optim.lr": Default(_of(pretrain=5e-4, lora=1e-4, dpo=4e-8, other=1e-5), "--learning_rate"),
    "optim.schedule": Default("cosine", "get_lr"),
    "optim.min_lr": Default(_tenth, "get_lr: a tenth"),
    "optim.weight_decay": Default(0.01, "torch.optim.AdamW"),
    "train.micro_batch_size": Default(_of(pretrain=32, lora=32, dpo=4, other=16), "--batch_size"),
    "train.global_batch_size": Default(_of(pretrain=8, other=1), "--accumulation_steps, in the batch"),
    "train.epochs": Default(_of(lora=10.0, dpo=1.0, other=2.0), "--epochs"),
    "checkpoint.dir": Default("../out", "--save_dir"),
    "checkpoint.every": Default(_of(dpo=100, other=1000), "--save_interval"),
    "lora.rank": Default(16, "apply_lora: rank"),
    "lora.alpha": Default(16.0, "LoRA.forward: no scale"),
    "lora.targets": Default(["q_proj", "o_proj"], "apply_lora: linears that are square"),
    "objective.name": Default(_of(dpo="dpo", other="language_modeling"), "the script"),
    "objective.beta": Default(0.15, "--beta"),
    "objective.reference": Default("initial", "train_dpo.py: ref_model, the weights that it starts from"),
}


def _finish(conversion: Conversion) -> None:
    if script(conversion) in _OTHERS:
        raise UserError(
            f"train_{script(conversion)}.py of MiniMind trains {_OTHERS[script(conversion)]} with a loop of its own, "
            "which is not converted: of its scripts, train_pretrain.py, train_full_sft.py, train_lora.py and "
            "train_dpo.py are. If it is another project's script, name its source with --from."
        )


def _adapters(conversion: Conversion) -> bool:
    return script(conversion) == "lora"


MINIMIND = Trainer(name="MiniMind", rules=RULES, defaults=DEFAULTS, adapters=_adapters, finish=_finish)
