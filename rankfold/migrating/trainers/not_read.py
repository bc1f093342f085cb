"""Sources whose configurations are recognised and refused by name: their keys mean something else than those of the
trainers that are converted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import UserError
from rankfold.migrating.conversion import other_objective
from rankfold.migrating.given import PROGRAM, Given


@dataclass(frozen=True, slots=True)
class NotRead:
    """A source that is not converted.

    Args:
        name: as the refusal calls it.
        keys: that tell it; one that ends in a dot stands for all below it, one that begins with a dot for last parts.
        programs: beginnings of the names of its programs.
    """

    name: str
    keys: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()


_SOURCES = (
    NotRead("verl", ("actor_rollout_ref.", "critic.ppo_", "algorithm.adv_estimator", "model.partial_pretrain",
            "data.micro_batch_size_per_gpu"), ("verl.", "main_ppo", "main_dapo",
            "recipe.", "verl ")),
    NotRead("EasyR1", ("worker.actor.", "worker.rollout.")),
    NotRead("torchtune", ("._component_",), ("tune ", "torchtune.")),
    NotRead("NeMo Automodel", ("step_scheduler.", "dist_env.", "distributed.dp_size"), ("automodel", "nemo_automodel")),
    NotRead("Megatron-Bridge", ("checkpoint.pretrained_checkpoint", "language_model_checkpoint", "model_recipe_name",
            "hf_model_path", "hf_model_id"), ("run_recipe.py", "megatron.bridge", "recipe_runner.py",
            "launch_with_nemo_run.py", "setup_experiment.py", "megatron_mimo", "straggler_detection_example",
            "basic_fault_tolerance_example")),
    NotRead("another program of Megatron", ("language_model_type", "freeze_LM", "model_provider",
            "finetune_hf_dataset", "export_te_mcore_model", "export_model_type", "langrl_env_config", "grpo_group_size",
            "perform_rl_step")),
    NotRead("NeMo", ("exp_manager.", "model.peft.", "model.megatron_amp_O2"), ("nemo ", "megatron_gpt_finetuning.py")),
    NotRead("LitGPT", ("lora_query", "lora_key", "lora_value", "train.lr_warmup_steps",
            "train.lr_warmup_fraction"), ("litgpt",)),
    NotRead("mistral-finetune", ("data.instruct_data", "data.eval_instruct_data")),
    NotRead("Ludwig", ("input_features", "output_features")),
    NotRead("Composer", ("device_train_microbatch_size", "global_train_batch_size", "max_duration"), ("composer",)),
    NotRead("Lightning", ("seed_everything",)),
    NotRead("OpenAI's fine-tuning", ("method.supervised.", "method.dpo.", "hyperparameters.n_epochs")),
    NotRead("a trainer of models that draw images", ("instance_data_dir", "instance_prompt", "caption_column",
            "validation_prompt", "random_flip", "network_dim", "network_alpha", "unet_lr"), ("train_text_to_image",
            "train_dreambooth", "train_controlnet", "train_textual_inversion", "train_unconditional")),
    NotRead("OpenRLHF", ("micro_train_batch_size", "ds.zero_stage", "train.micro_batch_size"), ("openrlhf",)),
    NotRead("ColossalAI", ("booster.", "plugin.precision"), ("colossalai",)),
    NotRead("DeepSpeed-Chat", ("actor_model_name_or_path", "critic_model_name_or_path", "sft_only_data_path",
            "data_output_path", "num_padding_at_beginning", "only_optimize_lora", "lora_module_name")),
    NotRead("XTuner", ("accumulative_counts", "xtuner_dataset_timeout"), ("xtuner",)),
    NotRead("torchtitan", ("job.config_file", "training.local_batch_size", "parallelism.data_parallel_shard_degree"),
            ("torchtitan",)),
    NotRead("nanotron", ("tokens.sequence_length", "parallelism.dp"), ("run_train.py",)),
    NotRead("GPT-NeoX", ("pipe-parallel-size", "pipe_parallel_size", "train-iters"), ("deepy.py",)),
    NotRead("AReaL", ("allocation_mode",), ("areal",)),
    NotRead("slime", ("rollout_function_path", "custom_rm_path", "rollout_batch_size"), ("slime",)),
    NotRead("version 1 of LLaMA-Factory", ("model_class", "kernel_config.", "dist_config.name", "peft_config.name")),
    NotRead("LLaMA-Factory with Megatron-Bridge", ("export_hf_on_finish", "megatron_pretrained_checkpoint",
            "use_packed_sequences")),
    NotRead("ms-swift before version 3", ("sft_type", "model_id_or_path")),
    NotRead("MLX", ("lora_parameters.rank", "lora_parameters."), ("mlx_lm",)),
    NotRead("Unsloth", programs=("unsloth",)),
    NotRead("Unsloth Studio", ("training.train_on_completions", "inference.trust_remote_code")),
    NotRead("a program of Hydra", ("._target_",)),
)  # fmt: skip


_NO_TRAINING = (
    "eval", "infer", "convert", "export", "merge", "predict", "serve", "generate", "quantize", "web_demo", "deploy",
    "rollout", "hf_to_megatron",
)  # fmt: skip
"""Beginnings of the names of programs that do not train."""


_OTHER_OBJECTIVES = {
    "bco": "BCO", "gkd": "a student of another model", "gold": "a student of another model", "nash_md": "Nash-MD",
    "distillation": "a student of another model", "online_dpo": "online DPO", "xpo": "XPO", "tpo": "TPO", "ppo": "PPO",
    "ppo_tldr": "PPO", "prm": "a reward model", "reward": "a reward model", "reward_modeling": "a reward model",
    "rloo": "RLOO", "ssd": "self-distillation", "sdft": "self-distillation", "sdpo": "self-distillation",
    "async_grpo": "GRPO with another sampler", "minillm": "a student of another model", "papo": "PAPO",
    "run_glue": "a classifier", "run_classification": "a classifier", "run_xnli": "a classifier", "run_ner": "a tagger",
    "run_mlm": "a masked language model", "run_plm": "a permuted language model", "run_fim": "infilling",
    "run_qa": "question answering by spans", "run_swag": "multiple choice",
    "run_summarization": "an encoder and decoder", "run_translation": "an encoder and decoder",
    "run_speech_recognition_seq2seq": "speech recognition",
}  # fmt: skip
"""Commands and scripts of TRL's and of transformers' examples that train something else -> what."""


def refuse_not_read(given: Iterable[Given], known: str) -> None:
    """Refuses configurations of sources that are not converted.

    Args:
        given: all keys.
        known: names of the sources that are.

    Raises:
        UserError: they are of one that is not.
    """
    everything = [one for one in given if not one.idle]
    for one in everything:
        if one.key == PROGRAM and str(one.value).rpartition(" ")[2].startswith(_NO_TRAINING):
            raise UserError(f"{one.source} starts {one.value}, which does not train: give the script that does.")
        name = str(one.value).removeprefix("trl ").removesuffix(".py").removesuffix("_vlm").removesuffix("_no_trainer")
        if one.key == PROGRAM and str(one.value).startswith(("trl ", name)) and name in _OTHER_OBJECTIVES:
            raise other_objective(one, _OTHER_OBJECTIVES[name])
    for source in _SOURCES:
        for one in everything:
            if _tells(source, one):
                place = f"{one.value} in {one.source}" if one.key == PROGRAM else f"{one.key} in {one.source}"
                raise UserError(
                    f"{place} belongs to {source.name}, whose configurations are not converted: write the run's file "
                    f"from docs/coming-from.md, which names the options here. Sources that are converted: {known}."
                )


def _tells(source: NotRead, one: Given) -> bool:
    if one.key == PROGRAM:
        return f"{one.value}.".startswith(source.programs) if source.programs else False
    return any(
        one.key.startswith(key)
        if key.endswith(".")
        else one.key.endswith(key)
        if key.startswith(".")
        else one.key == key
        for key in source.keys
    )
