"""The known trainers: recognises which one the input is for, and has the rules of each."""

from __future__ import annotations

from collections.abc import Iterable

from engine.config.conversion import launcher_rules
from engine.config.conversion.given import PROGRAM, Given
from engine.config.conversion.trainer import Trainer
from engine.config.conversion.trainers.axolotl import AXOLOTL
from engine.config.conversion.trainers.hugging_face import HUGGING_FACE
from engine.config.conversion.trainers.launchers import LAUNCHERS
from engine.config.conversion.trainers.llama_factory import LLAMA_FACTORY
from engine.config.conversion.trainers.llava import KEYS as LLAVA_KEYS
from engine.config.conversion.trainers.llava import LLAVA
from engine.config.conversion.trainers.megatron import MEGATRON
from engine.config.conversion.trainers.minicpm import MINICPM, MLPERF
from engine.config.conversion.trainers.minimind import MINIMIND
from engine.config.conversion.trainers.sat import SAT
from engine.config.conversion.trainers.trl import TRL
from engine.config.conversion.trainers.trl_grpo import TRL_GRPO

TRAINERS: tuple[Trainer, ...] = (
    TRL, LLAMA_FACTORY, AXOLOTL, MEGATRON, MINIMIND, SAT, MLPERF, MINICPM, LLAVA, TRL_GRPO, HUGGING_FACE, LAUNCHERS,
)  # fmt: skip
"""The trainers, in the order in which a key is looked up for a hint."""

_PROGRAMS = (
    ("trl grpo", TRL_GRPO), ("trl.scripts.grpo", TRL_GRPO), ("grpo.py", TRL_GRPO), ("train_grpo.py", TRL_GRPO),
    ("run_grpo.py", TRL_GRPO), ("grpo_", TRL_GRPO), ("trl ", TRL), ("llamafactory-cli", LLAMA_FACTORY),
    ("lmf ", LLAMA_FACTORY), ("llamafactory", LLAMA_FACTORY), ("axolotl", AXOLOTL), ("train_dpo.py", MINIMIND),
    ("train_full_sft.py", MINIMIND), ("train_lora.py", MINIMIND), ("train_pretrain.py", MINIMIND),
    ("pretrain_", MEGATRON), ("trl.scripts", TRL), ("sft.py", TRL), ("dpo.py", TRL), ("kto.py", TRL),
    ("orpo.py", TRL), ("cpo.py", TRL), ("run_sft.py", TRL), ("run_dpo.py", TRL), ("run_orpo.py", TRL),
    ("run_simpo.py", TRL),
)  # fmt: skip
"""Prefix of a program's name -> its trainer; keys that only another trainer has count more."""
_KEYS: tuple[tuple[Trainer, frozenset[str]], ...] = (
    (AXOLOTL, frozenset({"base_model"})),
    (LLAMA_FACTORY, frozenset({"finetuning_type", "cutoff_len", "lora_target", "dataset_dir", "template"})),
    (MLPERF, frozenset({"target_eval_loss"})),
    (MINICPM, frozenset({"llm_type", "max_slice_nums"})),
    (LLAVA, LLAVA_KEYS),
    (SAT, frozenset({"from_pretrained", "train_data", "experiment_name", "MP_SIZE", "model_parallel_size"})),
    (MEGATRON, frozenset({"train_iters", "train_samples", "tensor_model_parallel_size", "num_attention_heads",
                          "lr_decay_style", "use_mcore_models", "lr_warmup_iters", "expert_model_parallel_size",
                          "moe_aux_loss_coeff"})),
    (MINIMIND, frozenset({"accumulation_steps", "from_weight", "save_weight", "lora_name"})),
    (TRL_GRPO, frozenset({"reward_funcs", "reward_weights", "num_generations", "num_iterations", "scale_rewards",
                          "mask_truncated_completions", "importance_sampling_level"})),
    (TRL, frozenset({"use_peft", "dataset_train_split", "dataset_mixture", "dataset_mixer", "max_prompt_length",
                     "lora_task_type", "assistant_only_loss", "dataset_kwargs", "simpo_gamma", "gamma_beta_ratio",
                     "loss_type", "chat_template", "eos_token", "dataset_num_proc",
                     "use_peft_lora", "dataset_text_field"})),
    (HUGGING_FACE, frozenset({"per_device_train_batch_size", "num_train_epochs", "output_dir", "model_name_or_path",
                              "learning_rate", "lora_r", "lora_target_modules", "max_steps"})),
)  # fmt: skip
"""Keys by which a trainer is recognised, the most specific first."""


def recognise(given: Iterable[Given]) -> Trainer:
    """Returns the trainer whose files and flags these are; LAUNCHERS where there are only launchers' keys."""
    everything = list(given)
    keys = {part for one in everything for part in (one.key, one.key.partition(".")[0]) if not one.idle}
    programs = [str(one.value) for one in everything if one.key == PROGRAM]
    own = next((trainer for trainer, telling in _KEYS[:6] if keys & telling), None)
    if own is not None:
        return own
    started = next((trainer for name in programs for start, trainer in _PROGRAMS if name.startswith(start)), None)
    if started is not None and not (started is MEGATRON and keys & _KEYS[-1][1] & {"output_dir"}):
        return started
    known = next((trainer for trainer, telling in _KEYS if keys & telling), None)
    flags = [one.key for one in everything if launcher_rules.rule_for(one.key) is None and not one.idle]
    if known is None and any(HUGGING_FACE.rule(key) for key in flags):
        return HUGGING_FACE
    return known or LAUNCHERS
