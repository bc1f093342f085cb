"""Takes real steps of a model with two and with four layers on this device, and compares them with predictions.

The difference of the two is a layer's. It calibrates the prediction for one device; links are not probed.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config.parallel import ParallelOptions
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.files import platforms
from engine.models.families import family_of
from engine.planning.machine import Machine
from engine.planning.memory_plan import memory_plan_of
from engine.planning.peak import PeakEstimate
from engine.planning.predict import predict_peak, workload_of
from engine.planning.rank_layout import Layout
from engine.planning.step_time import predict_time
from engine.planning.stored_formats import stored_formats
from engine.quantization.shipped.config import KEY, encoding_of
from engine.runtime.launch import Launch
from engine.telemetry.format import format_bytes
from engine.training.module_plan import training_plan
from rankfold.planning.memory_measure import Measured, measure
from rankfold.planning.memory_question import Answer, measured_cpu
from rankfold.planning.memory_report import memory_options, table

LAYERS = (2, 4)
"""Layers of the two models: their difference is that of whole layers, without the first and the last."""
_STEPS = 2
"""Steps of a probe: the first allocates buffers that the second reuses."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """The predicted and the measured figures of one model."""

    layers: int
    predicted: PeakEstimate
    seconds: float
    measured: Measured


def report(answer: Answer) -> str:
    """Returns the table, and the ratios of measured to predicted figures.

    Raises:
        UserError: the small model is too large for this device.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    machine = measured_cpu(answer.gpu_memory) if device.type == "cpu" else answer.machine
    few, many = (_probe(answer, layers, device, machine) for layers in LAYERS)
    rows = [("layers", "predicted", "measured", "factor", "predicted s", "measured s", "factor")]
    for one in (few, many):
        rows.append(_row(str(one.layers), one.predicted.step, one.measured.step, one.seconds, one.measured.seconds))
    count = many.layers - few.layers
    per_layer = [
        (one(many) - one(few)) / count
        for one in (
            lambda probe: probe.predicted.step,
            lambda probe: probe.measured.step,
            lambda probe: probe.seconds,
            lambda probe: probe.measured.seconds,
        )
    ]
    rows.append(_row("a layer", *per_layer))
    workload = answer.workload
    kernels = workload_of(
        answer.config, workload.decoder, workload.plan, device_type=device.type, stored=workload.formats
    ).kernels
    lines = [
        f"Probe on {device.type}: one process, one micro-batch, kernels {kernels}, drawn weights",
        table(rows),
        f"Calibration: bytes x {per_layer[1] / per_layer[0]:.3f}, seconds x {per_layer[3] / per_layer[2]:.3f} a layer.",
    ]
    if answer.found.fitting:
        best = answer.found.fitting[0]
        moving = best.estimate.step - sum(best.estimate.static.values())
        calibrated = best.estimate.step + moving * (per_layer[1] / per_layer[0] - 1)
        lines.append(f"The chosen layout's peak with that factor on what moves: {format_bytes(calibrated)}.")
    if device.type == "cpu":
        lines.append("Bytes are those of tensors; allocations within compiled kernels are not seen.")
    return "\n".join(lines)


def _row(name: str, predicted: float, measured: float, seconds: float, real: float) -> tuple[str, ...]:
    return (
        name,
        format_bytes(predicted),
        format_bytes(measured),
        f"{measured / predicted:.3f}",
        f"{seconds:.3g}",
        f"{real:.3g}",
        f"{real / seconds:.3f}",
    )


def _probe(answer: Answer, layers: int, device: torch.device, machine: Machine) -> _Probe:
    """Writes the small model's config.json, predicts, and measures."""
    family, text = family_of(answer.hf_config)
    smaller = {**text, "num_hidden_layers": layers, "model_type": text["model_type"]}
    if (encoding := encoding_of(answer.hf_config)) is not None:
        smaller[KEY] = encoding.raw
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(smaller), encoding="utf-8")
        config = _config(answer, folder, device)
        decoder = family.config_from_hf(smaller)
        plan = training_plan(config, decoder, family.names)
        stored = stored_formats(config.model.base_dtype, smaller, family.names)
        predicted = predict_peak(config, decoder, plan, device_type=device.type, stored=stored)
        _check_room(predicted, layers, device)
        workload = workload_of(config, decoder, plan, device_type=device.type, stored=stored)
        seconds = predict_time(workload, Layout(), memory_plan_of(config), machine).step
        measured = measure(config, Launch(rank=0, world_size=1, device=device), steps=_STEPS)
        if device.type == "cpu":  # a CPU's memory is the host's
            measured = replace(measured, step=measured.step - predicted.host)
    return _Probe(layers, predicted, seconds, measured)


def _config(answer: Answer, folder: str, device: torch.device) -> RunConfig:
    """Returns the configuration of one micro-batch on one process, with the chosen layout's recomputation on all
    layers.
    """
    config, train = answer.config, answer.config.train
    memory = config.memory
    if answer.found.fitting:
        best = answer.found.fitting[0]
        memory = replace(memory_options(best), recompute_layers=None)
        if device.type == "cpu":  # a CPU's memory is the host's
            memory = replace(memory, offload_activations=False)
    return replace(
        config,
        model=replace(config.model, path=folder, init="random"),
        parallel=ParallelOptions(),
        memory=memory,
        train=replace(train, global_batch_size=train.micro_batch_size),
    )


def _check_room(predicted: PeakEstimate, layers: int, device: torch.device) -> None:
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
    else:
        room = platforms.free_memory_bytes()
    if predicted.peak > room:
        raise UserError(
            f"--probe with {layers} layers needs {format_bytes(predicted.peak)}, but {format_bytes(room)} are free on "
            "this device: give a shorter --seq-length or a smaller --micro-batch, or probe on another device."
        )
