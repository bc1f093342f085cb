"""Builds the objects that train from a configuration: model, optimizer and step, on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.checkpoint.verification import checked_together
from engine.config.optim import OptimOptions
from engine.config.rules import data_parallel_size, gradient_accumulation_steps
from engine.config.run import RunConfig
from engine.distributed.mesh import Axis, Mesh, build_mesh
from engine.distributed.ranks import RankGrid
from engine.layers.context import TensorLayout
from engine.layers.host_copies import HostMemory
from engine.layers.storage import WeightPlacement
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.dtypes import TORCH_DTYPES
from engine.models.plain_torch import plain_torch_parts
from engine.objectives.build import build_objective
from engine.objectives.objective import Objective
from engine.optim.adamw import FlatAdamW
from engine.optim.backends import OptimizerBackend
from engine.optim.flat import FlatParameters
from engine.optim.loss_scale import LossScale
from engine.optim.reduce import GradientReducer
from engine.optim.state_sharding import Sharding
from engine.planning.memory_plan import memory_plan_of
from engine.runtime.launch import Launch
from engine.seams import resolve
from engine.telemetry.log import Log
from engine.training.base_encoding import fill_base
from engine.training.device_choices import DeviceChoices, choose_for_device
from engine.training.host_places import host_places, host_sentence
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.stage_layout import Partition
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
    step: TrainStep
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
) -> Training:
    """Builds the model with its weights, the optimizer and the step.

    Collective: every rank calls it. Freshly initialised or loaded; a checkpoint of the run is loaded on top by
    `engine.training.state`.

    Args:
        documents_per_row: most documents in any row of the training data; graphs are sized by it.
    """
    grid = _grid(config, launch.world_size)
    decoder = source.model.decoder
    mesh = build_mesh(grid, device_type=launch.device.type, num_kv_heads=decoder.num_kv_heads)
    choices = choose_for_device(config, launch.device, decoder)
    layout = _layout(config, mesh, plan.partition, choices)
    _log_choices(choices, decoder, log)
    places = host_places(config.memory, launch.device)
    weights = _placement(config, mesh, places.weights)
    objective = build_objective(config, cp=mesh.cp, dp=mesh.dp)
    loss_scale = _loss_scale(config, launch.device)
    balance = _load_balance(config, launch, decoder, mesh, loss_scale, log)
    stages = _build_stages(config, launch, decoder, plan, layout, mesh, weights, objective, loss_scale, balance)
    entries = stages.entries()
    flat = FlatParameters(
        entries,
        launch.device,
        sharding=_sharding(config, mesh, weights, log),
        host=places.state,
        lr_factor=plan.lr_factor,
    )
    if (sentence := host_sentence(places, weights, flat)) is not None:
        log.info(sentence)
    with checked_together([] if source.weights is None else [source.weights.checks], mesh.world, learn=True):
        fill_parameters(config, source, plan, entries, flat, weights, mesh, log)
        fill_base(config, source.model, source.weights, stages.models(), weights, log)
    optimizer = _optimizer(config.optim, flat, mesh, choices.optimizer, loss_scale)
    reducer = GradientReducer(flat, mesh, bucket_bytes=_bucket_bytes(config))
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
        step=step,
        graphs=graphs,
    )


def _grid(config: RunConfig, world_size: int) -> RankGrid:
    return RankGrid(
        tp=config.parallel.tensor,
        cp=config.parallel.context,
        dp=data_parallel_size(config, world_size),
        pp=config.parallel.pipeline,
        ep=config.parallel.expert,
        cuts_experts=config.parallel.cuts_experts,
    )


def _placement(config: RunConfig, mesh: Mesh, host: HostMemory | None) -> WeightPlacement:
    """Returns where weights wait: on other ranks, in host memory, or on the device."""
    if config.parallel.shard != "parameters":
        return WeightPlacement(Axis("dp_cp"), host=host)
    return WeightPlacement(mesh.dp_cp, host=host, expert_axis=mesh.edp)


def _loss_scale(config: RunConfig, device: torch.device) -> LossScale | None:
    """Returns the loss scale for float16, whose small gradients would underflow without it; else None."""
    if config.model.dtype != "float16":
        return None
    return LossScale(config.optim.loss_scale, config.optim.loss_scale_window, device)


def _load_balance(
    config: RunConfig, launch: Launch, decoder: DecoderConfig, mesh: Mesh, loss_scale: LossScale | None, log: Log
) -> Any:
    """Returns the auxiliary loss of routers, where the model has any and it is asked for."""
    if not decoder.num_experts:
        return None
    num_micro_batches = gradient_accumulation_steps(config, launch.world_size)
    build_balance = resolve("engine.experts.router_load:build_balance")
    return build_balance(config, decoder, mesh, launch.device, loss_scale, num_micro_batches, log.info)


def _optimizer(
    options: OptimOptions, flat: FlatParameters, mesh: Mesh, backend: OptimizerBackend, loss_scale: LossScale | None
) -> FlatAdamW:
    return FlatAdamW(
        flat,
        mesh,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        clip_grad_norm=options.clip_grad_norm,
        backend=backend,
        loss_scale=loss_scale,
    )


def _graphs(
    config: RunConfig,
    launch: Launch,
    mesh: Mesh,
    stages: Stages,
    step: TrainStep,
    documents_per_row: int | None,
    log: Log,
) -> Graphs | None:
    """Builds and logs what replays the step, where graphs are asked for."""
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


def _bucket_bytes(config: RunConfig) -> int:
    return int(config.parallel.bucket_mb * 2**20)


def _sharding(config: RunConfig, mesh: Mesh, weights: WeightPlacement, log: Log) -> Sharding:
    """Chooses and logs what of the optimizer is spread over ranks."""
    sharding = Sharding(
        level=config.parallel.shard,
        axis=mesh.dp_cp,
        expert_axis=mesh.edp,
        bucket_elements=max(1, _bucket_bytes(config) // 4),
        weights=weights,
    )
    if (sentence := sharding.sentence()) is not None:
        log.info(sentence)
    return sharding


def _layout(config: RunConfig, mesh: Mesh, partition: Partition, choices: DeviceChoices) -> TensorLayout:
    """Returns how this rank's tensors are laid out, and the arithmetic behind the layers."""
    # in a V the first and the last stage are on one rank and share one tensor
    ends_meet = partition.stage_rank[0] == partition.stage_rank[-1]
    return TensorLayout.over(
        mesh,
        pp_ends=Axis("pp_ends") if ends_meet else mesh.pp_ends,
        sequence_parallel=config.parallel.sequence_parallel,
        joint_reduce=config.parallel.lora_reduce == "joint",
        kernels=choices.attention.kernels,
        context_method=config.parallel.context_method,
        attention_blocks=choices.blocks,
        base=choices.base,
    )


def _log_choices(choices: DeviceChoices, decoder: DecoderConfig, log: Log) -> None:
    for sentence in choices.sentences:
        log.info(sentence)
    if (plain := plain_torch_parts(decoder)) is not None:
        log.warning(plain)


def _build_stages(
    config: RunConfig,
    launch: Launch,
    decoder: DecoderConfig,
    plan: ModelPlan,
    layout: TensorLayout,
    mesh: Mesh,
    weights: WeightPlacement,
    objective: Objective,
    loss_scale: LossScale | None,
    balance: Any,
) -> Stages:
    """Builds this rank's parts of the model, still empty, as stages."""
    partition, first_trained = plan.partition, plan.partition.choice.first_trainable_stage
    step = torch.zeros((), dtype=torch.int64, device=launch.device)
    memory = memory_plan_of(config)
    stages: dict[int, ModelStage] = {}
    embedding_weight = None
    for number, part in partition.parts(mesh.pp.rank).items():
        model = Decoder(
            decoder,
            layout=layout,
            plan=plan.modules,
            device=launch.device,
            dtype=TORCH_DTYPES[config.model.dtype],
            part=part,
            embedding_weight=embedding_weight,
            memory=memory,
            weights=weights,
        )
        if model.embedding is not None:
            embedding_weight = model.embedding.weight
        stages[number] = ModelStage(
            model,
            objective,
            launch.device,
            trains=number >= first_trained,
            gives_gradient=number > first_trained,
            step=step,
            loss_scale=None if loss_scale is None else loss_scale.value,
            balance=balance,
        )
    return Stages(stages, mesh.pp, partition.choice, balance)
