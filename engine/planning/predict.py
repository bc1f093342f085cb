"""Predicts the memory of a configuration before it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.choices import STORED
from engine.config.distillation import BASE
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.layers.context import TrainingPlan
from engine.models.decoder_config import DecoderConfig
from engine.models.dtypes import TORCH_DTYPES
from engine.ops.backends import backend_name
from engine.ops.encoded_weight import Formats
from engine.planning.memory_plan import memory_plan_of
from engine.planning.peak import PeakEstimate, fullest, predict_layout
from engine.planning.rank_layout import Companion, Layout, Routing, Samples, Workload
from engine.planning.shared_rows import AlikeDocuments, RowSharing
from engine.seams import resolve


def workload_of(
    config: RunConfig,
    decoder: DecoderConfig,
    plan: TrainingPlan,
    *,
    device_type: str,
    prompt: int | None = None,
    completion: int | None = None,
    sharing: RowSharing | None = None,
    stored: Formats | None = None,
) -> Workload:
    """Returns what a configuration trains.

    Args:
        config: of the run.
        decoder: of its model.
        plan: its modules' adapters and trained weights; see engine.training.module_plan.
        device_type: "cuda" or "cpu".
        prompt, completion: as of `samples_of`; of answers that are compared, `prompt` are the tokens of their question.
        sharing: whether rows compute the beginnings of documents once, see engine.training.prefixes; None for not.
        stored: name of a weight -> its format in the model's checkpoint; read where model.base_dtype is stored.

    Raises:
        UserError: a backend that is not known, or completions that do not fit a row.
    """
    objective, samples = config.objective, samples_of(config, prompt=prompt, completion=completion)
    rows, row, document = config.train.global_batch_size, config.row_length, config.data.seq_length
    if samples is not None and config.data.packing is True:
        rows, document = -(-rows // max(1, row // samples.tokens)), samples.tokens
    elif samples is not None:
        row = document = samples.tokens
    alike = None if sharing is None else _alike(config, sharing, samples, prompt)
    kernels = backend_name(config.model.kernels, device_type=device_type, dtype=config.model.dtype)
    optimizer = config.optim.backend
    native = optimizer == "native" or (optimizer == "auto" and device_type == "cpu")
    distils = objective.name == "distillation" or config.distillation.whole
    whole = bool(config.distillation.teachers)
    return Workload(
        decoder=decoder,
        plan=plan,
        dtype=TORCH_DTYPES[config.model.dtype],
        micro_batch=config.train.micro_batch_size,
        global_batch=rows,
        seq_length=row,
        tiles=usual_tiles(decoder, config.train.micro_batch_size),
        longest_document=document,
        answers=config.train.micro_batch_size * objective.kind.answers,
        refers_to_base=objective.compared_with == "base",
        balances=config.train.router_aux_loss_coef > 0,
        base_dtype=config.model.base_dtype,
        rounds_inputs=config.model.base_products == "codes",
        stored=stored if config.model.base_dtype == STORED else None,
        device_type=device_type,
        kernels=kernels,
        polls_sends=device_type == "cuda",
        square_sum_writes=not native,
        offload_weights=config.memory.offload_weights,
        offload_optimizer=config.memory.offload_optimizer,
        packed=config.data.fills_rows or objective.kind.group > 1,
        samples=samples,
        companions=_companions(config),
        base_teachers=0 if objective.kind.companions is None else config.distillation.teachers.count(BASE),
        teaches_each_step=config.distillation.whole,
        block_losses=0 if not distils else _WHOLE_BLOCKS if whole else _STORED_BLOCKS,
        keeps_outputs=distils and whole,
        graphed=config.memory.cuda_graph != "none",
        alike=alike,
    )


def _alike(
    config: RunConfig, sharing: RowSharing, samples: Samples | None, prompt: int | None
) -> AlikeDocuments | None:
    """Returns the documents of a step that begin alike, as far as is known: completions of a prompt, where no
    environment makes another one of each; answers to a question of so many tokens."""
    rows, kind = config.train.global_batch_size, config.objective.kind
    room: dict[str, Any] = {
        "sharing": sharing, "capacity": config.row_length, "packing": config.data.packing is True
    }  # fmt: skip
    if samples is not None:
        options, members = samples.options, samples.options.num_generations
        if options.environment is not None or options.agent is not None or rows % members:
            return None
        return AlikeDocuments(
            groups=rows // members, members=members, common=samples.prompt, own=samples.completion, **room
        )
    longest = config.data.seq_length
    if kind.group == 1 or prompt is None or prompt >= longest:
        return None
    return AlikeDocuments(groups=rows, members=kind.group, common=prompt, own=longest - prompt, is_sample=True, **room)


_STORED_BLOCKS, _WHOLE_BLOCKS = 6, 12
"""Wide copies of a block of logits that the losses of `engine.distillation.losses` make at most, of stored tokens and
of whole distributions: logits, log-probabilities, probabilities and gradients, at the temperature too, and of both
models."""


def _companions(config: RunConfig) -> tuple[Companion, ...]:
    """Returns the frozen models beside the one that is trained."""
    named = config.objective.kind.companions
    return () if named is None else tuple(resolve(named)(config))


def samples_of(config: RunConfig, *, prompt: int | None = None, completion: int | None = None) -> Samples | None:
    """Returns the completions that a configuration samples; None where it samples none.

    Args:
        config: of the run.
        prompt, completion: tokens of each prompt and completion; None for the most that there may be.

    Raises:
        UserError: they do not fit a row, or the limit of completions.
    """
    objective, rollout = config.objective, config.rollout
    if objective.kind.predictor is None:
        return None
    most, row = rollout.max_completion_length, config.data.seq_length
    completion = most if completion is None else completion
    prompt = row - completion if prompt is None else prompt
    if completion > most or prompt + completion > row:
        raise UserError(
            f"prompts of {prompt} and completions of {completion} tokens were given, but data.seq_length is {row} and "
            f"rollout.max_completion_length {most}: give fewer."
        )
    steps = rollout.steps_per_generation * objective.num_iterations
    return Samples(
        predictor=objective.kind.predictor,
        options=rollout,
        prompt=prompt,
        completion=completion,
        batch=config.train.global_batch_size * rollout.steps_per_generation,
        steps=steps,
        compared=steps > 1 or rollout.server is not None,
        entropies=objective.entropy_use,
        moves_reference=objective.reference_sync_steps is not None,
        seed=config.train.seed,
        neighbour=None if objective.kind.neighbour is None else resolve(objective.kind.neighbour)(rollout),
    )


def usual_tiles(decoder: DecoderConfig, count: int) -> tuple[tuple[int, ...], ...]:
    """Returns so many tiles of the size that most images are cut into; none for a model of text alone."""
    return (decoder.fronts[0].usual_tile,) * count if decoder.fronts else ()


def predict_peak(
    config: RunConfig,
    decoder: DecoderConfig,
    plan: TrainingPlan,
    *,
    world_size: int = 1,
    pipeline_rank: int | None = None,
    device_type: str = "cuda",
    routing: Routing = "balanced",
    stored: Formats | None = None,
) -> PeakEstimate:
    """Predicts the peak memory of a rank.

    Rows are taken to be as long as data.seq_length and to hold one document each; shorter ones need less.

    Args:
        config: of the run, checked.
        decoder: of its model.
        plan: its modules' adapters and trained weights; see engine.training.module_plan.
        world_size: number of ranks.
        pipeline_rank: the rank to predict; None for the one with the highest peak.
        device_type: "cuda" or "cpu".
        routing: how tokens choose among experts that are divided over ranks.
        stored: as of `workload_of`.

    Raises:
        UserError: the model or the batch does not fit the layout.
    """
    layout = Layout(parallel=config.parallel, data=max(1, world_size // config.parallel.model_parallel_size))
    workload = replace(workload_of(config, decoder, plan, device_type=device_type, stored=stored), routing=routing)
    estimates = predict_layout(workload, layout, memory_plan_of(config))
    if pipeline_rank is not None:
        return estimates[pipeline_rank]
    return fullest(estimates)
