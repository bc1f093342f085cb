"""Rules for TRL's commands and scripts, and the recipes written for them."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion, other_objective, sets, truth, whole
from rankfold.migrating.given import PROGRAM, Given

_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "simpo": "simpo", "kto": "kto", "orpo": "orpo"}
_OF_SFT = ("assistant_only_loss", "completion_only_loss", "packing", "packing_strategy", "dataset_text_field")
"""Arguments that SFTConfig alone has; it has a loss_type, too."""
_TASKS = ("orpo", "simpo", "kto", "cpo", "dpo", "reward", "sft")


def task(conversion: Conversion) -> str:
    """Returns "sft", "dpo", ...: the command, or the script that was started; without either the kind of run that
    its keys imply."""
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
        conversion.add_fact(given, "wrapped", True, "data.packing: concatenate")
    else:
        conversion.drop(given, "data.packing true fits whole samples into rows")


@sets("data.seq_length")
def max_length(conversion: Conversion, given: Given) -> None:
    if given.value in (None, "None", "null"):
        conversion.add_fact(given, "unlimited", True, "no sample is cut")
        conversion.to_fill.append("data.seq_length: max_length none cuts no sample; give the length of the longest")
    else:
        conversion.take(given, "data.seq_length", whole(given))


def margin(conversion: Conversion) -> float:
    ratio = conversion.facts.get("gamma_ratio")
    beta = float(conversion.options.get("objective.beta", 0.1))
    if conversion.options.get("objective.name") != "simpo":
        return 0.0
    return 0.5 if ratio is None else ratio * beta


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


def finish(conversion: Conversion) -> None:
    what, options = task(conversion), conversion.options
    conversion.facts.setdefault("logging_steps", 10)  # of its configurations, for want of eval_steps
    if not any(row.given.key == "dataset_name" and row.given.source.endswith(".py") for row in conversion.rows):
        conversion.facts.setdefault("test_split", "test")  # ScriptArguments, which a script of one's own may not have
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
