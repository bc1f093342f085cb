"""The known trainers: recognises which one the input is for, and has the rules of each."""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import UserError
from engine.sentences import listed
from rankfold.migrating import launcher_rules
from rankfold.migrating.conversion import NOT_GIVEN, Conversion, Rule
from rankfold.migrating.given import OWN_LOOP, PROGRAM, Given
from rankfold.migrating.trainer import Trainer
from rankfold.migrating.trainers.axolotl import AXOLOTL
from rankfold.migrating.trainers.cogvlm import COGVLM2
from rankfold.migrating.trainers.hugging_face import HUGGING_FACE
from rankfold.migrating.trainers.launchers import LAUNCHERS
from rankfold.migrating.trainers.llama_factory import LLAMA_FACTORY
from rankfold.migrating.trainers.llava import KEYS as LLAVA_KEYS
from rankfold.migrating.trainers.llava import LLAVA
from rankfold.migrating.trainers.megatron import MEGATRON
from rankfold.migrating.trainers.minicpm import MINICPM, MLPERF
from rankfold.migrating.trainers.minimind import MINIMIND
from rankfold.migrating.trainers.not_read import refuse_not_read
from rankfold.migrating.trainers.sat import SAT
from rankfold.migrating.trainers.swift import KEYS as SWIFT_KEYS
from rankfold.migrating.trainers.swift import SWIFT
from rankfold.migrating.trainers.swift_megatron import KEYS as MEGATRON_SWIFT_KEYS
from rankfold.migrating.trainers.swift_megatron import MEGATRON_SWIFT
from rankfold.migrating.trainers.trl import TRL
from rankfold.migrating.trainers.trl_grpo import TRL_GRPO

TRAINERS: tuple[Trainer, ...] = (
    TRL, LLAMA_FACTORY, AXOLOTL, SWIFT, MEGATRON_SWIFT, MEGATRON, MINIMIND, SAT, MLPERF, MINICPM, LLAVA, COGVLM2,
    TRL_GRPO, HUGGING_FACE, LAUNCHERS,
)  # fmt: skip
"""The trainers, in the order in which a key is looked up for a hint."""
SOURCES: dict[str, tuple[Trainer, ...]] = {
    "trl": (TRL, TRL_GRPO), "llama-factory": (LLAMA_FACTORY,), "axolotl": (AXOLOTL,), "ms-swift": (SWIFT,),
    "megatron-swift": (MEGATRON_SWIFT,), "megatron": (MEGATRON,), "minimind": (MINIMIND,), "sat": (SAT,),
    "mlperf": (MLPERF,), "minicpm-v": (MINICPM,), "llava": (LLAVA,), "cogvlm2": (COGVLM2,), "trainer": (HUGGING_FACE,),
    "launcher": (LAUNCHERS,),
}  # fmt: skip
"""Names of the sources for the command line -> their trainers."""

_COMMANDS = (
    ("swift ", SWIFT), ("megatron ", MEGATRON_SWIFT), ("llamafactory-cli", LLAMA_FACTORY), ("lmf ", LLAMA_FACTORY),
    ("axolotl", AXOLOTL), ("trl grpo", TRL_GRPO), ("trl ", TRL),
)  # fmt: skip
"""Beginning of a command -> its trainer, whatever keys it has."""
_PROGRAMS = (
    ("trl.scripts.grpo", TRL_GRPO), ("grpo.py", TRL_GRPO), ("run_grpo.py", TRL_GRPO), ("grpo_", TRL_GRPO),
    ("llamafactory", LLAMA_FACTORY), ("train_dpo.py", MINIMIND), ("train_grpo.py", MINIMIND),
    ("train_ppo.py", MINIMIND), ("train_agent.py", MINIMIND), ("train_distillation.py", MINIMIND),
    ("train_full_sft.py", MINIMIND), ("train_lora.py", MINIMIND), ("train_pretrain.py", MINIMIND),
    ("pretrain_", MEGATRON), ("trl.scripts", TRL), ("sft.py", TRL), ("dpo.py", TRL), ("kto.py", TRL),
    ("orpo.py", TRL), ("cpo.py", TRL), ("sft_", TRL), ("dpo_", TRL),
    ("run_sft.py", TRL), ("run_dpo.py", TRL), ("run_orpo.py", TRL),
    ("run_simpo.py", TRL),
)  # fmt: skip
"""Beginning of a script's name -> its trainer; keys that only another trainer has count more."""
_FIRST: tuple[tuple[Trainer, frozenset[str]], ...] = (
    (AXOLOTL, frozenset({"base_model"})),
    (COGVLM2, frozenset({"train_dataset_rate"})),
    (LLAMA_FACTORY, frozenset({"finetuning_type", "cutoff_len", "lora_target", "dataset_dir"})),
    (SWIFT, SWIFT_KEYS),
    (LLAMA_FACTORY, frozenset({"template"})),
    (MLPERF, frozenset({"target_eval_loss"})),
    (MINICPM, frozenset({"llm_type", "max_slice_nums"})),
    (LLAVA, LLAVA_KEYS),
    (MINIMIND, frozenset({"from_weight", "save_weight", "from_teacher_weight"})),
    (SAT, frozenset({"from_pretrained", "train_data", "MP_SIZE", "model_parallel_size"})),
)  # fmt: skip
"""Keys that one trainer alone has, which count more than a script's name."""
_KEYS: tuple[tuple[Trainer, frozenset[str]], ...] = (
    (MEGATRON, frozenset({"train_iters", "train_samples", "tensor_model_parallel_size", "num_attention_heads",
                          "lr_decay_style", "use_mcore_models", "lr_warmup_iters", "expert_model_parallel_size",
                          "moe_aux_loss_coeff"})),
    (MINIMIND, frozenset({"accumulation_steps", "lora_name"})),
    (TRL_GRPO, frozenset({"reward_funcs", "reward_weights", "num_generations", "num_iterations", "scale_rewards",
                          "mask_truncated_completions", "importance_sampling_level"})),
    (TRL, frozenset({"use_peft", "dataset_train_split", "dataset_mixture", "dataset_mixer", "max_prompt_length",
                     "lora_task_type", "assistant_only_loss", "dataset_kwargs", "simpo_gamma", "gamma_beta_ratio",
                     "loss_type", "chat_template", "eos_token", "dataset_num_proc",
                     "use_peft_lora", "dataset_text_field"})),
    (HUGGING_FACE, frozenset({"per_device_train_batch_size", "num_train_epochs", "model_name_or_path", "learning_rate",
                              "lora_r", "lora_target_modules", "max_steps"})),
)  # fmt: skip
"""Keys by which a trainer is recognised where nothing else tells, the most specific first."""
_LAUNCHED = frozenset({
    "compute_environment", "distributed_type", "num_processes", "num_machines", "mixed_precision", "use_deepspeed",
    "nproc_per_node", "nnodes", "num_gpus", "hostfile", "standalone", "multi_gpu", "zero_stage",
    "zero_optimization.stage",
    "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping", "bf16.enabled", "fp16.enabled",
    "optimizer.type", "deepspeed_config", "deepspeed_config.zero_stage", "deepspeed_config_file",
    "fsdp_sharding_strategy",
    "fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_version", "config_file", "deepspeed",
})  # fmt: skip
"""Keys by which a launcher's file or command is recognised."""


def recognise(given: Iterable[Given], source: str | None = None) -> Trainer:
    """Returns the trainer whose files and flags these are; LAUNCHERS where there are launchers' keys alone.

    Args:
        given: all keys.
        source: one of SOURCES, where the user says it.

    Raises:
        UserError: they are of none that is converted.
    """
    everything = list(given)
    if source is None:
        refuse_not_read(everything, _known())
    found = _recognised(everything)
    if source is not None:
        return found if found in SOURCES[source] else SOURCES[source][0]
    loop = next((one for one in everything if one.key == OWN_LOOP), None)
    if found is HUGGING_FACE and loop is not None:
        raise UserError(
            f"{loop.source} trains in a loop of its own, not with a Trainer whose defaults are known: write the run's "
            f"file from docs/coming-from.md, or give a script of one of {_known()}."
        )
    if found is None:
        place = next((one.source for one in everything), "the input")
        raise UserError(
            f"{place} has no key or program by which its source is recognised: name it with --from SOURCE, one of "
            f"{_known()}, or write the run's file from docs/coming-from.md."
        )
    return found


def check_known(conversion: Conversion) -> None:
    """Refuses a conversion most of whose keys the trainer does not have.

    Raises:
        UserError: more than half of them are unknown.
    """
    rows = [
        row
        for row in conversion.rows
        if row.given.value != NOT_GIVEN and not row.given.key.startswith("(") and row.given.key != row.given.key.upper()
    ]
    unknown = [row.given for row in rows if row.kind == "unknown"]
    if 2 * len(unknown) > len(rows):
        few = listed((one.key for one in unknown), most=4)
        raise UserError(
            f"{unknown[0].source} was read as {conversion.trainer}, which does not have {len(unknown)} of its "
            f"{len(rows)} keys ({few}): name its source with --from SOURCE, one of {_known()}, or write the run's "
            "file from docs/coming-from.md."
        )


def _known() -> str:
    return ", ".join(sorted(SOURCES))


def _recognised(everything: list[Given]) -> Trainer | None:
    keys = {part for one in everything for part in (one.key, one.key.partition(".")[0]) if not one.idle}
    programs = [str(one.value) for one in everything if one.key == PROGRAM]
    certain = next((trainer for name in programs for start, trainer in _COMMANDS if name.startswith(start)), None)
    if certain is None:
        defaults = {
            one.key for one in everything if one.idle and one.key != one.key.upper()
        }  # of the script's arguments
        certain = next((trainer for trainer, telling in _FIRST if (keys | defaults) & telling), None)
        if certain is SWIFT and keys & MEGATRON_SWIFT_KEYS:
            certain = MEGATRON_SWIFT
    if certain is not None:
        return certain
    started = next((trainer for name in programs for start, trainer in _PROGRAMS if name.startswith(start)), None)
    if started is not None and not (started in (MEGATRON, MINIMIND) and keys & {"output_dir", "model_name_or_path"}):
        return started
    known = next((trainer for trainer, telling in _KEYS if keys & telling), None)
    if known is MEGATRON and not ("lr" in keys and keys & {"train_iters", "train_samples", "train_tokens"}):
        return None  # Megatron refuses such a run: these are flags of another program of its checkout
    if known is not None:
        return known
    flags = [one.key for one in everything if launcher_rules.rule_for(one.key) is None and not one.idle]
    if any(_trains(HUGGING_FACE.rule(key)) for key in flags):
        return HUGGING_FACE
    return LAUNCHERS if keys & _LAUNCHED and not (programs and _has_own_flags(flags)) else None


def _has_own_flags(flags: list[str]) -> bool:
    """Returns whether a script has options of its own, none of which says how it trains."""
    return any(not key.startswith("(") and key != key.upper() for key in flags)


def _trains(rule: Rule | None) -> bool:
    """Returns whether a key says what is trained or how; data, or a folder for the results, alone do not."""
    return rule is not None and any(not option.startswith(("checkpoint.", "log.", "data.")) for option in rule.options)
