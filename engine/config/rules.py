"""Rules between sections: one function each, whose error names the values that clash and the remedy.

`check_config` runs those that need the configuration alone, `check_files` checks that the given paths exist, and
`check_world` runs those that need the number of ranks. None of them changes anything.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path

from engine.choices import MERGED_DTYPES, SCALED_DTYPES, STORED
from engine.config.checks import require
from engine.config.data import split_mix
from engine.config.distillation import BASE, is_server
from engine.config.hub import DATA_PREFIX, instead_of
from engine.config.matching import matches_target
from engine.config.option import changed
from engine.config.rollout import IN_PROGRAM, NamedObject
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.seams import resolve
from engine.sentences import listed


def check_config(config: RunConfig) -> None:
    """Checks every rule that needs no more than the configuration.

    Raises:
        UserError: two values clash.
    """
    check_pairs(config)
    check_cuda_graph(config)
    check_warmup(config)
    check_evaluation(config)
    check_objective(config)


def check_world(config: RunConfig, world_size: int) -> None:
    """Checks every rule that needs the number of ranks.

    Raises:
        UserError: the layout does not fit `world_size` ranks, or rows or the batch do not fit the layout.
    """
    check_layout(config, world_size)
    check_expert_layout(config, world_size)
    check_sequence_split(config)
    check_context_split(config)
    check_batch(config, world_size)


def check_files(config: RunConfig, supplied: Container[str] = ()) -> None:
    """Checks that the paths that the run reads exist; their content is not read.

    Args:
        supplied: texts in options that are no paths, but name a source of records, or a function of a program.

    Raises:
        UserError: a path does not exist.
    """
    _require_folder("model.path", config.model.path, "a Hugging Face or partitioned checkpoint")
    require(
        config.data.train is not None or config.rollout.has_tasks,
        "data.train is not set, but training needs samples: give the path of a .jsonl, .json, .csv, .parquet or .txt "
        "file, or hub:OWNER/NAME.",
    )
    _require_file("data.train", config.data.train, supplied)
    _require_file("data.validation", config.data.validation, supplied)
    for source in config.rollout.reward_sources:
        require(
            source.file is None or Path(source.file).is_file(),
            f"rollout.rewards has {source.file}:{source.function}, and {source.file} is not a file: give the path of "
            "a Python file, or the name of a reward that is built in.",
        )
        if source.is_model:
            _require_folder("the path of a model in rollout.rewards", source.argument, "a reward model")
        require(
            not source.in_program or f"{IN_PROGRAM}{source.function}" in supplied,
            f"rollout.rewards has {IN_PROGRAM}{source.function}, a function of a Python program: give it in that "
            "program, as train(config, rewards=[...]), or name a file, as FILE.py:NAME.",
        )
    for teacher in config.distillation.teachers:
        if teacher != BASE and not is_server(teacher):
            _require_folder("distillation.teachers", teacher, "a model, of a PEFT adapter or of a run")
    for option, text in config.rollout.named_programs:
        named = NamedObject.parse(option, text)
        file = named.file
        require(
            named.server is not None
            or (named.is_package and file is None)
            or (text in supplied if file is None else Path(file).is_file()),
            f"{option} has {text}, a function or class of a Python program: give it in that program, as "
            "train(config, tools=[...]), or name a file, as FILE.py:NAME."
            if file is None
            else f"{option} has {text}, and {file} is not a file: give the path of a Python file.",
        )
    for entry in config.data.mix:
        _require_file("a path of data.mix", split_mix(entry)[0], supplied)
    tokenizer = config.data.tokenizer
    if tokenizer is not None and not Path(tokenizer).exists():
        kind = "give the folder or .model file of a tokenizer, or null to take the one in model.path"
        raise UserError(f"data.tokenizer is {tokenizer}, which does not exist{instead_of(tokenizer, kind)}.")
    if config.lora.init_from is not None:
        _require_folder("lora.init_from", config.lora.init_from, "a PEFT adapter")
    if config.checkpoint.resume_path is not None:
        _require_folder("checkpoint.resume", config.checkpoint.resume_path, "a run or a checkpoint, auto or none")


def data_parallel_size(config: RunConfig, world_size: int) -> int:
    """Returns the number of data-parallel copies of the model on `world_size` ranks.

    Raises:
        UserError: the ranks do not divide into copies.
    """
    check_layout(config, world_size)
    return world_size // config.parallel.model_parallel_size


def gradient_accumulation_steps(config: RunConfig, world_size: int) -> int:
    """Returns the number of micro-batches of each rank in one optimizer step.

    Raises:
        UserError: the batch does not divide.
    """
    check_batch(config, world_size)
    return config.train.global_batch_size // (config.train.micro_batch_size * data_parallel_size(config, world_size))


def check_pairs(config: RunConfig) -> None:
    """Refuses options of two sections that exclude each other."""
    model, lora, parallel, memory = config.model, config.lora, config.parallel, config.memory
    adapts, synthetic = lora.rank > 0, config.train.synthetic_steps
    clashes: list[tuple[bool, str]] = [
        (model.kernels == "native" and model.dtype not in ("float32", "bfloat16"),
         f"model.kernels is native and model.dtype is {model.dtype}, but the compiled CPU kernels read float32 and "
         "bfloat16: set model.dtype to one of these, or model.kernels to auto or reference."),
        (not adapts and not config.trainable,
         "lora.rank is 0 and trainable is [], so nothing would be trained: set lora.rank to for example 16, or "
         'trainable to for example ["*"].'),
        (adapts and not lora.targets,
         f"lora.rank is {lora.rank} and lora.targets is [], so the adapters have nowhere to sit: name targets such as "
         "[q_proj, v_proj], or set lora.rank to 0."),
        (lora.init_from is not None and not adapts,
         f"lora.init_from is {lora.init_from} and lora.rank is 0, but an adapter needs a rank: set lora.rank to that "
         "of the adapter, or lora.init_from to null."),
        _fused_clash(config, "qkv", "q_proj", "k_proj", "v_proj"),
        _fused_clash(config, "gate_up", "gate_proj", "up_proj"),
        (model.base_dtype == STORED and model.init == "random",
         "model.base_dtype is stored and model.init is random, but weights that are drawn are not stored: set "
         "model.base_dtype to one that encodes, or model.init to checkpoint."),
        (adapts and lora.dora and model.base_dtype is not None,
         f"lora.dora is true and model.base_dtype is {model.base_dtype}, but DoRA needs the lengths of the base's "
         "rows, which are not known of encoded weights: set model.base_dtype to null, or lora.dora to false."),
        (lora.merge_aware and not adapts,
         "lora.merge_aware is true and lora.rank is 0, so that there is nothing to merge: set lora.rank to for example "
         "16, or lora.merge_aware to false."),
        (model.base_products == "codes" and model.base_dtype not in SCALED_DTYPES,
         f"model.base_products is codes and model.base_dtype is {model.base_dtype or 'null'}, where there is no such "
         f"product to choose: set model.base_dtype to one of {listed(SCALED_DTYPES)}, or model.base_products to "
         "decoded."),
        (model.base_products == "codes" and lora.merge_aware,
         "model.base_products is codes and lora.merge_aware is true, which multiplies by numbers that are rounded in "
         "each step: set model.base_products to decoded, or lora.merge_aware to false."),
        (lora.merge_aware and model.base_dtype not in MERGED_DTYPES,
         f"lora.merge_aware is true and model.base_dtype is {model.base_dtype or 'null'}, which is no format that a "
         f"merged checkpoint is written in: set model.base_dtype to one of {listed(MERGED_DTYPES)}, or "
         "lora.merge_aware to false."),
        (parallel.lora_reduce != "local" and parallel.sequence_parallel,
         f"parallel.lora_reduce is {parallel.lora_reduce} and sequence parallelism is on (parallel.tensor "
         f"{parallel.tensor}), which has a reduction of its own: set parallel.sequence to false, or "
         "parallel.lora_reduce to local."),
        (memory.activation_dtype == "bfloat16" and model.dtype != "float32",
         f"memory.activation_dtype is bfloat16 and model.dtype is {model.dtype}, so that activations would be kept as "
         "they are: set memory.activation_dtype to float8 or null."),
        (memory.offload_weights and parallel.shard == "parameters",
         "memory.offload_weights is true and parallel.shard is parameters, which keeps the weights on the other ranks "
         "already: set parallel.shard to gradients, or memory.offload_weights to false."),
        (synthetic > 0 and not config.objective.kind.synthetic,
         f"train.synthetic_steps is {synthetic} and objective.name is {config.objective.name}, but there are no "
         "made-up answers: set train.synthetic_steps to 0."),
        (synthetic > 0 and memory.cuda_graph != "none" and config.data.packing != "concatenate",
         f"train.synthetic_steps is {synthetic} and memory.cuda_graph is {memory.cuda_graph}, whose size depends on "
         "the documents in a row, which are not known before the data is read: set data.packing to concatenate, or "
         "train.synthetic_steps to 0."),
    ]  # fmt: skip
    _refuse(clashes)


def _fused_clash(config: RunConfig, option: str, *parts: str) -> tuple[bool, str]:
    """Returns whether one adapter is wanted for several modules of which some are no targets."""
    lora = config.lora
    missing = [name for name in parts if not matches_target(name, lora.targets)] if lora.rank else []
    return (
        lora.fused in (option, "all") and 0 < len(missing) < len(parts),
        f"lora.fused is {lora.fused} and lora.targets lacks {', '.join(missing)}, but one adapter for "
        f"{', '.join(parts)} needs all of them: add them to lora.targets, or set lora.fused to none.",
    )


def _refuse(clashes: Iterable[tuple[bool, str]]) -> None:
    """Raises UserError with the sentence of the first clash that is one."""
    for clash, sentence in clashes:
        require(not clash, sentence)


def check_cuda_graph(config: RunConfig) -> None:
    """Refuses options that cannot be combined with CUDA graphs: a replay has fixed shapes and launches, and no host
    decisions.
    """
    graph, parallel, memory = config.memory.cuda_graph, config.parallel, config.memory
    if graph == "none":
        return
    layer, step = graph == "layer", graph == "step"
    clashes = (
        (not config.data.fills_rows, "data.packing is false, so that rows are as long as their longest sample and "
         "change from step to step: set data.packing to true"),
        (parallel.context > 1, f"parallel.context is {parallel.context}, where the host plans for each micro-batch "
         "which tokens meet: set parallel.context to 1"),
        (memory.offload_activations, "memory.offload_activations is true, whose copies to host memory wait for events "
         "outside of a graph: set memory.offload_activations to false"),
        (memory.offload_weights, "memory.offload_weights is true, where weights come and go between layers: set "
         "memory.offload_weights to false"),
        (memory.offload_optimizer, "memory.offload_optimizer is true, whose copies to host memory wait for events "
         "outside of a graph: set memory.offload_optimizer to false"),
        (step and parallel.pipeline > 1, f"parallel.pipeline is {parallel.pipeline}, whose sends and receives both "
         "ends would have to capture and replay together: set memory.cuda_graph to layer"),
        (layer and parallel.schedule in ("zb_h1", "zb_v"), f"parallel.schedule is {parallel.schedule}, which puts "
         "weight gradients off in a list on the host: set parallel.schedule to 1f1b or interleaved"),
        (layer and memory.recompute in ("attention", "full"), f"memory.recompute is {memory.recompute}, whose second "
         "run is captured only within a whole step: set memory.recompute to selective, or memory.cuda_graph to step"),
        (layer and memory.activation_dtype is not None, f"memory.activation_dtype is {memory.activation_dtype}, which "
         "is done around the layers and not in their graphs: set memory.activation_dtype to null, or memory.cuda_graph "
         "to step"),
        (parallel.shard != "none", f"parallel.shard is {parallel.shard}, where updated weights arrive while the next "
         "step computes and memory comes and goes: set parallel.shard to none"),
    )  # fmt: skip
    _refuse(
        (clash, f"memory.cuda_graph is {graph} and {sentence}, or memory.cuda_graph to none.")
        for clash, sentence in clashes
    )


def check_warmup(config: RunConfig, epoch_steps: int | None = None) -> None:
    """Refuses a warm-up that is longer than the run.

    Args:
        epoch_steps: steps of the run's epochs, once the data is known; None before.
    """
    train = config.train
    steps = epoch_steps if train.steps is None else train.steps
    given = f"train.steps is {steps}"
    if train.num_epochs is not None:
        given = f"train.epochs is {train.num_epochs:g}, which is {steps} step{'' if steps == 1 else 's'}"
    require(
        steps is None or config.optim.warmup_steps <= steps,
        f"optim.warmup_steps is {config.optim.warmup_steps} and {given}, so the learning rate would never be reached: "
        f"set optim.warmup_steps to {steps} or less, or take more steps.",
    )


def check_evaluation(config: RunConfig) -> None:
    """Refuses evaluations without samples, and options that depend on evaluations that never run."""
    train, evaluates = config.train, config.data.evaluates
    first, every = train.eval_first, train.eval_every
    target, patience, delta = train.target_eval_loss, train.early_stopping_patience, train.early_stopping_min_delta
    judged = config.checkpoint.keep_best and config.checkpoint.judges_by_validation
    without = (
        (every > 0, f"train.eval_every is {every}", "so there is nothing to evaluate", "train.eval_every to 0"),
        (target is not None, f"train.target_eval_loss is {target}", "so that the target could never be reached",
         "train.target_eval_loss to null"),
        (judged, "checkpoint.keep_best is true", "so that no checkpoint is better than another",
         "checkpoint.keep_best to false"),
    )  # fmt: skip
    _refuse(
        (
            wanted and not evaluates,
            f"{given} and data.validation is not set, {why}: set data.validation to a file, or data.validation_split "
            f"to a share of the training data, or {instead}.",
        )
        for wanted, given, why, instead in without
    )
    _check_tasks(config)
    first_would_do = f"a multiple of {every}" if every else "null"
    clashes = [
        (first is not None and (every == 0 or first % every != 0),
         f"train.eval_first is {first} and train.eval_every is {every}, but the first evaluation is one of those of "
         f"train.eval_every: set train.eval_first to {first_would_do}."),
        (patience is not None and every == 0,
         f"train.early_stopping_patience is {patience} and train.eval_every is 0, so that there are no evaluations to "
         "stop after: set train.eval_every to for example 50, or train.early_stopping_patience to null."),
        (patience is None and delta != 0,
         f"train.early_stopping_min_delta is {delta:g} and train.early_stopping_patience is null, so that nothing "
         "would stop early: set train.early_stopping_patience to for example 3, or remove "
         "train.early_stopping_min_delta."),
    ]  # fmt: skip
    _refuse(clashes)


def _check_tasks(config: RunConfig) -> None:
    """Refuses options about tasks where none is evaluated."""
    for field in changed(config.evaluation):
        require(
            bool(config.evaluation.tasks),
            f"evaluation.{field.name} is set and evaluation.tasks is empty, so that nothing is evaluated: name tasks, "
            f"or remove evaluation.{field.name}.",
        )
    best = config.checkpoint.best
    require(
        best == "loss" or not config.checkpoint.judges_by_validation or config.objective.kind.samples,
        f"checkpoint.best is {best} and objective.name is {config.objective.name}, whose evaluations sample nothing: "
        "set checkpoint.best to loss, or to TASK/METRIC of evaluation.tasks.",
    )
    require(
        config.checkpoint.judges_by_validation or bool(config.evaluation.tasks),
        f"checkpoint.best is {best} and evaluation.tasks is empty, so that there is no such figure: add "
        f"{best.partition('/')[0]} to evaluation.tasks, or set checkpoint.best to loss.",
    )


def check_objective(config: RunConfig) -> None:
    """Refuses options that cannot be combined with the objective, and sections that belong to another one."""
    objective = config.objective
    if objective.kind.rules is not None:
        resolve(objective.kind.rules)(config)
    for section, owners in (("rollout", "grpo"), ("distillation", "distillation, or to grpo with rollouts")):
        for field in changed(getattr(config, section)):
            require(
                section in objective.kind.sections,
                f"{section}.{field.name} is set and objective.name is {objective.name}, to which it does not belong: "
                f"remove it, or set objective.name to {owners}.",
            )


def check_sequence_split(config: RunConfig) -> None:
    """Refuses micro-batches whose tokens do not divide evenly over tensor ranks that each take a part of them."""
    parallel, rows, length = config.parallel, config.train.micro_batch_size, config.row_length
    tensor = parallel.tensor
    how, less = ("with sequence parallelism", "set parallel.sequence to false")
    if not parallel.sequence_parallel:
        how, less = ("before whole experts", f"set parallel.expert_tensor to {tensor}")
    require(
        not parallel.divides_tokens or parallel.context > 1 or rows * length % tensor == 0,
        f"data.seq_length {config.data.seq_length} and train.micro_batch_size {rows} make {rows * length} tokens, "
        f"which do not divide over parallel.tensor {tensor} {how}: make data.seq_length a multiple of {tensor}, or "
        f"{less}.",
    )


def check_context_split(config: RunConfig) -> None:
    """Refuses rows that do not divide into two pieces per context rank, with as many tokens on each tensor rank."""
    context, length = config.parallel.context, config.row_length
    if context == 1:
        return
    unit = 2 * context * (config.parallel.tensor if config.parallel.divides_tokens else 1)
    require(
        length >= 2 * context and (length % unit == 0 or not config.parallel.divides_tokens),
        f"data.seq_length {config.data.seq_length} makes rows of {length} tokens, and parallel.context {context} with "
        f"parallel.tensor {config.parallel.tensor} divides each row into {unit} pieces: make data.seq_length a "
        f"multiple of {unit}.",
    )


def check_layout(config: RunConfig, world_size: int) -> None:
    """Refuses a number of ranks that does not divide into whole copies of the model."""
    size = config.parallel.model_parallel_size
    splits = [f"parallel.{name}" for name in ("tensor", "pipeline", "context") if getattr(config.parallel, name) > 1]
    require(
        world_size % size == 0,
        f"The run has {world_size} rank{'s' if world_size != 1 else ''} and parallel.tensor "
        f"{config.parallel.tensor} x parallel.pipeline {config.parallel.pipeline} x parallel.context "
        f"{config.parallel.context} needs a multiple of {size}: start it with --nproc {size}, or change "
        f"{' or '.join(splits)}.",
    )


def check_expert_layout(config: RunConfig, world_size: int) -> None:
    """Refuses a number of ranks over which experts do not divide."""
    parallel = config.parallel
    ranks = world_size // parallel.pipeline // (parallel.tensor if parallel.shards_experts else 1)
    of = "data and context" if parallel.shards_experts else "data, context and tensor"
    require(
        ranks % parallel.expert == 0,
        f"parallel.expert is {parallel.expert}, but a pipeline stage has {ranks} {of} parallel "
        f"rank{'s' if ranks != 1 else ''} to divide experts over: use a parallel.expert that divides {ranks}.",
    )


def check_batch(config: RunConfig, world_size: int) -> None:
    """Refuses a global batch that does not divide into micro-batches on every data-parallel rank."""
    copies = data_parallel_size(config, world_size)
    micro, whole = config.train.micro_batch_size, config.train.global_batch_size
    unit = micro * copies
    nearest = max(unit, whole - whole % unit)
    require(
        whole % unit == 0,
        f"train.global_batch_size is {whole}, which is not a multiple of train.micro_batch_size {micro} x {copies} "
        f"data-parallel rank{'s' if copies != 1 else ''}: use for example train.global_batch_size {nearest}.",
    )


def _require_folder(option: str, path: str, what: str) -> None:
    advice = "" if Path(path).is_dir() else instead_of(path, f"give the folder of {what}")
    require(Path(path).is_dir(), f"{option} is {path}, which is not a folder{advice}.")


def _require_file(option: str, path: str | None, supplied: Container[str]) -> None:
    require(
        path is None or not path.startswith(IN_PROGRAM) or path in supplied,
        f"{option} is {path}, records of a Python program: give them in that program, as train(config, data=...), or "
        "name a file.",
    )
    if (
        path is None
        or path in supplied
        or path.startswith(DATA_PREFIX)
        or Path(path).is_file()
        or (Path(path) / "manifest.json").is_file()
    ):
        return
    if all(Path(f"{path}{suffix}").is_file() for suffix in (".bin", ".idx")):
        return
    files = (
        "give the path of a .jsonl, .json, .csv, .parquet or .txt file, hub:OWNER/NAME, the folder of a token store, "
        "or a .bin that has its .idx beside it (with or without the ending)"
    )
    raise UserError(f"{option} is {path}, which is not a file{instead_of(path, files, 'dataset')}.")
