"""The layout of a job by the planner: the options in which its answer differs from the run file."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from engine.config.hub import instead_of
from engine.config.run import RunConfig
from engine.config.snapshots import with_snapshots
from engine.errors import UserError
from engine.telemetry.output import say
from rankfold.launching.job import Job
from rankfold.planning.memory import RESERVE
from rankfold.planning.memory_question import answer_for, read_config
from rankfold.planning.memory_report import memory_options


def planned_words(config: RunConfig, job: Job, gpu_memory: float) -> tuple[list[str], RunConfig]:
    """Returns the options of the fastest layout that fits, as a command line has them, and the run with them.

    Args:
        config: of the run; its layout is not read.
        job: its machines.
        gpu_memory: GiB of each GPU.

    Raises:
        UserError: the model cannot be read, or nothing fits.
    """
    devices = job.nodes * job.ranks
    here = with_snapshots(config, model_need="config")
    path = here.model.path
    if not Path(path).exists():
        raise UserError(
            f"--plan reads the config.json of model.path, {path}, which is not on this machine{_advice(path)}."
        )
    hf_config, folder = read_config(path)
    answer = answer_for(
        hf_config, here, devices=devices, gpu_memory=gpu_memory, reserve=RESERVE, host_memory=job.memory,
        folder=folder, node_size=job.ranks,
    )  # fmt: skip
    if not answer.found.fitting:
        raise UserError(
            f"no layout of {devices} GPUs with {gpu_memory:g} GiB holds this run: rankfold plan memory says how much "
            "is missing and what would help."
        )
    best = answer.found.fitting[0]
    found = replace(config, parallel=best.layout.parallel, memory=memory_options(best))
    words: list[str] = []
    for section in ("parallel", "memory"):
        before, after = getattr(config, section), getattr(found, section)
        for one in fields(after):
            value = getattr(after, one.name)
            if value != getattr(before, one.name):
                words += [f"--{section}.{one.name}", _text(value)]
    say(
        f"planned: {best.label()}, {best.peak / 2**30:.1f} of {answer.capacity / 2**30:.1f} GiB predicted at most: "
        f"{' '.join(words) or 'as the run file has it'}"
    )
    return words, found


def _advice(path: str) -> str:
    otherwise = "run rankfold plan memory on a machine that has it, and give its answer as options"
    return instead_of(path, otherwise)


def _text(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool | list | tuple) else str(value)
