"""The proof at the start: that a model whose layers are not the engine's own computes the same in the run's layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from engine.config.run import RunConfig
from engine.distributed.mesh import Axis, Mesh
from engine.models.run_proof import AskedOfModel, RunProof
from engine.runtime.launch import Launch
from engine.seams import resolve
from engine.telemetry.log import Log
from engine.training.build import run_mesh

if TYPE_CHECKING:
    from engine.training.start_model import ModelPlan, ModelSource


def prove_model(
    config: RunConfig, launch: Launch, log: Log, source: ModelSource, plan: ModelPlan
) -> tuple[ModelPlan, Mesh | None]:
    """Proves what the run asks of its model, where the model's kind has a proof. Collective.

    Returns:
        The plan with the proof, and the process groups if they had to be made for it.

    Raises:
        UserError: something of it is not the model, on every rank alike.
    """
    decoder = source.model.decoder
    if decoder.proof is None:
        return plan, None
    if not config.model.proof:
        log.warning("the proof at the start is skipped, since model.proof is false: the layout may not be the model")
        return plan, None
    asked = AskedOfModel(trained=tuple(plan.trained), layers=plan.partition.layers)
    apart = config.parallel.tensor > 1 or config.parallel.expert > 1
    mesh = run_mesh(config, launch, decoder) if apart else None
    group = dist.group.WORLD if launch.world_size > 1 else None
    world = Axis("world", launch.world_size, launch.rank, group)
    proof: RunProof = resolve(decoder.proof)(decoder, asked, mesh=mesh, world=world, device=launch.device)
    log.info(proof.line())
    return replace(plan, proof=proof), mesh
