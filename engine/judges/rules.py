"""Rules between sections that concern reward models alone."""

from __future__ import annotations

from engine.config.checks import require
from engine.config.run import RunConfig


def check_judges(config: RunConfig) -> None:
    """Refuses options that cannot be combined with a reward model.

    Raises:
        UserError: two values clash.
    """
    data, train = config.data, config.train
    clashes = (
        (config.objective.beta is not None, f"objective.beta is {config.objective.beta}, which its loss does not have: "
         "remove it"),
        (train.eval_mean != "tokens", "train.eval_mean is rows, but the loss is a mean over pairs: set train.eval_mean "
         "to tokens"),
        (bool(data.mix), f"data.mix is {list(data.mix)}, but answers that are compared come from one file: put them "
         "together, and leave data.mix out"),
        (data.overlong == "cut", "data.overlong is cut, but an answer in pieces cannot be scored: set data.overlong to "
         "drop or error"),
        (data.format != "auto" or not data.mask_prompt, f"data.format is {data.format} and data.mask_prompt "
         f"{str(data.mask_prompt).lower()}, but its records are recognised by their fields and whole texts are scored: "
         "leave both out"),
        (data.packing == "concatenate", "data.packing is concatenate, which would split answers: set data.packing to "
         "true or false"),
        (bool(train.sample_prompts or train.sample_chat), "train.sample_prompts or train.sample_chat is set, but a "
         "reward model scores texts and writes none: remove them"),
        (bool(config.evaluation.tasks), f"evaluation.tasks is {list(config.evaluation.tasks)}, but a reward model "
         "scores texts and gives no tokens: leave evaluation.tasks out"),
        (config.memory.cuda_graph == "step", "memory.cuda_graph is step, but which tokens are scored is known on the "
         "host only: set memory.cuda_graph to layer or none"),
    )  # fmt: skip
    for clash, sentence in clashes:
        require(not clash, f"objective.name is reward and {sentence}.")
