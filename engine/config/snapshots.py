"""Resolves the names on the Hugging Face hub in a configuration, and writes them as records of a run have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from engine.config.distillation import BASE, is_server
from engine.config.hub import DATA_PREFIX, HubName, Need, local_folder, parse_name, recorded
from engine.config.run import RunConfig
from engine.config.run_files import CHECKPOINTS, CONFIG
from engine.errors import UserError
from engine.files.documents import read_text
from engine.files.strict_yaml import YamlFlaw, parse_yaml
from engine.seams import resolve


def with_snapshots(config: RunConfig, *, model_need: Need = "model") -> RunConfig:
    """Returns the configuration with folders in place of names of a model, a tokenizer, an adapter to start from and
    teachers, and with a commit in each name of a data set.

    A run that resumes gets the commits that it has recorded, also where a branch has moved since.

    Args:
        model_need: the part of the model that will be read, where its weights are; with "config" of teachers likewise,
            and nothing else is read, so that all other names stay as they are.

    Raises:
        UserError: as `local_folder`, or a data set that is not there.
    """
    before: Callable[[], dict[str, list[str]]] = cache(lambda: _resumed(config))
    need: Need = "tokenizer" if config.model.init == "random" and model_need == "model" else model_need
    found = replace(config, model=replace(config.model, path=_folder(config, config.model.path, need, before)))
    if teachers := config.distillation.teachers:
        named = tuple(
            one if one == BASE or is_server(one) else _folder(config, one, model_need, before) for one in teachers
        )
        found = replace(found, distillation=replace(found.distillation, teachers=named))
    if model_need == "config":
        return found
    tokenizer, adapter = config.data.tokenizer, config.lora.init_from
    if tokenizer is not None:
        found = replace(found, data=replace(found.data, tokenizer=_folder(config, tokenizer, "tokenizer", before)))
    if adapter is not None:
        found = replace(found, lora=replace(found.lora, init_from=_folder(config, adapter, "adapter", before)))
    return _with_data(found, before)


def records(config: RunConfig) -> RunConfig:
    """Returns the configuration with the names and commits of snapshots in place of their folders."""
    tokenizer, adapter = config.data.tokenizer, config.lora.init_from
    return replace(
        config,
        model=replace(config.model, path=recorded(config.model.path)),
        data=replace(config.data, tokenizer=None if tokenizer is None else recorded(tokenizer)),
        lora=replace(config.lora, init_from=None if adapter is None else recorded(adapter)),
        distillation=replace(config.distillation, teachers=tuple(map(recorded, config.distillation.teachers))),
    )


def _folder(config: RunConfig, given: str, need: Need, before: Callable[[], dict[str, list[str]]]) -> str:
    name = parse_name(given)
    if name is None or Path(given).exists():
        return given
    if not name.is_pinned:
        known = [one for text in before()["folders"] if (one := parse_name(text)) is not None and one.repo == name.repo]
        if known and name.revision is not None:  # a run's branch, which may have moved since, or another one
            noted = resolve("engine.hub.snapshots:noted_commit")(name)
            known = [one for one in known if one.revision == noted]
        name = next(iter(known), name)
    text = str(HubName(name.repo, name.revision))
    found = local_folder(text, download=config.hub.download, need=need)
    return given if found == text else found


def _with_data(config: RunConfig, before: Callable[[], dict[str, list[str]]]) -> RunConfig:
    data = config.data

    def found(text: str) -> str:
        if not text.startswith(DATA_PREFIX):
            return text
        find = resolve("engine.hub.data_sets:find_data")
        name: str = find(text, download=config.hub.download, before=before()["data"])
        return name

    mix = [entry.rpartition("=") for entry in data.mix]
    named = replace(
        data,
        train=None if data.train is None else found(data.train),
        validation=None if data.validation is None else found(data.validation),
        mix=tuple(f"{found(path)}{sign}{weight}" for path, sign, weight in mix),
    )
    return config if named == data else replace(config, data=named)


def _resumed(config: RunConfig) -> dict[str, list[str]]:
    """Returns the names in the configuration that the run to resume has recorded: of folders, and of data."""
    found = _recorded_sections(config)
    model, data, lora = (one if isinstance(one := found.get(name), dict) else {} for name in ("model", "data", "lora"))
    mix = data.get("mix")
    texts = [data.get("train"), data.get("validation")]
    texts += [str(entry).rpartition("=")[0] for entry in mix] if isinstance(mix, list) else []
    teachers = found.get("distillation")
    teachers = teachers.get("teachers") if isinstance(teachers, dict) else None
    folders = [model.get("path"), data.get("tokenizer"), lora.get("init_from")]
    folders += teachers if isinstance(teachers, list) else []
    return {
        "folders": [text for text in folders if isinstance(text, str)],
        "data": [text for text in texts if isinstance(text, str) and text.startswith(DATA_PREFIX)],
    }


def _recorded_sections(config: RunConfig) -> dict[str, Any]:
    """Returns the recorded configuration; empty where there is none."""
    options = config.checkpoint
    given = options.resume_path if options.resume_path is not None else options.dir
    if given is None or options.resume == "none":
        return {}
    folder = Path(given).absolute()
    run = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder
    try:
        found = parse_yaml(read_text(run / CONFIG)) if (run / CONFIG).is_file() else None
    except (UserError, YamlFlaw):
        return {}  # which opening the run says better
    return found if isinstance(found, dict) else {}
