"""Rules for TRL's GRPO: its command, its scripts, and the block of Axolotl's files that is passed to it.

A batch counts completions in both. TRL's generation batch is counted in passes, steps_per_generation, and may be
smaller than an optimizer step; here it is one step or several.
"""

from __future__ import annotations

from engine.config.objective import SEQUENCE_RATIOS, WITHOUT_LIMITS
from rankfold.migrating.conversion import Conversion, names, number, other_objective, sets
from rankfold.migrating.given import Given
from rankfold.migrating.trainers import shared

_ELSEWHERE = "rewards.py"
"""A file for the functions of a script, which must not run when they are loaded."""
_TOOLS = "tools.py"
"""A file for the tools and the environment of a script."""
_BY_TOKENS = ("dapo", "cispo", "vespo")
"""Losses that are divided by the tokens of the whole batch."""
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


@sets("objective.loss_type")
def loss_type(conversion: Conversion, given: Given) -> None:
    if str(given.value) in _LOSSES:
        conversion.take(given, "objective.loss_type", str(given.value))
    else:
        raise other_objective(given, f"another loss than {', '.join(_LOSSES)}")


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


@sets("rollout.tools")
def tools(conversion: Conversion, given: Given) -> None:
    """Converts names of functions that the model may call."""
    if given.value in (None, "None", []):
        conversion.drop(given, "none")
        return
    found = names(given)
    if not found or not all(name.isidentifier() for name in found):
        conversion.drop(given, "functions that only the script knows")
        conversion.to_fill.append(f"rollout.tools: the functions of {given.value}, as FILE.py:NAME")
        return
    conversion.take(given, "rollout.tools", [f"{_TOOLS}:{name}" for name in found])
    conversion.to_fill.append(f"rollout.tools: put {', '.join(found)} into {_TOOLS}; they are called as TRL calls them")


@sets("rollout.environment")
def environment(conversion: Conversion, given: Given) -> None:
    """Converts the name of a class whose methods the model may call."""
    found = names(given)
    name = found[0] if found else ""
    if given.value in (None, "None", []):
        conversion.drop(given, "none")
    elif len(found) == 1 and name.isidentifier():
        conversion.take(given, "rollout.environment", f"{_TOOLS}:{name}")
        conversion.to_fill.append(
            f"rollout.environment: put {name} into {_TOOLS}; the score of its get_reward is the entry environment of "
            "rollout.rewards"
        )
    else:
        conversion.drop(given, "a class that only the script knows")
        conversion.to_fill.append(f"rollout.environment: the class of {given.value}, as FILE.py:NAME")


@sets("rollout.reward_weights")
def reward_weights(conversion: Conversion, given: Given) -> None:
    if given.value in (None, "None", []):
        conversion.drop(given, "1 each")
        return
    found = given.value if isinstance(given.value, list) else str(given.value).strip("[]").replace(",", " ").split()
    weights = [number(Given(source=given.source, key=given.key, value=one)) for one in found]
    conversion.take(given, "rollout.reward_weights", weights)


@sets("data.chat_arguments")
def chat_arguments(conversion: Conversion, given: Given) -> None:
    if isinstance(given.value, dict):
        conversion.take(given, "data.chat_arguments", given.value)
    else:
        shared.off_or_unsupported("data.chat_arguments is a mapping").apply(conversion, given)


def cispo_limit(conversion: Conversion) -> float | None:
    options = conversion.options
    return options.get("objective.epsilon", 0.2) if options.get("objective.loss_type") == "cispo" else None


def complete(conversion: Conversion) -> None:
    """Sets the options that follow from several keys of `OWN`, once all are read and objective.name is grpo."""
    options, facts = conversion.options, conversion.facts
    longest = int(options.get("rollout.max_completion_length", 512))
    if "data.seq_length" not in options:
        prompt = facts.get("prompt_length") or 512
        note = f"a prompt of {prompt} and a completion of {longest} tokens"
        conversion.set_default(
            "derived", "max_prompt_length + max_completion_length", "data.seq_length", prompt + longest, note
        )
        if not facts.get("prompt_length"):
            conversion.to_fill.append(
                f"data.seq_length: prompt and completion together; TRL has no limit for prompts, {prompt} tokens are a "
                "guess, and longer ones are left out"
            )
    if options.get("objective.loss_type") in SEQUENCE_RATIOS and options.get("objective.ratio_level") == "token":
        conversion.remove("objective.ratio_level", f"{options['objective.loss_type']} has ratios of whole completions")
    if options.get("objective.loss_type") == "cispo":
        # there is no lower limit, and epsilon is the upper one where no other is given
        conversion.set_default(
            "GRPOTrainer", "epsilon_high", "objective.epsilon_high", options.get("objective.epsilon", 0.2)
        )
        if "objective.epsilon" in options:
            conversion.remove("objective.epsilon", "cispo has no lower limit")
    loss = str(options.get("objective.loss_type", "dapo"))
    for name in [name for name in options if loss != "vespo" and name.startswith("objective.vespo_")]:
        conversion.remove(name, "of another loss")
    for name in ("objective.epsilon", "objective.epsilon_high", "objective.delta"):
        if loss in WITHOUT_LIMITS and name in options:
            conversion.remove(name, f"{loss} has no limits")
    if facts.get("moves_reference") and options.get("objective.beta"):
        steps, share = facts.get("reference_steps", 512), facts.get("reference_share", 0.6)
        conversion.set_default("derived", "sync_ref_model", "objective.reference_sync_steps", steps)
        conversion.set_default("derived", "ref_model_mixup_alpha", "objective.reference_mixup_alpha", share)
    if options.get("objective.entropy_coefficient") and (
        loss not in _BY_TOKENS or options.get("objective.top_entropy_quantile", 1.0) < 1
    ):
        conversion.remove("objective.entropy_coefficient", "TRL takes the mean over tokens, whatever the loss")
        conversion.notes.append(
            "entropy_coef has no counterpart, and the run will differ: TRL takes the mean of the entropy over tokens, "
            f"and objective.entropy_coefficient sums it as {loss} sums losses"
        )
    if facts.get("bias_correction") is False and options.get("objective.beta"):
        conversion.set_default("derived", "use_bias_correction_kl", "objective.kl_bias_correction", False)
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
    conversion.set_default("derived", "steps_per_generation", "rollout.steps_per_generation", steps, note)
    if passes % accumulated:
        conversion.notes.append(
            f"a generation batch of {note} is none of whole steps, and becomes {steps}: TRL trains on older completions"
        )


def finish(conversion: Conversion) -> None:
    conversion.options["objective.name"] = "grpo"
    moves = conversion.facts.get("moves_reference")
    if not conversion.facts["trains_adapters"] and not moves and conversion.options.get("objective.beta"):
        conversion.remove("objective.beta", "the reference is the model without its adapters, and none train")
        conversion.notes.append(
            "beta has no counterpart, and the run will differ: the reference is the model without its adapters, and "
            "none train"
        )
    complete(conversion)
