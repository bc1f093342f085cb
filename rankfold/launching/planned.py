"""The layout of a job by the planner: the options in which its answer differs from the run file."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from engine.config.run import RunConfig
from engine.errors import UserError
from engine.telemetry.output import say
from rankfold.planning.memory import RESERVE
from rankfold.planning.memory_question import answer_for, read_config
from rankfold.planning.memory_report import memory_options


def planned_words(config: RunConfig, devices: int, gpu_memory: float) -> tuple[list[str], RunConfig]:
    """Returns the options of the fastest layout that fits, as a command line has them, and the run with them.

    Args:
        config: of the run; its layout is not read.
        devices: GPUs of the whole job.
        gpu_memory: GiB of each.

    Raises:
        UserError: the model cannot be read, or nothing fits.
    """
    hf_config, folder = read_config(config.model.path)
    answer = answer_for(hf_config, config, devices=devices, gpu_memory=gpu_memory, reserve=RESERVE, folder=folder)
    if not answer.found.fitting:
        raise UserError(
            f"no layout of {devices} GPUs with {gpu_memory:g} GiB holds this run: rankfold plan memory says how much "
            "is missing and what would help."
        )
    best = answer.found.fitting[0]
    say(f"planned: {best.label()}, {best.peak / 2**30:.1f} of {answer.capacity / 2**30:.1f} GiB predicted at most")
    found = replace(config, parallel=best.layout.parallel, memory=memory_options(best))
    words: list[str] = []
    for section in ("parallel", "memory"):
        before, after = getattr(config, section), getattr(found, section)
        for one in fields(after):
            value = getattr(after, one.name)
            if value != getattr(before, one.name):
                words += [f"--{section}.{one.name}", _text(value)]
    return words, found


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
