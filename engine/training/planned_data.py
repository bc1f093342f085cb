"""The data of a run and its steps: read together, because the one decides the number of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.checkpoint.model_folder import ModelFolder
from engine.config.run import RunConfig
from engine.runtime.launch import Launch
from engine.runtime.run_folder import RunFolder
from engine.seams import resolve
from engine.telemetry.format import counted
from engine.telemetry.log import Log
from engine.training.data import build_data
from engine.training.resuming import RunComplete
from engine.training.run_data import RunData
from engine.training.saving import tidy
from engine.training.start import Start
from engine.training.step_plan import StepPlan, plan_steps

if TYPE_CHECKING:
    from engine.training.samples import SamplePrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedData:
    """The data of a run, and its way through it.

    Args:
        data: the rows.
        fingerprint: of the training rows.
        prompts: tokens of train.sample_prompts.
        step_plan: how many steps, at which learning rates.
    """

    data: RunData
    fingerprint: str
    prompts: list[SamplePrompt]
    step_plan: StepPlan


def read_data(
    config: RunConfig, launch: Launch, log: Log, folder: RunFolder, model: ModelFolder, start: Start
) -> PlannedData:
    """Reads the data, plans the run's steps, and logs changes where the run resumes.

    Raises:
        RunComplete: nothing is left to do.
    """
    data = build_data(config, launch, model, log)
    prompts: list[SamplePrompt] = []
    if config.train.sample_prompts or config.train.sample_chat:
        read_prompts = resolve("engine.training.samples:read_prompts")
        prompts = read_prompts(config, data.tokenizer, model.decoder, data.train.family)
    read = PlannedData(
        data=data,
        fingerprint=data.train.fingerprint(),
        prompts=prompts,
        step_plan=plan_steps(config, data.train.order, step=start.step, consumed=start.consumed),
    )
    if (point := start.point) is None:
        return read
    if (sentence := point.completion(config, read.step_plan, start.best)) is not None:
        if launch.rank == 0:
            tidy(folder.path, config.checkpoint, log.info)
        raise RunComplete(sentence, step=start.step, run_dir=folder.path)
    log.info(f"resuming from {point.path} after step {point.step}, {counted(point.consumed, 'sample')} consumed")
    for difference in point.differences(config, read.step_plan, data, read.fingerprint):
        log.warning(difference)
    return read
