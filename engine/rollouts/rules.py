"""Rules between sections that concern objectives over sampled completions alone."""

from __future__ import annotations

from dataclasses import fields

from engine.config.checkpoint import EVALUATED
from engine.config.checks import require
from engine.config.distillation import BASE, is_server
from engine.config.option import changed
from engine.config.rollout import IN_PROGRAM
from engine.config.run import RunConfig
from engine.distillation.rules import OF_DISTRIBUTIONS
from engine.rollouts.pass_at_k import judging_figures
from engine.sentences import listed

_WITH_WHOLE = ("name", "num_iterations", "mask_truncated")
"""Options of the objective that count where whole distributions of teachers are learned."""


def check_rollouts(config: RunConfig) -> None:
    """Refuses options that cannot be combined with training on sampled completions.

    Raises:
        UserError: two values clash.
    """
    _check_completions(config)
    _check_prompts(config)
    _check_server(config)
    _check_staleness(config)
    _check_teachers(config)
    _check_programs(config)
    require(
        not config.rollout.has_tasks or config.data.train is None,
        f"data.train is {config.data.train} and rollout.agent {config.rollout.agent}, whose own tasks are the prompts: "
        "remove data.train.",
    )
    _check_evaluation(config)


def _check_programs(config: RunConfig) -> None:
    """Refuses tools and an environment some of which are in files, and others in a Python program."""
    names = [text for _, text in config.rollout.named_programs]
    in_program = [text.startswith(IN_PROGRAM) for text in names]
    require(
        all(in_program) or not any(in_program),
        f"{', '.join(names)} are partly of a Python program and partly in files, which are called in other processes: "
        "name all of them, or give all of them in the program.",
    )


def _check_evaluation(config: RunConfig) -> None:
    """Refuses evaluations without rewards, and their options without evaluations."""
    evaluates = config.data.evaluates
    require(
        not evaluates or bool(config.rollout.rewards),
        "data.validation is set and rollout.rewards is [], so that completions of its prompts could not be scored: "
        "name a reward, or remove data.validation.",
    )
    best = config.checkpoint.best
    if best.startswith(EVALUATED):
        known = judging_figures(config.rollout)
        require(
            best in known,
            f"checkpoint.best is {best}, but evaluations of {config.objective.name} can judge by {listed(known)}: set "
            "checkpoint.best to one of these.",
        )
    for field in changed(config.rollout):
        require(
            evaluates or not (field.name.startswith("eval_") or field.name == "pass_reward"),
            f"rollout.{field.name} is set and data.validation is not, so that nothing is evaluated: name a file with "
            f"prompts in data.validation, or remove rollout.{field.name}.",
        )


def _check_completions(config: RunConfig) -> None:
    """Refuses options that cannot be combined with training on sampled completions, or with its reference."""
    require(
        config.rollout.merge_once or config.lora.merge_aware,
        "rollout.merge_once is false and lora.merge_aware is not true, so that nothing is merged: remove it, or set "
        "lora.merge_aware to true.",
    )
    objective, graph = config.objective, config.memory.cuda_graph
    fixed = objective.compared_with is not None and objective.reference_sync_steps is None
    require(
        graph == "none",
        f"objective.name is {objective.name} and memory.cuda_graph is {graph}, whose size depends on the rows, which "
        "are not known before they are sampled: set memory.cuda_graph to none.",
    )
    require(
        config.data.packing != "concatenate",
        f"objective.name is {objective.name} and data.packing is concatenate, which would split completions: set "
        "data.packing to true or false.",
    )
    require(
        objective.reference == "base",
        f"objective.name is {objective.name} and objective.reference is {objective.reference}, but completions are "
        "compared with the model without its adapters, if at all: remove it.",
    )
    require(
        not fixed or not config.trainable,
        f"objective.beta is {objective.beta} and trainable is {list(config.trainable)}, so that the model without "
        "adapters, which completions are compared with, would change with training: set objective.beta to 0, or "
        "trainable to [].",
    )
    require(
        not fixed or config.lora.rank > 0,
        f"objective.beta is {objective.beta} and lora.rank is 0, but completions are compared with the model without "
        "its adapters: set lora.rank to for example 16, or objective.beta to 0.",
    )
    require(
        not fixed or config.lora.init_from is None,
        f"objective.beta is {objective.beta} and lora.init_from is {config.lora.init_from}, but completions are "
        "compared with the model without its adapters, and not with the adapter that the run starts from: merge it "
        "into the model first, or set objective.beta to 0.",
    )


def _check_prompts(config: RunConfig) -> None:
    """Refuses rollouts without rewards or room, and options of data that rollouts do not take."""
    rollout, data, name = config.rollout, config.data, config.objective.name
    teachers = config.distillation.teachers
    require(
        len(rollout.rewards) > 0 or len(teachers) > 0,
        f"objective.name is {name} and rollout.rewards is [], so that no completion is better than another: name a "
        "function, such as rewards.py:accuracy, or exact_match, or a teacher in distillation.teachers.",
    )
    require(
        not rollout.rewards or rollout.num_generations > 1,
        "rollout.num_generations is 1, but rewards are compared between the completions of a prompt: use for example "
        "8, or rollout.rewards [] to learn from distillation.teachers alone.",
    )
    require(
        bool(rollout.rewards) or rollout.overlong_buffer is None,
        f"rollout.overlong_buffer is {rollout.overlong_buffer} and rollout.rewards is [], but the penalty is added to "
        "rewards: name a reward, or remove it.",
    )
    objective = config.objective
    for option, limit, default in (
        ("importance_min", objective.importance_min, None), ("importance_max", objective.importance_max, 3.0),
    ):  # fmt: skip
        require(
            objective.importance_correction != "none" or rollout.corrects_sampler or limit == default,
            f"objective.{option} is {limit} and objective.importance_correction is none, which has no limits: set "
            f"objective.importance_correction to for example sequence_mask, or remove objective.{option}.",
        )
    batch, members = config.train.global_batch_size, rollout.num_generations
    require(
        batch % members == 0,
        f"train.global_batch_size is {batch}, which counts completions, and rollout.num_generations {members}: use "
        f"for example train.global_batch_size {max(members, batch - batch % members)}.",
    )
    require(
        data.seq_length > rollout.max_completion_length,
        f"data.seq_length is {data.seq_length}, which is that of prompt and completion, and "
        f"rollout.max_completion_length {rollout.max_completion_length}, which leaves no room for a prompt: raise "
        "data.seq_length.",
    )
    alone = "whose data are the prompts of data.train, without answers and each whole"
    train = config.train
    for given, wanted, why in (
        (f"data.mix is {list(data.mix)}", not data.mix, alone),
        (f"data.format is {data.format}", data.format == "auto", alone),
        ("data.mask_prompt is false", data.mask_prompt, alone),
        ("data.overlong is cut", data.overlong != "cut", alone),
        ("data.learn_after_end is false", data.learn_after_end, "whose completions end where sampling ends"),
        (f"data.show is {data.show}", data.show == 0, "whose rows are not there before the first step: rollout.show "
         "logs completions"),
        (f"data.image_folder is {data.image_folder}", data.image_folder is None, "whose prompts have no images"),
        ("train.last_batch is full", train.last_batch == "short", "whose batches are all full, since prompts continue "
         "over the ends of epochs"),
        ("train.eval_mean is rows", train.eval_mean == "tokens", "which evaluates completions"),
        (f"train.target_eval_loss is {train.target_eval_loss}", train.target_eval_loss is None,
         "which evaluates rewards"),
    ):  # fmt: skip
        require(wanted, f"{given} and objective.name is {name}, {why}: remove it.")


def _check_staleness(config: RunConfig) -> None:
    """Refuses a limit that the last steps of each buffer exceed, so that they would train on nothing."""
    rollout, iterations = config.rollout, config.objective.num_iterations
    steps = rollout.steps_per_generation * iterations
    oldest = (2 if rollout.overlap else 1) * steps - 1
    ahead = " and rollout.overlap true" if rollout.overlap else ""
    require(
        rollout.max_staleness is None or oldest <= rollout.max_staleness,
        f"rollout.max_staleness is {rollout.max_staleness}, and with rollout.steps_per_generation "
        f"{rollout.steps_per_generation}, objective.num_iterations {iterations}{ahead} the last step on a generation "
        f"batch is {oldest} behind the weights that sampled it, and would train on nothing: set rollout.max_staleness "
        f"to {oldest} or more, or train fewer steps on a batch.",
    )


def _check_teachers(config: RunConfig) -> None:
    """Refuses options that cannot be combined with teachers."""
    teachers = config.distillation.teachers
    servers = [field for field in changed(config.distillation) if field.name in ("server_kind", "server_timeout")]
    require(
        not servers or any(map(is_server, teachers)),
        f"distillation.{servers[0].name if servers else ''} is set and distillation.teachers has no address of a "
        "server: remove it, or name a server.",
    )
    _check_whole(config)
    if not teachers:
        return
    require(
        not config.rollout.drop_uniform_groups,
        "rollout.drop_uniform_groups is true, but completions with the same rewards still learn from "
        "distillation.teachers: remove it.",
    )
    loss = config.objective.loss_type
    require(
        loss != "vespo",
        f"objective.loss_type is {loss}, which weighs whole completions by the sign of their advantage, and "
        "distillation.teachers gives advantages to single tokens: choose another loss, such as dapo.",
    )
    require(
        config.rollout.temperature == 1 or not any(map(is_server, teachers)),
        f"rollout.temperature is {config.rollout.temperature} and distillation.teachers has a server, which gives the "
        "log-probabilities of prompts at temperature 1: set rollout.temperature to 1, or name a folder.",
    )
    require(
        BASE not in teachers or (config.lora.rank > 0 and not config.trainable and config.lora.init_from is None),
        "distillation.teachers has base, the model without its adapters, and the run has none, starts from trained "
        "ones, or trains more than them: name the folder of a model instead.",
    )


def _check_whole(config: RunConfig) -> None:
    """Refuses options that cannot be combined with the whole distributions of teachers, and such without them."""
    options, objective = config.distillation, config.objective
    given = [field.name for field in changed(options) if field.name in OF_DISTRIBUTIONS]
    if not options.whole:
        require(
            not given,
            f"distillation.{given[0] if given else ''} is set and distillation.whole is false, so that policy "
            "gradients are taken: remove it, or set distillation.whole to true.",
        )
        return
    wrong = next((one for one in options.teachers if one == BASE or is_server(one)), None)
    require(
        bool(options.teachers) and wrong is None,
        f"distillation.whole is true and distillation.teachers {'is []' if wrong is None else f'has {wrong}'}, but "
        "whole distributions are those of models on the run's devices: name the folders of such.",
    )
    require(
        not config.rollout.rewards and options.discount == 0 and objective.divergence_weight == 0,
        "distillation.whole is true, and rewards, objective.beta and distillation.discount belong to policy gradients: "
        "set rollout.rewards to [], and remove the others.",
    )
    require(
        config.rollout.mismatch != "correct",
        "distillation.whole is true and rollout.mismatch is correct, but there are no importance weights in the "
        "divergence of whole distributions: set rollout.mismatch to warn or stop.",
    )
    unused = next((f"objective.{one.name}" for one in changed(objective) if one.name not in _WITH_WHOLE), None)
    if options.remainder != "renormalize":
        unused = "distillation.remainder"
    require(
        unused is None,
        f"distillation.whole is true and {unused} is set, but its loss is the mean divergence of sampled tokens: "
        f"remove {unused}.",
    )


def _check_server(config: RunConfig) -> None:
    """Refuses options that a completion server does not support, and server options without a server."""
    rollout = config.rollout
    if rollout.server is None:
        require(
            not rollout.overlap,
            "rollout.overlap is true and rollout.server is not set, but the engine samples on the devices that train, "
            "so that nothing would overlap: name a server, or set rollout.overlap to false.",
        )
        server = (
            "server_kind",
            "server_model",
            "server_timeout",
            "adapter_dir",
            "mismatch",
            "mismatch_bound",
            "check_delivery",
            "router_replay",
        )
        options = (field for field in fields(rollout) if field.name in server)
        given = next((field.name for field in options if getattr(rollout, field.name) != field.default), None)
        require(
            given is None,
            f"rollout.{given} is set and rollout.server is not, without which the engine samples: remove it, or name a "
            "server.",
        )
        return
    for given, wanted in (
        (f"lora.rank is {config.lora.rank}", config.lora.rank > 0),
        ("lora.dora is true", not config.lora.dora),
        ("lora.bias is true", not config.lora.bias),
        ("lora.merge_aware is true", not config.lora.merge_aware),
    ):
        require(
            wanted,
            f"{given} and rollout.server is set, which loads plain adapters and nothing else: train such adapters, or "
            "remove rollout.server, so that the engine samples.",
        )
