"""Runs on the ranks of a Gloo group, driven through the guards as the training loop drives them."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from engine.config.guards import GuardOptions
from engine.distributed.mesh import Axis, build_mesh
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.optim.state_sharding import ShardLevel
from engine.training.guards.run_guards import Guards
from engine.training.observer import LaunchedStep
from engine.training.step import StepFigures
from tests.distributed.run_cases import SMALL
from tests.distributed.sharded_runs import GLOBAL_ROWS, Layout, Run

OPTIONS = GuardOptions(liveness_steps=3, replicas_every=2)
Fault = Callable[[Run, int], None]
"""Called before each step with its number, from 1; and with 0 before the guards look for the first time."""


Rate = Callable[[int], float]
"""Learning rate of a step."""


def _rate(step: int) -> float:
    return 1e-3


def no_fault(run: Run, step: int) -> None:
    """An ordinary run."""


def zero_b(run: Run, step: int) -> None:
    """As adapters begin."""
    if step == 0:
        for shard in run.flat.master_shards():
            if shard.name.endswith("lora_B"):
                shard.tensor.zero_()
        run.flat.publish()


def build_run(layout: Layout, level: ShardLevel = "none") -> Run:
    grid = layout.grid
    return Run(layout, build_mesh(grid, device_type="cpu", num_kv_heads=SMALL.num_kv_heads), level)


def guards_of(run: Run, options: GuardOptions, said: list[str]) -> Guards:
    world = Axis("world", dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else Axis("world")
    return Guards(
        options, run.step, run.optimizer, run.mesh, world, beta1=0.9, seed=11, max_skipped_steps=10, say=said.append
    )


def drive(run: Run, options: GuardOptions, *, steps: int, fault: Fault = no_fault, lr: Rate = _rate) -> list[str]:
    """The loop: figures of a step are read when the next one was launched. What was said; a stop's sentence last."""
    said: list[str] = []
    fault(run, 0)
    try:
        _loop(run, guards_of(run, options, said), steps, fault, lr)
    except UserError as error:
        said.append(f"stopped: {error}")
    return said


def _loop(run: Run, guards: Guards, steps: int, fault: Fault, lr: Rate) -> None:
    guards.begin(0, 0)
    for step in range(1, steps + 1):
        fault(run, step)
        batches, targets = run.batches(step)
        result = run.step(batches, targets, lr(step))
        guards.after(LaunchedStep(step, batches, targets, lr(step), step * GLOBAL_ROWS, result, StepFigures(result)))
        if step > 1:
            guards.judge(step - 1)
    guards.judge(steps)
    guards.finish(steps, steps * GLOBAL_ROWS)


def on_ranks(layout: Layout, level: ShardLevel, options: GuardOptions, steps: int, fault: Fault) -> list[str]:
    """A whole guarded run, for `spawn`."""
    return drive(build_run(layout, level), options, steps=steps, fault=fault)


TP2 = Layout(case="adapters", grid=RankGrid(tp=2), sequence=True)
