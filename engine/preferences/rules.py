"""Rules between sections that concern objectives over judged answers alone."""

from __future__ import annotations

from engine.config.checks import require
from engine.config.run import RunConfig


def check_preferences(config: RunConfig) -> None:
    """Refuses options that cannot be combined with an objective over judged answers, or with its reference.

    Raises:
        UserError: two values clash.
    """
    objective, data = config.objective, config.data
    require(
        config.train.eval_mean == "tokens",
        f"train.eval_mean is rows and objective.name is {objective.name}, whose loss is a mean over pairs: set "
        "train.eval_mean to tokens.",
    )
    require(
        not data.mix,
        f"objective.name is {objective.name} and data.mix is {list(data.mix)}, but answers that are compared come from "
        "one file: put them together, and leave data.mix out.",
    )
    require(
        data.overlong != "cut",
        f"objective.name is {objective.name} and data.overlong is cut, but an answer in pieces cannot be compared: set "
        "data.overlong to truncate, drop or error.",
    )
    require(
        data.format == "auto" and data.mask_prompt,
        f"objective.name is {objective.name}, whose records are judged answers, and data.format is {data.format} and "
        f"data.mask_prompt {str(data.mask_prompt).lower()}: leave both out, these records are recognised by their "
        "fields and only answers are compared.",
    )
    require(
        data.packing != "concatenate",
        f"objective.name is {objective.name} and data.packing is concatenate, which would split answers: "
        "set data.packing to true or false.",
    )
    require(
        config.memory.cuda_graph != "step",
        f"objective.name is {objective.name} and memory.cuda_graph is step, but which answers a step compares is known "
        "on the host only: set memory.cuda_graph to layer or none.",
    )
    if objective.compared_with != "base":
        return
    require(
        not config.trainable,
        f"objective.reference is base and trainable is {list(config.trainable)}, so that the model without adapters "
        "would change with training: set objective.reference to initial.",
    )
    require(
        config.lora.init_from is None,
        f"objective.reference is base and lora.init_from is {config.lora.init_from}: set objective.reference to "
        "initial to compare with the adapter that the run starts from, or merge it into the model first to compare "
        "with that.",
    )
