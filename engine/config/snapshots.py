"""Puts local folders in place of the names on the Hugging Face hub in a configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config.hub import HubName, Need, local_folder, parse_name, recorded
from engine.config.run import RunConfig
from engine.config.run_files import CHECKPOINTS, CONFIG
from engine.errors import UserError
from engine.files.documents import read_text
from engine.files.strict_yaml import YamlFlaw, parse_yaml


def with_snapshots(config: RunConfig, *, model_need: Need = "model") -> RunConfig:
    """Returns the configuration with the folders of names: of the model, the tokenizer and the adapter to start from.

    A run that resumes gets the snapshots that it has recorded, also where a branch has moved since.

    Args:
        model_need: the part of the model that will be read, where its weights are.

    Raises:
        UserError: as `local_folder`.
    """
    download = config.hub.download
    need: Need = "tokenizer" if config.model.init == "random" and model_need == "model" else model_need
    wanted: tuple[tuple[str, str, str | None, Need], ...] = (
        ("model", "path", config.model.path, need),
        ("data", "tokenizer", config.data.tokenizer, "tokenizer"),
        ("lora", "init_from", config.lora.init_from, "adapter"),
    )
    before: dict[str, Any] | None = None
    for section, option, given, part in wanted:
        if given is None or parse_name(given) is None or Path(given).exists():
            continue
        before = _resumed(config) if before is None else before
        known = before.get(section)
        pinned = _pinned(given, known.get(option) if isinstance(known, dict) else None)
        found = local_folder(pinned, download=download, need=part)
        if found != pinned:
            config = replace(config, **{section: replace(getattr(config, section), **{option: found})})
    return config


def records(config: RunConfig) -> RunConfig:
    """Returns the configuration with the names and commits of snapshots in place of their folders."""
    return replace(
        config,
        model=replace(config.model, path=recorded(config.model.path)),
        data=replace(config.data, tokenizer=_recorded(config.data.tokenizer)),
        lora=replace(config.lora, init_from=_recorded(config.lora.init_from)),
    )


def _recorded(path: str | None) -> str | None:
    return None if path is None else recorded(path)


def _pinned(given: str, before: object) -> str:
    """Returns a name with the commit that the resumed run has recorded for it, where it asks for no other."""
    name = parse_name(given)
    known = parse_name(before) if isinstance(before, str) else None
    if name is None or known is None or known.repo != name.repo or name.revision is not None:
        return given
    return str(HubName(name.repo, known.revision))


def _resumed(config: RunConfig) -> dict[str, Any]:
    """Returns the sections of the configuration that the run to resume has recorded; empty where there is none."""
    options = config.checkpoint
    folder = options.resume_path if options.resume_path is not None else options.dir
    if folder is None or options.resume == "none":
        return {}
    for place in (Path(folder), Path(folder).absolute().parent.parent):
        is_run = place == Path(folder) or Path(folder).absolute().parent.name == CHECKPOINTS
        if is_run and (place / CONFIG).is_file():
            try:
                found = parse_yaml(read_text(place / CONFIG))
            except (UserError, YamlFlaw):
                return {}  # which opening the run says better
            return found if isinstance(found, dict) else {}
    return {}
