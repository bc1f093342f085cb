"""Builds the parts of the model on this rank, and the arithmetic of its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.config.rules import gradient_accumulation_steps
from engine.config.run import RunConfig
from engine.distributed.mesh import Axis, Mesh
from engine.layers.context import TensorLayout
from engine.layers.shared_base import SharedBase
from engine.layers.storage import WeightPlacement
from engine.models.decoder import build_decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.dtypes import TORCH_DTYPES
from engine.models.plain_torch import plain_torch_parts
from engine.objectives.objective import Objective
from engine.ops.backends import row_invariant
from engine.optim.loss_scale import LossScale
from engine.planning.memory_plan import memory_plan_of
from engine.runtime.launch import Launch
from engine.seams import resolve
from engine.telemetry.log import Log
from engine.telemetry.processors import busy_note
from engine.training.device_choices import DeviceChoices
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.stage_layout import Partition
from engine.training.start_model import ModelPlan


def build_stages(
    config: RunConfig,
    launch: Launch,
    plan: ModelPlan,
    choices: DeviceChoices,
    mesh: Mesh,
    *,
    decoder: DecoderConfig,
    weights: WeightPlacement,
    objective: Objective,
    loss_scale: LossScale | None,
    base: SharedBase | None,
    log: Log,
) -> Stages:
    """Builds this rank's parts of the model, still empty, as stages, and logs their kernels.

    Args:
        weights: where the weights wait.
        loss_scale: of float16; None without one.
        base: the frozen weights, where several models read them; None where this one has its own.
    """
    layout = _layout(config, mesh, plan.partition, choices, splits_tokens=decoder.splits_tokens)
    if base is not None:  # rows of several models may be multiplied together, and no row's bits are to depend on that
        kernels = row_invariant(layout.kernels, TORCH_DTYPES[config.model.dtype])
        layout = replace(layout, fold=False)
        if kernels is not layout.kernels:
            encoded = None if layout.base is None else layout.base.row_invariant(kernels.product)
            layout = replace(layout, kernels=kernels, base=encoded)
    for sentence in choices.sentences:
        log.info(sentence)
    if launch.device.type == "cpu" and (busy := busy_note(torch.get_num_threads())) is not None:
        log.warning(busy)
    if not decoder.splits_tokens and config.parallel.sequence_parallel:
        log.info("sequence parallelism is off: layers that are transformers' own modules see all tokens")
    if (plain := plain_torch_parts(decoder)) is not None:
        log.warning(plain)
    balance = _load_balance(config, launch, decoder, mesh, loss_scale, log)
    partition, first_trained = plan.partition, plan.partition.choice.first_trainable_stage
    step = torch.zeros((), dtype=torch.int64, device=launch.device)
    memory = memory_plan_of(config)
    stages: dict[int, ModelStage] = {}
    embedding_weight = None
    for number, part in partition.parts(mesh.pp.rank).items():
        model = build_decoder(
            decoder,
            layout=layout,
            plan=plan.modules,
            device=launch.device,
            dtype=TORCH_DTYPES[config.model.dtype],
            part=part,
            embedding_weight=embedding_weight,
            memory=memory,
            weights=weights,
            frozen=None if base is None else base.begin(number),
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


def _layout(
    config: RunConfig, mesh: Mesh, partition: Partition, choices: DeviceChoices, *, splits_tokens: bool
) -> TensorLayout:
    """Returns the layout of this rank's tensors, and the arithmetic behind the layers."""
    # in a V the first and the last stage are on one rank and share one tensor
    ends_meet = partition.stage_rank[0] == partition.stage_rank[-1]
    return TensorLayout.over(
        mesh,
        pp_ends=Axis("pp_ends") if ends_meet else mesh.pp_ends,
        sequence_parallel=config.parallel.sequence_parallel and splits_tokens,
        joint_reduce=config.parallel.lora_reduce == "joint",
        kernels=choices.attention.kernels,
        context_method=config.parallel.context_method,
        attention_blocks=choices.blocks,
        base=choices.base,
    )


def _load_balance(
    config: RunConfig, launch: Launch, decoder: DecoderConfig, mesh: Mesh, loss_scale: LossScale | None, log: Log
) -> Any:
    """Returns the auxiliary loss of routers, where the model has any and it is asked for."""
    if not decoder.num_experts:
        return None
    num_micro_batches = gradient_accumulation_steps(config, launch.world_size)
    build_balance = resolve("engine.experts.router_load:build_balance")
    return build_balance(config, decoder, mesh, launch.device, loss_scale, num_micro_batches, log.info)
