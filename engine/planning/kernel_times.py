"""The predicted time of a step on one rank, kernel by kernel: the terms of the sum of `step_time`.

All pipeline stages count as if one rank had them. Collectives, copies from and to host memory and the update are not
kernels of a layer, and are not here; nor is the host's time, where launching takes longer than computing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.layers.context import TrainingPlan
from engine.layers.recompute import MemoryPlan
from engine.planning.launch_times import filling, launch_limits, launch_seconds
from engine.planning.launches import Launch, PieceLaunches
from engine.planning.machine import Machine
from engine.planning.rank_layout import Layout, Workload
from engine.planning.traces import rank_model


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """All launches of one kind in a step.

    Args:
        part: "layers" or "ends", and "forward", "backward" or "weights".
        launch: one of them.
        count: how many there are.
        seconds: of all.
        limit: the resource that takes that time: "products", "attention", "memory" or "launches".
        filling: of a product, the share of the best one's speed that its shape allows.
    """

    part: tuple[str, str]
    launch: Launch
    count: int
    seconds: float
    limit: str
    filling: float

    @property
    def nbytes(self) -> int:
        return self.count * self.launch.nbytes

    @property
    def flops(self) -> float:
        return self.count * self.launch.flops


def kernel_times(
    workload: Workload,
    layout: Layout,
    memory: MemoryPlan,
    machine: Machine,
    first_trainable: int | None = None,
) -> list[KernelTime]:
    """Returns the kernels of a step, in the order in which they first run.

    Args:
        workload, layout, memory: of the step.
        machine: whose speeds count.
        first_trainable: the first layer with a backward; None for the first trained one.

    Raises:
        UserError: the model's sizes do not fit the layout.
    """
    workload = workload.on(layout)
    machine = machine.graphed() if workload.graphed else machine
    model, microbatches = rank_model(workload, layout.parallel), workload.num_microbatches(layout)
    counts: dict[tuple[tuple[str, str], Launch], int] = {}

    def count(part: str, pieces: PieceLaunches, backward: bool) -> None:
        phases: dict[str, Iterable[Launch]] = {"forward": pieces.forward}
        if backward:
            phases |= {"backward": pieces.backward, "weights": pieces.weights}
        for phase, launches in phases.items():
            for launch in launches:
                key = (part, phase), launch
                counts[key] = counts.get(key, 0) + microbatches

    shape = model.shape
    lowest = first_trainable if first_trainable is not None else shape.first_trainable_layer
    count("ends", model.embedding(memory.level(0), saved=shape.embedding_trains).launches, shape.embedding_trains)
    if model.encoded:
        encoder = model.encoder(memory.level(0), saved=shape.carried_trains)
        count("ends", encoder.launches, shape.carried_trains)
    for index, kind in enumerate(shape.kinds):
        plan = MemoryPlan(recompute=memory.level(index), stored_dtype=memory.stored_dtype)
        count("layers", model.layer(kind, plan, needs=True).launches, index >= lowest)
    count("ends", model.head(needs=True, saved=True, defers=False).launches, backward=True)
    return [_timed(part, launch, number, machine) for (part, launch), number in counts.items()]


def _timed(part: tuple[str, str], launch: Launch, count: int, machine: Machine) -> KernelTime:
    limits = launch_limits(launch, machine)
    limit = max(limits, key=lambda name: limits[name])
    return KernelTime(
        part=part,
        launch=launch,
        count=count,
        seconds=count * launch_seconds(launch, machine),
        limit="attention" if limit == "products" and "attention" in launch.kind else limit,
        filling=filling(launch, machine),
    )


def lora_tax(workload: Workload, layout: Layout, memory: MemoryPlan, machine: Machine) -> float | None:
    """Returns how many times as long the layers take as those of a model without adapters, through whose layers
    backward goes nevertheless; None where nothing has an adapter."""
    bare = replace(workload, plan=replace(workload.plan, adapter=TrainingPlan().adapter))
    lowest = rank_model(workload, layout.parallel).shape.first_trainable_layer
    with_adapters, without = (
        sum(one.seconds for one in kernel_times(each, layout, memory, machine, lowest) if one.part[0] == "layers")
        for each in (workload, bare)
    )
    return None if with_adapters == without else with_adapters / without
