"""Lines about what is not wrong, but may not be meant: what nodes do not find, and what is lost with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.config.distillation import BASE
from engine.config.hub import DATA_PREFIX, looks_like_hub_name
from engine.config.paths import PATH_OPTIONS
from engine.config.rollout import NamedObject, RewardSource
from engine.config.run import RunConfig
from engine.sentences import listed
from rankfold.launching.job import Job

_HUB_PLACES = ("HF_HOME", "HF_HUB_CACHE")
_NO_PATHS = (("checkpoint.resume", "auto"), ("distillation.teachers", BASE))


def remarks(target: str, job: Job, config: RunConfig) -> list[str]:
    """Returns the lines.

    Args:
        target: of the file.
        config: of the run.
    """
    found = []
    if config.checkpoint.resume != "auto":
        found.append(
            f"checkpoint.resume is {config.checkpoint.resume}: each start of the job resumes there, not where its last "
            "one ended; auto does that"
        )
    if not config.checkpoint.every:
        found.append(
            "checkpoint.every is not set: a run that is told to stop saves, but after a crash or a lost machine it "
            "starts from its beginning"
        )
    containers = target not in ("slurm", "ray")
    found += _about_the_hub(job, config, containers)
    if containers:
        found += _about_trackers(job, config)
        found += _about_storage(target, job, config)
    return found


def _about_the_hub(job: Job, config: RunConfig, containers: bool) -> Iterator[str]:
    names = listed(name for _, name in _paths(config) if _is_on_hub(name))
    if not names:
        return
    if not config.hub.download:
        yield (
            f"{names}: nodes look only into their cache of the Hugging Face hub, because hub.download is not set: add "
            "--download, or fill a cache that all nodes share"
        )
    if containers and not any(name in job.environment for name in _HUB_PLACES):
        yield (
            f"{names}: the cache of the Hugging Face hub is lost with each container: add --env HF_HOME=FOLDER on "
            "storage of --mount"
        )


def _about_trackers(job: Job, config: RunConfig) -> Iterator[str]:
    given = {*job.environment, *job.secrets}
    if config.log.wandb_project is not None and not given & {"WANDB_API_KEY", "WANDB_MODE"}:
        yield "log.wandb_project is set, but a container has no key of its own: add --secret WANDB_API_KEY"
    if config.log.mlflow_experiment is not None and "MLFLOW_TRACKING_URI" not in given:
        yield "log.mlflow_experiment is set: add --env MLFLOW_TRACKING_URI=ADDRESS, or its files stay in the container"


def _about_storage(target: str, job: Job, config: RunConfig) -> Iterator[str]:
    relative = [
        path for option, path in _paths(config)
        if not path.startswith("/") and "://" not in path and not _is_on_hub(path)
    ]  # fmt: skip
    if relative and job.workdir is None:
        yield f"relative to the container's folder, as --workdir is not given: {listed(relative)}"
    if not job.mounts:
        yield "no --mount is given: the image must hold model and data, and the run's folder is lost with the node"
        return
    holder = next((one for one in job.mounts if one.holds(job.run_dir)), None)
    if holder is None:
        yield f"the run's folder, {job.run_dir}, is on no storage of --mount: it is lost with the node"
    elif holder.kind == "host" and job.nodes > 1:
        yield f"the run's folder, {job.run_dir}, is on the nodes: all must have the same shared folder there"
    elif target == "skypilot" and holder.kind != "volume":
        yield (
            f"the run's folder, {job.run_dir}, is in a bucket, to which a node copies files after they are written: "
            "the last checkpoint may be lost with the node, and others see it late; a volume has neither fault"
        )


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields the options that name files, folders and repositories, with each of their names."""
    for option in PATH_OPTIONS:
        section, _, name = option.partition(".")
        value: Any = getattr(getattr(config, section), name)
        texts = () if value is None else (value,) if isinstance(value, str | Path) else value
        for text in map(str, texts):
            if option == "data.mix":
                text = text.rpartition("=")[0]
            elif option == "rollout.rewards":
                text = RewardSource.parse(text).opened or ""
            elif option in ("rollout.tools", "rollout.environment"):
                text = NamedObject.parse(option, text).file or ""
            elif (option, text) in _NO_PATHS:
                continue
            if text:  # what is built in, or a Python program's own, is in no file
                yield option, text


def _is_on_hub(text: str) -> bool:
    return text.startswith(DATA_PREFIX) or looks_like_hub_name(text)
