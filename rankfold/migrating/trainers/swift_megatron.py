"""Rules for Megatron-SWIFT, ms-swift's training with Megatron-Core: `megatron sft`, `megatron pt` and `megatron
rlhf`. Read in version 4.6.0, with the older names of 3.9 and 3.12 (max_epochs, save, save_interval, eval_interval,
log_interval).
"""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, sets
from rankfold.migrating.given import Given
from rankfold.migrating.trainers import experts_of_megatron, swift


@sets("model.path")
def mcore_model(conversion: Conversion, given: Given) -> None:
    """Reports weights in Megatron's own format, which are not read."""
    if given.value in (None, ""):
        conversion.drop(given, "none")
    else:
        conversion.add_fact(given, "mcore", str(given.value), "model.path: the Hugging Face folder of these weights")


def expert_tensor(conversion: Conversion) -> int | None:
    return 1 if conversion.given("expert_model_parallel_size") else None


def adapters(conversion: Conversion) -> bool:
    """Returns whether adapters train: MegatronTunerMixin.tuner_type is full by default, and lora where one is named."""
    return bool(conversion.facts.get("lora", False) or "adapters" in conversion.facts)


def finish(conversion: Conversion) -> None:
    facts, options = conversion.facts, conversion.options
    facts.setdefault("lora", adapters(conversion))
    facts.setdefault("wandb_project", "megatron-swift")
    facts["save_steps"] = options.get("checkpoint.every", 500)
    for key, name, usual in (
        ("micro_batch_size", "train.micro_batch_size", 1),
        ("global_batch_size", "train.global_batch_size", 16),
    ):
        conversion.set_default("MegatronArguments", key, name, usual)
    swift.finish(conversion)
    facts.pop("save_steps")
    if facts.get("eval_iters_given", -1) >= 0:
        facts["eval_iters"] = facts["eval_iters_given"]
    if "mcore" in facts and "model.path" not in options:
        conversion.to_fill.append(
            f"model.path: {facts['mcore']} is Megatron's checkpoint, which is not read; name the model's Hugging "
            f"Face folder"
        )
    if facts.get("recompute_method") == "block" and options.get("memory.recompute") == "full":
        conversion.set_default(
            "derived", "recompute_num_layers", "memory.recompute_layers", facts.get("recompute_layers")
        )
    experts_of_megatron.finish(conversion)
