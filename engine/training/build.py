"""Builds the objects that train from a configuration: model, optimizer and step, on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.checkpoint.verification import checked_together
from engine.config.rules import data_parallel_size, gradient_accumulation_steps
from engine.config.run import RunConfig
from engine.distributed.mesh import Mesh, build_mesh
from engine.distributed.ranks import RankGrid
from engine.layers.shared_base import SharedBase
from engine.layers.storage import WeightPlacement
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.objectives.build import build_objective
from engine.objectives.objective import Objective
from engine.optim.adamw import FlatAdamW
from engine.optim.reduce import GradientReducer
from engine.runtime.launch import Launch
from engine.seams import resolve
from engine.telemetry.log import Log
from engine.training.base_encoding import fill_base
from engine.training.build_optimizer import (
    bucket_bytes,
    build_flat,
    build_loss_scale,
    build_optimizer,
    host_places,
    weight_placement,
)
from engine.training.build_stages import build_stages
from engine.training.device_choices import choose_for_device
from engine.training.rank_stages import Stages
from engine.training.start_model import ModelPlan, ModelSource
from engine.training.step import TrainStep
from engine.training.weights import fill_parameters

if TYPE_CHECKING:
    from engine.training.cuda_graph.build import Graphs


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A model ready to train on this rank."""

    source: ModelSource
    plan: ModelPlan
    mesh: Mesh
    parts: tuple[Decoder, ...]
    """The model, or under pipeline parallelism this rank's parts of it."""
    optimizer: FlatAdamW
    stages: Stages
    objective: Objective
    reducer: GradientReducer
    step: TrainStep
    weights: WeightPlacement
    graphs: Graphs | None = None
    """What the loop calls in place of `step`, where graphs are asked for."""


def build_training(
    config: RunConfig,
    launch: Launch,
    source: ModelSource,
    plan: ModelPlan,
    log: Log,
    *,
    documents_per_row: int | None = None,
    mesh: Mesh | None = None,
    base: SharedBase | None = None,
    objective: Objective | None = None,
) -> Training:
    """Builds the model with its weights, the optimizer and the step.

    Collective: every rank calls it. Freshly initialised or loaded; a checkpoint of the run is loaded on top by
    `engine.training.state`.

    Args:
        documents_per_row: most documents in any row of the training data; graphs are sized by it.
        mesh: of `run_mesh`, where it has been made already.
        base: the frozen weights, where several models read them; None where this one has its own.
        objective: in place of the configuration's; None for that.
    """
    decoder = source.model.decoder
    mesh = mesh or run_mesh(config, launch, decoder)
    choices = choose_for_device(config, launch.device, decoder, source.formats)
    places = host_places(config.memory, launch.device)
    weights = weight_placement(config, mesh, places.weights)
    loss_scale = build_loss_scale(config, launch.device)
    objective = objective or build_objective(config, cp=mesh.cp, dp=mesh.dp)
    stages = build_stages(
        config,
        launch,
        plan,
        choices,
        mesh,
        decoder=decoder,
        weights=weights,
        objective=objective,
        loss_scale=loss_scale,
        base=base,
        log=log,
    )
    entries = stages.entries()
    flat = build_flat(config, launch.device, entries, mesh, weights, places, lr_factor=plan.lr_factor, log=log)
    reads = base is None or not base.is_filled
    with checked_together([] if source.weights is None else [source.weights.checks], mesh.world, learn=reads):
        filled = entries if reads else [one for one in entries if one.sink is not None]
        fill_parameters(config, source, plan, filled, flat, weights, mesh, log)
        if reads:
            checkpoint = source.weights
            fill_base(config, source.model, checkpoint, stages.models(), weights, log, checkpoint=checkpoint)
    if base is not None:
        base.is_filled = True
    optimizer = build_optimizer(config.optim, flat, mesh, choices.optimizer, loss_scale)
    if config.objective.reference_sync_steps is not None:
        optimizer.reference = flat.state()
    reducer = GradientReducer(flat, mesh, bucket_bytes=bucket_bytes(config))
    step = TrainStep(stages, reducer, optimizer, mesh)
    graphs = _graphs(config, launch, mesh, stages, step, documents_per_row, log)
    return Training(
        source=source,
        plan=plan,
        mesh=mesh,
        parts=stages.models(),
        optimizer=optimizer,
        stages=stages,
        objective=objective,
        reducer=reducer,
        step=step,
        weights=weights,
        graphs=graphs,
    )


def run_mesh(config: RunConfig, launch: Launch, decoder: DecoderConfig) -> Mesh:
    """Makes the run's process groups. Collective."""
    grid = RankGrid(
        tp=config.parallel.tensor,
        cp=config.parallel.context,
        dp=data_parallel_size(config, launch.world_size),
        pp=config.parallel.pipeline,
        ep=config.parallel.expert,
        shards_experts=config.parallel.shards_experts,
    )
    return build_mesh(grid, device_type=launch.device.type, num_kv_heads=decoder.num_kv_heads)


def _graphs(
    config: RunConfig,
    launch: Launch,
    mesh: Mesh,
    stages: Stages,
    step: TrainStep,
    documents_per_row: int | None,
    log: Log,
) -> Graphs | None:
    """Builds and logs the graphs that replay the step, where graphs are asked for."""
    if config.memory.cuda_graph == "none":
        return None
    graphs: Graphs = resolve("engine.training.cuda_graph.build:build_graphs")(
        config,
        step,
        stages,
        device=launch.device,
        num_microbatches=gradient_accumulation_steps(config, launch.world_size),
        data_ranks=mesh.dp_cp.size,
        most_documents=documents_per_row,
    )
    log.info(resolve("engine.training.cuda_graph.build:graphs_sentence")(graphs))
    return graphs
