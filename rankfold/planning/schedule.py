"""Simulates pipeline schedules: each rank's actions over time, its idle time, and its kept activations.

Prints the schedule as a grid, then each rank's idle time and peak of kept activations, then all schedules side by
side. Nothing is measured: the times are those given. The defaults are those of LoRA on a frozen base: backward as long
as forward, and negligible weight gradients; for full training give --weight-grad 1.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from engine.errors import UserError
from engine.pipeline.costs import Costs, even_costs, layer_costs
from engine.pipeline.grid import MIN_WIDTH, grid
from engine.pipeline.partition import LayerWeights, first_trainable_stage, parse_layers, split_layers
from engine.pipeline.schedule import Schedule
from engine.pipeline.schedules import SCHEDULES, default_virtual, make_schedule
from engine.pipeline.simulate import Simulation, simulate
from engine.pipeline.validate import validate
from engine.telemetry.format import format_columns

STANDS_FOR = {
    "parallel.pipeline": "--pipeline", "parallel.virtual": "--virtual", "parallel.schedule": "--schedule",
    "parallel.layers_per_stage": "--split",
}  # fmt: skip
"""Option of a run -> the flag; see `engine.config.command_line`."""
_MOST_RANKS, _MOST_LAYERS = 256, 1000
"""Several times those of any model. Making the schedules, and splitting the layers, takes time that grows with the
square; at these sizes, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleOptions:
    """The options of this command; see `add_arguments`.

    Raises:
        UserError: options that do not fit together.
    """

    pipeline: int
    microbatches: int
    virtual: int | None = None
    schedule: str = "lora"
    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 0.0
    p2p: float = 0.0
    layers: int | None = None
    split: str | None = None
    embedding_cost: float = 0.0
    head_cost: float = 0.0
    trainable_head: bool = False
    first_trainable_layer: int = 0
    width: int = 120

    def __post_init__(self) -> None:
        if self.pipeline < 1:
            raise UserError(f"--pipeline is {self.pipeline}: give at least 1 rank.")
        if self.pipeline > _MOST_RANKS:
            raise UserError(f"--pipeline is {self.pipeline}: give at most {_MOST_RANKS} ranks.")
        if self.layers is not None and self.layers > _MOST_LAYERS:
            raise UserError(f"--layers is {self.layers}: give at most {_MOST_LAYERS}, the layers of a model.")
        if self.forward <= 0:
            raise UserError(f"--forward is {self.forward:g}: give a time above 0.")
        for name in ("input_grad", "weight_grad", "p2p", "embedding_cost", "head_cost"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name):g}: give 0 or more.")
        if self.width < MIN_WIDTH:
            raise UserError(f"--width is {self.width}: give at least {MIN_WIDTH} characters.")
        if self.layers is None:
            for name in ("split", "embedding_cost", "head_cost", "first_trainable_layer"):
                if getattr(self, name):
                    raise UserError(f"--{name.replace('_', '-')} counts in layers: give --layers too.")
        elif not 0 <= self.first_trainable_layer <= self.layers:
            raise UserError(
                f"--first-trainable-layer is {self.first_trainable_layer}, but --layers is {self.layers}: give a layer "
                "of the model, counted from 0, or their number where only the head trains."
            )
        elif self.first_trainable_layer == self.layers and not self.trainable_head:
            raise UserError(
                f"--first-trainable-layer {self.first_trainable_layer} leaves nothing to train: give a lower one, or "
                "--trainable-head too."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A schedule with the costs of its stages and its simulation."""

    schedule: Schedule
    layers: tuple[int, ...] | None
    costs: Costs
    simulation: Simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--pipeline", type=int, required=True, metavar="P", help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, required=True, metavar="M", help="micro-batches in a step")
    parser.add_argument(
        "--virtual", type=int, metavar="V", help="stages per rank (default: 2 if the schedule needs several, else 1)"
    )
    parser.add_argument(
        "--schedule",
        default="lora",
        choices=SCHEDULES,
        help="schedule to draw (default lora: interleaved, or 1f1b with one stage per rank)",
    )
    times = parser.add_argument_group("times, in any one unit, of one micro-batch in 1/P of the layers")
    times.add_argument("--forward", type=float, default=1.0, metavar="TIME", help="forward (default 1)")
    times.add_argument(
        "--input-grad", type=float, default=1.0, metavar="TIME", help="gradients of the inputs (default 1)"
    )
    times.add_argument(
        "--weight-grad", type=float, default=0.0, metavar="TIME", help="gradients of the weights (default 0)"
    )
    times.add_argument(
        "--p2p", type=float, default=0.0, metavar="TIME", help="sending activations from rank to rank (default 0)"
    )
    model = parser.add_argument_group("the model; without --layers all stages are alike")
    model.add_argument("--layers", type=int, metavar="N", help="number of layers, split over the stages")
    model.add_argument("--split", metavar="N,N,..", help="layers of each stage (default: as even as possible)")
    model.add_argument(
        "--embedding-cost",
        type=float,
        default=0.0,
        metavar="LAYERS",
        help="time of the embedding, in layers (default 0)",
    )
    model.add_argument(
        "--head-cost",
        type=float,
        default=0.0,
        metavar="LAYERS",
        help="time of the head and the loss, in layers (default 0)",
    )
    model.add_argument(
        "--trainable-head",
        action="store_true",
        help="divide the head's time between forward and backward (default: frozen, all of it in forward)",
    )
    model.add_argument(
        "--first-trainable-layer",
        type=int,
        default=0,
        metavar="N",
        help="no backward runs below this layer (default 0)",
    )
    parser.add_argument("--width", type=int, default=120, metavar="CHARACTERS", help="width of the grid (default 120)")


def run(arguments: argparse.Namespace) -> None:
    """Prints the plan.

    Raises:
        UserError: numbers that do not go together.
    """
    options = ScheduleOptions(**{item.name: getattr(arguments, item.name) for item in fields(ScheduleOptions)})
    print(report(options))


def report(options: ScheduleOptions) -> str:
    """Returns the command's whole output.

    Raises:
        UserError: numbers that do not go together.
    """
    virtual = default_virtual(options.schedule) if options.virtual is None else options.virtual
    chosen = make_plan(options, options.schedule, virtual, options.split)
    count = f"{options.pipeline} ranks, {virtual} {'stage' if virtual == 1 else 'stages'} each"
    title = f"{options.schedule}: {count}, {options.microbatches} micro-batches"
    return "\n\n".join([title, grid(chosen.simulation, options.width), _ranks(chosen), _comparison(options, virtual)])


def make_plan(options: ScheduleOptions, name: str, virtual: int, split: str | None) -> Plan:
    """Returns the schedule `name`, checked and simulated.

    Args:
        options: sizes and times.
        name: of the schedule; the one in `options` is not read.
        virtual: stages a rank; the one in `options` is not read.
        split: layers of each stage as the user wrote them; None for the best.

    Raises:
        UserError: it is not possible with these numbers.
    """
    # impossible numbers are refused before layers are split over stages
    schedule = make_schedule(name, options.pipeline, virtual, options.microbatches)
    if options.layers is None:
        layers, costs = None, _even(options, schedule.num_stages, virtual)
    else:
        layers, costs = _split(options, options.layers, schedule.num_stages, split)
        first = first_trainable_stage(layers, options.first_trainable_layer)
        schedule = make_schedule(name, options.pipeline, virtual, options.microbatches, first)
    validate(schedule)
    return Plan(schedule=schedule, layers=layers, costs=costs, simulation=simulate(schedule, costs))


def _even(options: ScheduleOptions, num_stages: int, virtual: int) -> Costs:
    return even_costs(
        num_stages,
        forward=options.forward / virtual,
        input_grad=options.input_grad / virtual,
        weight_grad=options.weight_grad / virtual,
        activation=1 / virtual,
        transfer=options.p2p,
    )


def _split(
    options: ScheduleOptions, num_layers: int, num_stages: int, split: str | None
) -> tuple[tuple[int, ...], Costs]:
    whole = options.forward + options.input_grad + options.weight_grad
    weights = LayerWeights(
        embedding=options.embedding_cost,
        head=options.head_cost,
        first_trainable_layer=options.first_trainable_layer,
        frozen_layer=options.forward / whole,
    )
    if split is None:
        layers = split_layers(num_layers, num_stages, weights)
    else:
        layers = parse_layers(split, num_layers, num_stages)
    share = options.pipeline / num_layers  # of an average rank's layers
    return layers, layer_costs(
        layers,
        forward=options.forward * share,
        input_grad=options.input_grad * share,
        weight_grad=options.weight_grad * share,
        activation=share,
        transfer=options.p2p,
        embedding=options.embedding_cost,
        head=options.head_cost,
        frozen_head=not options.trainable_head,
        first_trainable_layer=options.first_trainable_layer,
    )


def _ranks(plan: Plan) -> str:
    """Returns the chosen schedule, rank by rank."""
    schedule, simulation = plan.schedule, plan.simulation
    rows = [("rank", "stages", "layers", "busy", "bubble", "waits inside", "peak activations")]
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        rows.append(
            (
                str(rank),
                ",".join(map(str, stages)),
                ",".join(str(plan.layers[stage]) for stage in stages) if plan.layers else "-",
                f"{simulation.busy[rank]:.2f}",
                f"{simulation.bubbles[rank]:.1%}",
                f"{simulation.idle_inside[rank]:.2f}",
                f"{simulation.peak_activations[rank]:.2f}",
            )
        )
    return "\n".join(format_columns(rows))


def _comparison(options: ScheduleOptions, virtual: int) -> str:
    """Returns all schedules with these numbers; those that need another number of stages per rank use their own."""
    rows = [("schedule", "stages per rank", "time", "bubble", "waits inside", "peak activations")]
    impossible = []
    for name in SCHEDULES:
        own = virtual if _takes(name, virtual) else default_virtual(name)
        same_stages = options.split is not None and options.split.count(",") + 1 == options.pipeline * own
        try:
            simulation = make_plan(options, name, own, options.split if same_stages else None).simulation
        except UserError as error:
            impossible.append(f"{name} is not possible: {error}")
            continue
        rows.append(
            (
                name,
                str(own),
                f"{simulation.makespan:.2f}",
                f"{simulation.bubble:.1%}",
                f"{max(simulation.idle_inside):.2f}",
                f"{max(simulation.peak_activations):.2f}",
            )
        )
    legend = (
        "bubble: idle part of the time; waits inside: longest idle time of a rank between its first action and its "
        "last;\npeak activations: most that a rank keeps, 1 is one micro-batch in 1/P of the layers"
    )
    return "\n".join([*format_columns(rows), *impossible, legend])


def _takes(name: str, virtual: int) -> bool:
    """Returns whether the schedule can have this many stages on each rank."""
    try:
        make_schedule(name, 1, virtual, 1)
    except UserError:
        return False
    return True
