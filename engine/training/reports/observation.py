"""Telemetry of one rank: memory, phases of steps, bandwidth, utilisation, traces.

Each rank writes its own file; no rank and no device is waited for.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.config.run import RunConfig
from engine.config.run_files import ENVIRONMENT, TELEMETRY, TRACES
from engine.distributed.transfer_meter import METER
from engine.files.durable import write_durably
from engine.models.describe import num_parameters
from engine.models.dtypes import TORCH_DTYPES
from engine.models.flops import step_flops, trained_work
from engine.runtime.launch import Launch
from engine.telemetry.metrics import Value
from engine.telemetry.output import say as say_on_any_rank
from engine.telemetry.process_memory import peak_memory_bytes
from engine.telemetry.rank_file import RankFile
from engine.training.build import Training
from engine.training.observer import LaunchedStep, Observer, StepReport
from engine.training.reports.flops_ceiling import measure_products

if TYPE_CHECKING:
    from engine.training.reports.profiler import StepTraces


class Observation(Observer):
    """Records the telemetry of one rank, from before the first step.

    Args:
        config, launch, training: of the run.
        run_dir: its folder.
        steps: that it takes.
        say: prints a line on rank 0.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(
        self,
        config: RunConfig,
        launch: Launch,
        training: Training,
        run_dir: Path,
        *,
        steps: int,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._launch, self._training = config, launch, training
        self._say = say
        self._traces: StepTraces | None = None
        if config.log.profile_steps:
            from engine.training.reports.profiler import StepTraces  # imports torch's profiler

            self._traces = StepTraces(config.log.profile_steps, run_dir / TRACES, launch.rank)
        self._ceiling = self._measured_ceiling()
        self._trained = trained_work(training.source.model.decoder, training.plan.trained)
        if launch.rank == 0 and config.log.metrics:
            whole = num_parameters(training.source.model.decoder)
            sizes = {"parameters": whole, "trained": training.plan.num_trained()}
            text = json.dumps(_environment(launch, training, sizes, self._ceiling, steps), indent=2)
            write_durably(run_dir / ENVIRONMENT, text)
        # last, so that nothing is left open where the lines above fail
        self._file = RankFile(run_dir / TELEMETRY, launch.rank, say_on_any_rank) if config.log.metrics else None
        if config.log.communication:
            METER.start()

    def before(self, step: int) -> None:
        """Begins a trace where one is asked for."""
        if self._traces is not None:
            self._traces.before(step)

    def after(self, launched: LaunchedStep) -> None:
        """Ends the trace that ends with this step."""
        if self._traces is None or (path := self._traces.after(launched.step)) is None:
            return
        ranks = self._launch.world_size
        beside = "" if ranks == 1 else f", of {ranks} that lie there, one for each rank"
        self._say(f"step {launched.step}: wrote the trace {path}{beside}")

    def figures(self, report: StepReport) -> dict[str, Value]:
        """Writes this rank's record; returns the utilisation of the devices' arithmetic."""
        if self._file is not None:
            self._file.write(self._record(report.step))
        tokens, seconds = report.tokens, report.seconds
        if not self._ceiling or seconds <= 0 or tokens <= 0:
            return {}
        decoder = self._training.source.model.decoder
        flops = step_flops(decoder, tokens=tokens, row_tokens=tokens / report.rows, trained=self._trained)
        return {"mfu": flops / seconds / self._launch.world_size / self._ceiling}

    def close(self) -> None:
        """Closes the file, and ends traces and measurements."""
        METER.stop()
        if self._traces is not None:
            self._traces.close()
        if self._file is not None:
            self._file.close()

    def _record(self, step: int) -> dict[str, Any]:
        record: dict[str, Any] = {
            "step": step,
            "memory": peak_memory_bytes(),
            "phases": self._training.step.phases.totals(),
        }
        if self._config.log.communication:
            record["communication"] = {
                name: {"calls": one.calls, "sent": one.sent, "timed": one.timed, "seconds": one.seconds}
                for name, one in METER.totals().items()
            }
        return record

    def _measured_ceiling(self) -> float:
        """Returns the FLOP/s of a device; 0 where this rank does not report utilisation, as only rank 0 may."""
        given = self._config.log.peak_tflops
        if given is not None or self._launch.rank != 0:
            return (given or 0.0) * 1e12
        return measure_products(self._launch.device, TORCH_DTYPES[self._config.model.dtype])


def _environment(
    launch: Launch, training: Training, sizes: dict[str, int], ceiling: float, steps: int
) -> dict[str, Any]:
    """Describes the machine, versions, layout, model and length, and when the run started, in UTC."""
    cuda = launch.device.type == "cuda"
    grid = training.mesh.grid
    choice = training.plan.partition.choice
    return {
        "started": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "model": sizes,
        "steps": steps,
        "device": torch.cuda.get_device_name(launch.device) if cuda else platform.processor() or platform.machine(),
        "backend": "cuda" if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "triton", "transformers", "safetensors", "numpy")},
        "command": " ".join(sys.argv),
        "world_size": launch.world_size,
        "layout": {"tensor": grid.tp, "context": grid.cp, "data": grid.dp, "pipeline": grid.pp, "expert": grid.ep},
        "schedule": {
            "name": choice.name,
            "virtual": choice.virtual,
            "first_trainable_stage": choice.first_trainable_stage,
            "layers": list(training.plan.partition.layers),
        },
        **({} if training.plan.proof is None else {"proof": training.plan.proof.facts()}),
        "ceiling_tflops": ceiling / 1e12 if ceiling else None,
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
