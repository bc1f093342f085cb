"""Rules between sections that concern distillation on given texts."""

from __future__ import annotations

from engine.config.checks import require
from engine.config.distillation import BASE, is_server
from engine.config.option import changed
from engine.config.run import RunConfig

OF_DISTRIBUTIONS = ("beta", "temperature", "label_share", "remainder")
"""Options of losses of whole distributions, or of a teacher's stored tokens."""
_ON_COMPLETIONS = ("discount", "server_kind", "server_timeout", "whole")


def check_distillation(config: RunConfig) -> None:
    """Refuses options that cannot be combined with distillation on given texts.

    Raises:
        UserError: two values clash.
    """
    options, name = config.distillation, config.objective.name
    given = next((field.name for field in changed(options) if field.name in _ON_COMPLETIONS), None)
    require(
        given is None,
        f"distillation.{given} is set and objective.name is {name}, but it belongs to completions that a run samples: "
        "remove it, or set objective.name to grpo.",
    )
    require(
        options.label_share < 1,
        "distillation.label_share is 1, which leaves nothing to learn from a teacher: use a smaller share, or set "
        "objective.name to language_modeling.",
    )
    require(
        config.memory.cuda_graph != "step",
        f"objective.name is {name} and memory.cuda_graph is step, but a teacher's part of a step is not in its graph: "
        "set memory.cuda_graph to layer or none.",
    )
    if options.teachers:
        _check_teachers(config)
    else:
        _check_stored(config)


def _check_teachers(config: RunConfig) -> None:
    options = config.distillation
    wrong = next((one for one in options.teachers if one == BASE or is_server(one)), None)
    require(
        wrong is None,
        f"distillation.teachers has {wrong} and objective.name is {config.objective.name}, which compares whole "
        "distributions with those of a model on the run's devices: name the folder of one, or write a server's most "
        "likely tokens into records with rankfold distill.",
    )
    require(
        options.remainder == "renormalize",
        f"distillation.remainder is {options.remainder} and distillation.teachers names models, whose whole "
        "distributions leave no remainder: remove one of them.",
    )


def _check_stored(config: RunConfig) -> None:
    options, data, name = config.distillation, config.data, config.objective.name
    require(
        options.beta == 0,
        f"distillation.beta is {options.beta} and distillation.teachers is [], but the stored tokens of a teacher give "
        "KL(teacher || model) alone: name a teacher, or set distillation.beta to 0.",
    )
    require(
        options.remainder == "renormalize" or options.temperature == 1,
        f"distillation.remainder is bucket and distillation.temperature is {options.temperature}, but the teacher's "
        "probability outside of its stored tokens is known at temperature 1 alone: set one of them back.",
    )
    require(
        data.format == "auto" and data.mask_prompt,
        f"objective.name is {name}, data.format is {data.format} and data.mask_prompt {str(data.mask_prompt).lower()}, "
        "but records with a teacher's tokens are recognised by their fields, and say which tokens are targets: leave "
        "both out.",
    )
    require(
        data.packing != "concatenate",
        f"objective.name is {name} and data.packing is concatenate, which would tear texts from their teacher's "
        "tokens: set data.packing to true or false.",
    )
    require(
        not data.mix and data.overlong != "cut",
        f"objective.name is {name}, data.mix is {list(data.mix)} and data.overlong is {data.overlong}, but records "
        "with a teacher's tokens come from one file and are not cut: put them together, and use truncate, drop or "
        "error.",
    )
