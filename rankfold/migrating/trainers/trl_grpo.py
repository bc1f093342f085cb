"""Rules for TRL's GRPO: its command, its scripts, and the block of Axolotl's files that is handed on to it.

A batch counts completions in both. TRL's generation batch is counted in passes, steps_per_generation, and may be
smaller than an optimizer step; here it is one step or several.
"""

from __future__ import annotations

from engine.config.objective import SEQUENCE_RATIOS, WITHOUT_LIMITS
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
    truth,
    whole,
)
from rankfold.migrating.given import Given
from rankfold.migrating.trainer import Default, Ours, Trainer
from rankfold.migrating.trainers import shared, trl

_SAMPLER = "completions are sampled by the model that trains, in its layout: rollout.slots says how many at a time"
_NO_EVALUATION = "rollouts are not evaluated"
_ELSEWHERE = "rewards.py"
"""A file for the functions of a script, which must not run when they are loaded."""
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


@sets("objective.loss_type")
def loss_type(conversion: Conversion, given: Given) -> None:
    if str(given.value) in _LOSSES:
        conversion.take(given, "objective.loss_type", str(given.value))
    else:
        raise other_objective(given, f"another loss than {', '.join(_LOSSES)}")


@sets("objective.scale_rewards")
def scale_rewards(conversion: Conversion, given: Given) -> None:
    name = {"true": "group", "false": "none"}.get(str(given.value).lower(), str(given.value))
    conversion.take(given, "objective.scale_rewards", name)


@sets("rollout.rewards")
def reward_funcs(conversion: Conversion, given: Given) -> None:
    """Converts names of functions, of a script or of a module; a reward model is reported."""
    places = [name.rpartition(".") for name in names(given)]
    if not places or not all(name.isidentifier() and "/" not in module for module, _, name in places):
        conversion.drop(given, "functions that only the script knows")
        conversion.to_fill.append(f"rollout.rewards: the functions of {given.value}, as FILE.py:NAME, or one built in")
        return
    entries = [f"{module.replace('.', '/') + '.py' if module else _ELSEWHERE}:{name}" for module, _, name in places]
    conversion.take(given, "rollout.rewards", entries)
    if any(not module for module, _, _ in places):
        named = ", ".join(name for module, _, name in places if not module)
        conversion.to_fill.append(
            f"rollout.rewards: put {named} into {_ELSEWHERE}, or import them there (from trl.rewards import ...); "
            "functions are called as TRL calls them"
        )


@sets("rollout.reward_weights")
def reward_weights(conversion: Conversion, given: Given) -> None:
    if given.value in (None, "None", []):
        conversion.drop(given, "1 each")
        return
    found = given.value if isinstance(given.value, list) else str(given.value).strip("[]").replace(",", " ").split()
    weights = [number(Given(source=given.source, key=given.key, value=one)) for one in found]
    conversion.take(given, "rollout.reward_weights", weights)


@sets("rollout.top_k")
def top_k(conversion: Conversion, given: Given) -> None:
    if given.value in (None, "None") or whole(given) <= 0:
        conversion.drop(given, "all tokens are considered")
    else:
        conversion.take(given, "rollout.top_k", whole(given))


def _number_or_none(name: str) -> Rule:
    """Returns the rule of a key whose value may be None."""

    @sets(name)
    def rule(conversion: Conversion, given: Given) -> None:
        if given.value in (None, "None", "null"):
            conversion.drop(given, "none")
        else:
            conversion.take(given, name, number(given))

    return rule


@sets("objective.kl_bias_correction")
def bias_correction(conversion: Conversion, given: Given) -> None:
    conversion.know(given, "bias_correction", truth(given), "objective.kl_bias_correction, where there is a divergence")


@sets("data.chat_arguments")
def chat_arguments(conversion: Conversion, given: Given) -> None:
    if isinstance(given.value, dict):
        conversion.take(given, "data.chat_arguments", given.value)
    else:
        shared.off_or_lack("data.chat_arguments is a mapping").apply(conversion, given)


OWN: dict[str, Rule] = {
    "loss_type": loss_type,
    "beta": option("objective.beta", number),
    "epsilon": option("objective.epsilon", number),
    "epsilon_high": _number_or_none("objective.epsilon_high"),
    "delta": _number_or_none("objective.delta"),
    "num_iterations": option("objective.num_iterations", whole),
    "importance_sampling_level": option("objective.ratio_level", lambda given: str(given.value)),
    "sapo_temperature_neg": option("objective.sapo_temperature_neg", number),
    "sapo_temperature_pos": option("objective.sapo_temperature_pos", number),
    **{
        f"vespo_{name}": option(f"objective.vespo_{name}", number)
        for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    },
    "scale_rewards": scale_rewards,
    "multi_objective_aggregation": option("objective.reward_aggregation", lambda given: str(given.value)),
    "mask_truncated_completions": option("objective.mask_truncated", truth),
    "top_entropy_quantile": option("objective.top_entropy_quantile", number),
    "off_policy_mask_threshold": _number_or_none("objective.off_policy_threshold"),
    "use_bias_correction_kl": bias_correction,
    "num_generations": option("rollout.num_generations", whole),
    "max_completion_length": option("rollout.max_completion_length", whole),
    "max_prompt_length": fact("prompt_length", lambda given: given.value, "data.seq_length"),
    "temperature": option("rollout.temperature", number),
    "top_p": _number_or_none("rollout.top_p"),
    "top_k": top_k,
    "reward_funcs": reward_funcs,
    "reward_weights": reward_weights,
    "steps_per_generation": fact("passes_per_generation", whole, "rollout.steps_per_generation"),
    "generation_batch_size": fact("generation_batch", whole, "rollout.steps_per_generation"),
    "chat_template_kwargs": chat_arguments,
    "min_p": _number_or_none("rollout.min_p"),
    "repetition_penalty": option("rollout.repetition_penalty", number),
    "generation_kwargs": shared.off_or_lack(
        "rollout.temperature, top_p, top_k, min_p and repetition_penalty are all there is"
    ),
    "sync_ref_model": shared.off_or_lack(
        "the reference is the model without its adapters, which does not move, and which TRL does not move either "
        "where there are adapters"
    ),
    "cast_lm_head_to_fp32": shared.off_or_lack("the head computes in model.dtype, and its loss in float32"),
    "entropy_coef": shared.off_or_refuse("a term of the entropy"),
    "use_adaptive_entropy": shared.off_or_refuse("a term of the entropy"),
    "shuffle_dataset": shared.only(True, "prompts are shuffled in each epoch: train.seed"),
    "tools": shared.off_or_refuse("completions of several turns"),
    "environment_factory": shared.off_or_refuse("completions of several turns"),
    "rollout_func": shared.off_or_refuse("completions that a function of the script writes"),
    "reward_model_name_or_path": shared.off_or_lack("a reward model is a function that loads it"),
    "reward_processing_classes": shared.off_or_lack("a reward model is a function that loads it"),
    "eval_strategy": shared.off_or_lack(_NO_EVALUATION),
    "evaluation_strategy": shared.off_or_lack(_NO_EVALUATION),
    "load_best_model_at_end": shared.off_or_lack(_NO_EVALUATION),
    "vllm_structured_outputs_regex": shared.off_or_lack("completions are sampled freely"),
    "vllm_guided_decoding_regex": shared.off_or_lack("completions are sampled freely"),
    "vllm_*": dropped(_SAMPLER),
    "use_vllm": dropped(_SAMPLER),
    "use_liger_loss": dropped(shared.KERNELS),
    "entropy_*": dropped("the loss has no term of the entropy, which is reported"),
    "log_completions": dropped("rollout.show says how many completions of a generation batch are logged"),
    "num_completions_to_print": dropped("rollout.show says how many completions of a generation batch are logged"),
    "remove_unused_columns": dropped("all columns are given to the reward functions"),
    "unsloth_*": dropped(shared.SPEED),
    "quantization_config": shared.off_or_lack("model.base_dtype stores the frozen base encoded"),
    "dataset_prompt_column": shared.only(
        "prompt", "the field prompt, or messages, of a record is the prompt: rename it"
    ),
}
"""Keys of GRPOConfig and GRPOTrainer that the other trainers of TRL do not have, or have for something else."""
OWN |= shared.every(
    """
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min vllm_importance_sampling_cap
    """,
    why="the sampler is the trainer, so that there is little to correct; objective.importance_correction does",
)
OWN |= shared.every(
    """
    ds3_gather_for_generation cache_implementation use_transformers_paged use_transformers_continuous_batching
    transformers_continuous_batching_config transformers_continuous_batching_config.*
    """,
    why=_SAMPLER,
)
OWN |= shared.every("log_multimodal log_unique_prompts log_completions_hub_repo", why=shared.REPORT)
OWN |= shared.every(
    """
    num_generations_eval eval_steps eval_on_start do_eval eval_delay per_device_eval_batch_size eval_dataset
    metric_for_best_model greater_is_better dataset_test_split eval_accumulation_steps batch_eval_metrics
    """,
    why=_NO_EVALUATION,
)
OWN |= shared.every("ref_model_mixup_alpha ref_model_sync_steps", why="the reference does not move")
OWN |= shared.every("max_tool_calling_iterations multi_step_*", why="completions have one turn")

OWN_DEFAULTS: dict[str, Default | Ours] = {
    "objective.loss_type": Default("dapo", "GRPOConfig.loss_type"),
    "objective.epsilon": Default(0.2, "GRPOConfig.epsilon"),
    "objective.epsilon_high": Default(
        lambda conversion: _cispo_limit(conversion), "GRPOTrainer: GRPOConfig.epsilon where epsilon_high is None"
    ),
    "objective.delta": Default(None, "GRPOConfig.delta"),
    "objective.num_iterations": Default(1, "GRPOConfig.num_iterations"),
    "objective.ratio_level": Default(None, "GRPOConfig.importance_sampling_level = token"),
    "objective.sapo_temperature_neg": Default(1.05, "GRPOConfig.sapo_temperature_neg"),
    "objective.sapo_temperature_pos": Default(1.0, "GRPOConfig.sapo_temperature_pos"),
    "objective.scale_rewards": Default("group", "GRPOConfig.scale_rewards"),
    "objective.reward_aggregation": Default("sum_then_normalize", "GRPOConfig.multi_objective_aggregation"),
    "objective.mask_truncated": Default(False, "GRPOConfig.mask_truncated_completions"),
    "objective.top_entropy_quantile": Default(1.0, "GRPOConfig.top_entropy_quantile"),
    "objective.off_policy_threshold": Default(None, "GRPOConfig.off_policy_mask_threshold"),
    "objective.kl_bias_correction": Default(True, "GRPOConfig.use_bias_correction_kl"),
    "rollout.num_generations": Default(8, "GRPOConfig.num_generations"),
    "rollout.max_completion_length": Default(512, "GRPOConfig.max_completion_length"),
    "rollout.temperature": Default(1.0, "GRPOConfig.temperature"),
    "rollout.top_p": Default(1.0, "GRPOConfig.top_p"),
    "rollout.top_k": Default(None, "GRPOConfig.top_k = 0"),
    "rollout.min_p": Default(0.0, "GRPOConfig.min_p = None"),
    "rollout.repetition_penalty": Default(1.0, "GRPOConfig.repetition_penalty"),
    "objective.vespo_k_pos": Default(2.0, "GRPOConfig.vespo_k_pos"),
    "objective.vespo_lambda_pos": Default(3.0, "GRPOConfig.vespo_lambda_pos"),
    "objective.vespo_k_neg": Default(3.0, "GRPOConfig.vespo_k_neg"),
    "objective.vespo_lambda_neg": Default(2.0, "GRPOConfig.vespo_lambda_neg"),
    "rollout.steps_per_generation": Default(1, "GRPOConfig.steps_per_generation = gradient_accumulation_steps"),
    "rollout.rewards": Ours("functions have to be named"),
    "rollout.reward_weights": Default([], "GRPOConfig.reward_weights = None"),
}
"""Defaults for the options that keys of `OWN` set."""


def _cispo_limit(conversion: Conversion) -> float | None:
    options = conversion.options
    return options.get("objective.epsilon", 0.2) if options.get("objective.loss_type") == "cispo" else None


def complete(conversion: Conversion) -> None:
    """Sets what follows from several keys of `OWN`, once all are read and objective.name is grpo."""
    options, facts = conversion.options, conversion.facts
    longest = int(options.get("rollout.max_completion_length", 512))
    if "data.seq_length" not in options:
        prompt = facts.get("prompt_length") or 512
        note = f"a prompt of {prompt} and a completion of {longest} tokens"
        conversion.imply(
            "derived", "max_prompt_length + max_completion_length", "data.seq_length", prompt + longest, note
        )
        if not facts.get("prompt_length"):
            conversion.to_fill.append(
                f"data.seq_length: prompt and completion together; TRL has no limit for prompts, {prompt} tokens are a "
                "guess, and longer ones are left out"
            )
    if options.get("objective.loss_type") in SEQUENCE_RATIOS and options.get("objective.ratio_level") == "token":
        conversion.withdraw(
            "objective.ratio_level", f"{options['objective.loss_type']} has ratios of whole completions"
        )
    if options.get("objective.loss_type") == "cispo":
        # there is no lower limit, and epsilon is the upper one where no other is given
        conversion.imply("GRPOTrainer", "epsilon_high", "objective.epsilon_high", options.get("objective.epsilon", 0.2))
        if "objective.epsilon" in options:
            conversion.withdraw("objective.epsilon", "cispo has no lower limit")
    loss = str(options.get("objective.loss_type", "dapo"))
    for name in [name for name in options if loss != "vespo" and name.startswith("objective.vespo_")]:
        conversion.withdraw(name, "of another loss")
    for name in ("objective.epsilon", "objective.epsilon_high", "objective.delta"):
        if loss in WITHOUT_LIMITS and name in options:
            conversion.withdraw(name, f"{loss} has no limits")
    if facts.get("bias_correction") is False and options.get("objective.beta"):
        conversion.imply("derived", "use_bias_correction_kl", "objective.kl_bias_correction", False)
    for name in ("data.validation", "data.validation_split", "train.early_stopping_patience"):
        if name in options:
            conversion.withdraw(name, _NO_EVALUATION)
    if "rollout.rewards" not in options:
        options["rollout.rewards"] = [f"{_ELSEWHERE}:reward"]
        if not any(line.startswith("rollout.rewards") for line in conversion.to_fill):
            conversion.to_fill.append(f"rollout.rewards: not in the input; {_ELSEWHERE}:reward is a placeholder")
    _buffers(conversion)


def _buffers(conversion: Conversion) -> None:
    """Counts the optimizer steps of a generation batch."""
    facts, options = conversion.facts, conversion.options
    passes, accumulated = facts.get("passes_per_generation"), int(facts.get("accumulation", 1))
    if passes is None and "generation_batch" in facts:
        rows = int(options.get("train.micro_batch_size", 8)) * int(facts.get("processes") or 1)
        passes = max(1, facts["generation_batch"] // rows)
    if passes is None:
        return
    steps = max(1, passes // accumulated)
    note = f"{passes} passes, of which {accumulated} are an optimizer step"
    conversion.imply("derived", "steps_per_generation", "rollout.steps_per_generation", steps, note)
    if passes % accumulated:
        conversion.notes.append(
            f"a generation batch of {note} is none of whole steps, and becomes {steps}: TRL trains on older completions"
        )


def _finish(conversion: Conversion) -> None:
    conversion.options["objective.name"] = "grpo"
    if not trl.TRL.adapters(conversion) and conversion.options.get("objective.beta"):
        conversion.withdraw("objective.beta", "the reference is the model without its adapters, and none train")
        conversion.notes.append(
            "beta has no counterpart, and the run will differ: the reference is the model without its adapters, and "
            "none train"
        )
    complete(conversion)


TRL_GRPO = Trainer(
    name="TRL's GRPO",
    rules=trl.RULES | OWN,
    defaults=trl.DEFAULTS
    | {
        "data.seq_length": Ours("prompt and completion together, of which TRL limits the completion alone"),
        "data.mask_prompt": Ours("completions alone are trained on"),
        "optim.lr": Default(1e-6, "GRPOConfig.learning_rate"),
        "objective.name": Default("grpo", "the command"),
        "objective.beta": Default(0.0, "GRPOConfig.beta"),
        "objective.margin": Ours("of another objective"),
        "objective.label_smoothing": Ours("of another objective"),
        "objective.desirable_weight": Ours("of another objective"),
        "objective.undesirable_weight": Ours("of another objective"),
        "objective.reference": Ours("the model without its adapters"),
    }
    | OWN_DEFAULTS,
    adapters=trl.TRL.adapters,
    finish=_finish,
)
