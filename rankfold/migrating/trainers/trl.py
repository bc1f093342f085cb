"""Rules for TRL's commands and scripts, and the recipes written for them."""

from __future__ import annotations

from typing import Any

from rankfold.migrating.conversion import (
    Conversion,
    Rule,
    dropped,
    fact,
    number,
    option,
    other_objective,
    sets,
    truth,
    whole,
)
from rankfold.migrating.given import PROGRAM, Given
from rankfold.migrating.trainer import Default, Ours, Trainer
from rankfold.migrating.trainers import hugging_face as hf
from rankfold.migrating.trainers import shared

_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "simpo": "simpo", "kto": "kto", "orpo": "orpo"}
_OF_SFT = ("assistant_only_loss", "completion_only_loss", "packing", "packing_strategy", "dataset_text_field")
"""Arguments that SFTConfig alone has; it has a loss_type, too."""
_TASKS = ("orpo", "simpo", "kto", "cpo", "dpo", "reward", "sft")


def task(conversion: Conversion) -> str:
    """Returns "sft", "dpo", ...: the command, or the script that was started; without either what its keys are for."""
    programs = [str(row.given.value) for row in conversion.rows if row.given.key == PROGRAM]
    name = " ".join([*programs, *(row.given.source for row in conversion.rows[:1])]).lower()
    found = next((one for one in _TASKS if one in name), None)
    if found is None and conversion.given("simpo_gamma", "gamma_beta_ratio"):
        return "simpo"
    if found is None and conversion.given(*_OF_SFT):
        return "sft"
    if found is None and conversion.given("beta", "loss_type", "max_prompt_length"):
        return "dpo"
    return found or "sft"


_CPO = "of CPO, whose sums of log-probabilities have no reference (of its losses, simpo is available)"


@sets("objective.name")
def loss_type(conversion: Conversion, given: Given) -> None:
    found = given.value if isinstance(given.value, list) else [given.value]
    if found in (["nll"], ["chunked_nll"]):
        conversion.drop(given, "the cross-entropy")
    elif found == [None]:
        conversion.drop(given, "the command's own loss")
    elif len(found) == 1 and str(found[0]) in _LOSSES:
        if task(conversion) == "cpo" and str(found[0]) != "simpo":
            raise other_objective(given, f"a loss {_CPO}")
        conversion.take(given, "objective.name", _LOSSES[str(found[0])])
    else:
        raise other_objective(given, "another loss")


@sets("objective.name")
def loss_weights(conversion: Conversion, given: Given) -> None:
    found = given.value if isinstance(given.value, list) else [given.value]
    if found not in ([None], ["None"], [1], [1.0]):
        raise other_objective(given, "a weighted sum of losses")
    conversion.drop(given, "of one loss")


@sets("data.mask_prompt")
def completion_only(conversion: Conversion, given: Given) -> None:
    if given.value is not None:
        conversion.take(given, "data.mask_prompt", truth(given))


@sets("data.packing")
def packing_strategy(conversion: Conversion, given: Given) -> None:
    if str(given.value) == "wrapped":
        conversion.know(given, "wrapped", True, "data.packing: concatenate")
    else:
        conversion.drop(given, "data.packing true fits whole samples into rows")


@sets("objective.margin")
def gamma_ratio(conversion: Conversion, given: Given) -> None:
    conversion.know(given, "gamma_ratio", number(given), "objective.margin: this times objective.beta")


RULES: dict[str, Rule] = hf.RULES | {
    "beta": option("objective.beta", number),
    "loss_type": loss_type,
    "label_smoothing": option("objective.label_smoothing", number),
    "simpo_gamma": option("objective.margin", number),
    "gamma_beta_ratio": gamma_ratio,
    "desirable_weight": option("objective.desirable_weight", number),
    "undesirable_weight": option("objective.undesirable_weight", number),
    "ref_model": shared.off_or_lack("the reference is the model as it starts: objective.reference"),
    "cpo_alpha": fact("cpo_alpha", number, became="the weight of a further term"),
    "completion_only_loss": completion_only,
    "assistant_only_loss": completion_only,
    "packing_strategy": packing_strategy,
    "eval_packing": dropped("validation samples are packed like the others"),
    "truncation_mode": shared.only("keep_start", "a sample that is too long loses its end: data.overlong"),
    "max_prompt_length": dropped("data.seq_length cuts question and answer together"),
    "max_completion_length": dropped("data.seq_length cuts question and answer together"),
    "chat_template": shared.template,
    "chat_template_path": shared.template,
    "rpo_alpha": shared.off_or_refuse("a further term of the loss"),
    "f_divergence_type": shared.only_or_refuse("reverse_kl", "another divergence"),
    "sync_ref_model": shared.off_or_refuse("a reference that moves"),
    "use_weighting": shared.off_or_refuse("pairs that weigh by their probability"),
    "router_aux_loss_coef": option("train.router_aux_loss_coef", number),
    "test_split": dropped("data.train and data.validation are files of their own"),
    "min_lr_ratio": Rule(shared.share_of_lr, ("optim.min_lr",)),
    "num_proc": dropped(shared.SPEED),
    "num_labels": shared.off_or_refuse("a classifier or reward model"),
    "center_rewards_coefficient": shared.off_or_refuse("a reward model"),
    "alpha": shared.off_or_refuse("a further term of the loss"),
    "loss_weights": loss_weights,
    "ld_alpha": shared.off_or_refuse("tokens that weigh by their position"),
    "f_alpha_divergence_coef": dropped("the divergence is the reverse one"),
    "discopop_tau": dropped("of a loss that is not there"),
    "ref_model_mixup_alpha": dropped("the reference does not move"),
    "ref_model_sync_steps": dropped("the reference does not move"),
    "quantization_config": shared.off_or_lack("model.base_dtype stores the frozen base encoded"),
    "padding_value": dropped(shared.SPEED),
}
RULES |= shared.every(
    """
    dataset_mixture dataset_mixture.* dataset_mixer dataset_mixer.* dataset_splits dataset_configs
    dataset_train_split dataset_test_split dataset_streaming splits dataset_train_name dataset_test_name
    dataset_train dataset_test shuffle_dataset datasets datasets.* streaming test_split_size
    """,
    why="data.train and data.mix name files",
)
RULES |= shared.every(
    """
    padding_free pad_to_multiple_of activation_offloading precompute_ref_log_probs precompute_ref_batch_size
    use_logits_to_keep generate_during_eval use_liger_loss pad_token ignore_bias_buffers
    is_encoder_decoder model_adapter_name ref_adapter_name bos_token
    """,
    why=shared.SPEED,
)
RULES |= shared.every(
    """
    eos_token chat_template_format tokenizer_revision auto_insert_empty_system_msg truncation_side
    """,
    why="the tokenizer's own files say how it works",
)
RULES |= shared.every(
    """
    callbacks benchmarks system_prompt wandb_log_unique_prompts
    """,
    why="evaluations give the loss",
)


@sets("data.seq_length")
def max_length(conversion: Conversion, given: Given) -> None:
    if given.value in (None, "None", "null"):
        conversion.know(given, "unlimited", True, "no sample is cut")
        conversion.to_fill.append("data.seq_length: max_length none cuts no sample; give the length of the longest")
    else:
        conversion.take(given, "data.seq_length", whole(given))


RULES["max_length"] = max_length


def _of(**values: Any) -> Any:
    """Returns a default that differs between commands."""
    return lambda conversion: values.get(task(conversion), values["other"])


def _reference(conversion: Conversion) -> str:
    return reference(conversion, _peft(conversion))


def reference(conversion: Conversion, adapters: bool) -> str:
    """Returns the reference: the base without adapters where only adapters train; else the initial model."""
    return "base" if adapters and not conversion.options.get("trainable") else "initial"


def _margin(conversion: Conversion) -> float:
    ratio = conversion.facts.get("gamma_ratio")
    beta = float(conversion.options.get("objective.beta", 0.1))
    if conversion.options.get("objective.name") != "simpo":
        return 0.0
    return 0.5 if ratio is None else ratio * beta


DEFAULTS: dict[str, Default | Ours] = hf.DEFAULTS | {
    "model.dtype": Default(
        lambda conversion: "bfloat16" if conversion.facts.get("bf16", True) else "float32",
        "SFTConfig.bf16 = None, which is true without fp16",
    ),
    "data.seq_length": Default(
        lambda conversion: 2048 if conversion.facts.get("unlimited") else 1024,
        "SFTConfig.max_length and DPOConfig.max_length",
    ),
    "data.packing": Default(False, "SFTConfig.packing"),
    "data.mask_prompt": Default(_of(sft=False, other=True), "SFTConfig.assistant_only_loss = False"),
    "data.chat_template": Default(None, "SFTConfig.chat_template_path"),
    "data.chat_arguments": Ours("the template's own"),
    "optim.lr": Default(_of(sft=2e-5, reward=1e-4, other=1e-6), "SFTConfig.learning_rate, DPOConfig.learning_rate"),
    "memory.recompute": Default("full", "SFTConfig.gradient_checkpointing"),
    "lora.rank": Default(16, "ModelConfig.lora_r"),
    "lora.alpha": Default(32.0, "ModelConfig.lora_alpha"),
    "lora.dropout": Default(0.05, "ModelConfig.lora_dropout"),
    "objective.name": Default(
        _of(dpo="dpo", kto="kto", orpo="orpo", simpo="simpo", cpo="simpo", other="language_modeling"), "the command"
    ),
    "objective.beta": Default(_of(simpo=2.0, other=0.1), "DPOConfig.beta"),
    "objective.label_smoothing": Default(0.0, "DPOConfig.label_smoothing"),
    "objective.margin": Default(_margin, "CPOConfig.simpo_gamma"),
    "objective.desirable_weight": Default(1.0, "KTOConfig.desirable_weight"),
    "objective.undesirable_weight": Default(1.0, "KTOConfig.undesirable_weight"),
    "train.router_aux_loss_coef": Ours("that of the model's config.json, where it is a mixture of experts"),
    "objective.reference": Default(_reference, "DPOTrainer: the model without its adapter, or a copy as it starts"),
}


def _peft(conversion: Conversion) -> bool:
    """Returns whether adapters train: ModelConfig.use_peft is false by default, whatever lora_r is."""
    return bool(conversion.facts.get("lora", False))


def _cpo(conversion: Conversion) -> None:
    """Refuses losses of CPOConfig that are not SimPO's; its loss_type is sigmoid, and its cpo_alpha 1 by default."""
    programs = [str(row.given.value) for row in conversion.rows if row.given.key == PROGRAM]
    # scripts written for SimPO have no term of CPO's
    ratio = conversion.given("gamma_beta_ratio") or any("simpo" in name for name in programs)
    if task(conversion) == "cpo" and conversion.options.get("objective.name") != "simpo" and not ratio:
        given = Given(source=f"{conversion.trainer}'s default", key="loss_type", value="sigmoid")
        raise other_objective(given, f"a loss {_CPO}")
    alpha = conversion.facts.get("cpo_alpha", 0.0 if ratio else 1.0)
    if alpha:
        given = Given(source="CPOConfig", key="cpo_alpha", value=alpha)
        raise other_objective(given, "a further term of the chosen answer (cpo_alpha 0 is SimPO without it)")


def _finish(conversion: Conversion) -> None:
    what, options = task(conversion), conversion.options
    if conversion.facts.get("wrapped") and options.get("data.packing"):
        options["data.packing"] = "concatenate"
    if what == "sft" and "data.mask_prompt" not in options:
        conversion.notes.append(
            "TRL learns all of a conversation unless assistant_only_loss is true, and of a prompt and its completion "
            "the completion alone: data.mask_prompt is written for conversations, set it to true for the others"
        )
    if what in ("cpo", "simpo"):
        _cpo(conversion)
    if what == "reward":
        raise other_objective(Given(source="the input", key=PROGRAM, value="trl reward"), "a reward model")


TRL = Trainer(name="TRL", rules=RULES, defaults=DEFAULTS, adapters=_peft, finish=_finish, dropout_with_answers=False)
