"""Predicts memory and step time of one configuration as it is, and measures them on request.

Measuring takes the configuration's steps on this device with random weights and random tokens, on one rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from engine.config.load import parse_config
from engine.config.rules import check_config, check_world
from engine.config.run import RunConfig
from engine.config.snapshots import with_snapshots
from engine.errors import UserError
from engine.models.families import family_of
from engine.planning.machine import Machine
from engine.planning.memory_plan import memory_plan_of
from engine.planning.predict import usual_tiles, workload_of
from engine.planning.rank_layout import Layout, Workload
from engine.planning.search import Candidate
from engine.planning.step_time import predict_time
from engine.planning.stored_formats import base_words, stored_formats
from engine.runtime.launch import Launch
from engine.telemetry.format import counted
from engine.training.base_encoding import stacks_sentence
from engine.training.module_plan import decoder_in_training, training_plan
from engine.training.prefixes import choose_sharing
from rankfold.planning import answer_record, time_by_kernel
from rankfold.planning.memory_measure import measure
from rankfold.planning.memory_question import GIB, machine_of, read_config
from rankfold.planning.memory_report import part_table, routing_sentence, table, time_lines

_STEPS = 4
"""Steps of a measurement; the last one counts."""


def report(arguments: argparse.Namespace) -> str:
    """Returns the table, with measured figures where they are asked for.

    Raises:
        UserError: the configuration does not fit the model or the ranks, or it cannot be measured here.
    """
    config = _read(arguments)
    candidate, machine = _predicted(config, arguments)
    lines = [
        f"{arguments.config}: {candidate.label()}; base {base_words(candidate.workload)}; predicted "
        f"with the speeds of {machine.name}:",
        *time_lines(candidate, machine, arguments.gpus),
        *_images(candidate.workload, arguments.tiles),
        *_stacks(config),
        "",
        part_table(candidate),
    ]
    peak, capacity = candidate.peak / GIB, arguments.gpu_memory * (1 - arguments.reserve / 100)
    verdict = "fits" if peak <= capacity else "does not fit"
    lines += ["", f"{peak:.2f} GiB at most: {verdict} {arguments.gpu_memory:g} GiB less {arguments.reserve:g}%."]
    if routing := routing_sentence(candidate, capacity * GIB):
        lines[-1] += routing
    if arguments.by_kernel:
        lines += ["", time_by_kernel.report(candidate, machine)]
    if arguments.measure:
        lines += ["", _measured(config, candidate)]
    if arguments.json is not None:
        record = answer_record.of_candidate(candidate, machine)
        answer_record.write(arguments.json, {"predicted": True, "machine": answer_record.of_machine(machine), **record})
    return "\n".join(lines)


def _images(workload: Workload, tiles: int) -> list[str]:
    """Returns the line that says which images are counted, for a model with a vision model."""
    if not workload.decoder.fronts:
        uncounted = "images: of the tower only weights are counted, not what images take"
        return [uncounted] if workload.decoder.sees_images else []
    rows, columns = workload.decoder.fronts[0].usual_tile
    return [f"images: {counted(tiles, 'tile')} of {rows} x {columns} patches in a row (--tiles; no data is read)"]


def _stacks(config: RunConfig) -> list[str]:
    """Returns the line that says what of a mixture an encoding of the base leaves out, where there is such."""
    family, _ = family_of(read_config(config.model.path)[0], config.model.implementation)
    shapes = family.names.stack_shapes()
    return [stacks_sentence(config, list(shapes.values()))] if shapes and config.model.base_dtype is not None else []


def _read(arguments: argparse.Namespace) -> RunConfig:
    given = ["--config", arguments.config]
    if arguments.model is not None:
        given += ["--model.path", arguments.model]
    config = parse_config([*given, *(["--hub.download=true"] if arguments.download else [])])
    check_config(config)
    config = with_snapshots(config, model_need="config")
    read_config(config.model.path, "--model" if arguments.model is not None else "model.path")
    check_world(config, arguments.gpus)
    return config


def _predicted(config: RunConfig, arguments: argparse.Namespace) -> tuple[Candidate, Machine]:
    """Predicts a step on the chosen GPU, or on this machine's CPU."""
    on_cpu = arguments.machine == "cpu" or (arguments.measure and not torch.cuda.is_available())
    device_type = "cpu" if on_cpu else "cuda"
    machine = machine_of("cpu" if on_cpu else arguments.machine, arguments.gpu_memory, arguments.speeds)
    lengths = {"prompt": arguments.prompt_length, "completion": arguments.completion_length}
    workload = replace(_workload(config, device_type, **lengths), beside=int(arguments.beside))
    tiles = usual_tiles(workload.decoder, config.train.micro_batch_size * arguments.tiles)
    workload = replace(workload, tiles=tiles)
    memory = memory_plan_of(config)
    layout = Layout(parallel=config.parallel, data=max(1, arguments.gpus // config.parallel.model_parallel_size))
    found = Candidate.predict(workload, layout, memory, arguments.routing)
    found = replace(found, time=predict_time(workload, layout, memory, machine))
    return found, machine


def _workload(config: RunConfig, device_type: str, **lengths: int | None) -> Workload:
    hf_config, _ = read_config(config.model.path)
    family, text = family_of(hf_config, config.model.implementation)
    decoder = decoder_in_training(config, family.config_from_hf(text), family.names)
    plan = training_plan(config, decoder, family.names)
    sharing = choose_sharing(config, decoder)
    stored = stored_formats(config.model.base_dtype, hf_config, family.names)
    return workload_of(config, decoder, plan, device_type=device_type, sharing=sharing, stored=stored, **lengths)


def _measured(config: RunConfig, candidate: Candidate) -> str:
    if candidate.layout.world_size != 1:
        raise UserError("--measure takes steps on one device: set the sizes of parallel to 1 and --gpus to 1.")
    config = replace(config, model=replace(config.model, init="random"))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and config.memory.offload_activations:
        raise UserError(
            "memory.offload_activations is true, which needs a GPU: measure there, or set it to false to measure on "
            "this CPU."
        )
    with tempfile.TemporaryDirectory() as folder:  # drawn weights need no more than the model's config.json
        (Path(folder) / "config.json").write_text(json.dumps(read_config(config.model.path)[0]), encoding="utf-8")
        config = replace(config, model=replace(config.model, path=folder))
        found = measure(config, Launch(rank=0, world_size=1, device=device), steps=_STEPS)
    estimate, time = candidate.estimate, candidate.time
    assert time is not None
    # a CPU's memory is the host's, too
    step = found.step - (estimate.host if device.type == "cpu" else 0)
    tokens = config.train.global_batch_size * config.row_length
    rows = [
        (f"on {device.type}", "predicted", "measured", "factor"),
        _row("GiB in a step", estimate.step / GIB, step / GIB),
        _row("tokens/s", time.tokens_per_second, tokens / found.seconds),
    ]
    return table(rows)


def _row(name: str, predicted: float, measured: float) -> tuple[str, ...]:
    return name, f"{predicted:,.3f}", f"{measured:,.3f}", f"{measured / predicted:.3f}"
