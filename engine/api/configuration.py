"""Makes the configuration of a run of what a Python program has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

import yaml

from engine.config.keys import check_text
from engine.config.load import parse_config
from engine.config.option_names import sections
from engine.config.rollout import IN_PROGRAM
from engine.config.rules import check_config, check_files
from engine.config.run import RunConfig
from engine.config.snapshots import with_snapshots
from engine.errors import UserError

AnyPath = str | PathLike[str]
_LATER = f"{IN_PROGRAM}later"


def load_config(source: AnyPath | Mapping[str, Any] | None = None, **options: Any) -> RunConfig:
    """Makes the configuration of a run from a YAML file, a mapping, keywords, or several of them.

    Args:
        source: path of a YAML file, or a mapping as such a file has: {"model": {"path": ...}}, or {"model.path": ...}.
        options: sections, or options without one, which win over `source`: lora={"rank": 8}, trainable=["lm_head"].
            Options that neither gives keep their defaults; `rankfold train --help all` explains every option.

    Returns:
        The configuration, checked as far as it can be without the number of ranks and the arguments of `train`. It is
        frozen.

    Raises:
        UserError: an unknown option, a value of the wrong kind, values that clash, or a path that does not exist.
    """
    given = _by_section([*(source.items() if isinstance(source, Mapping) else ()), *options.items()])
    if given:
        check_text(yaml.safe_dump(given), "The configuration")  # names, before values become arguments
    arguments = [] if source is None or isinstance(source, Mapping) else [f"--config={fspath(source)}"]
    for name, value in given.items():
        named = {f"{name}.{key}": one for key, one in value.items()} if name in sections() else {name: value}
        arguments += [f"--{option}={_argument(one)}" for option, one in named.items()]
    config = with_snapshots(parse_config(arguments))
    _check(config)
    return config


def _check(config: RunConfig) -> None:
    """Checks a configuration, where records and functions may be given later.

    Raises:
        UserError: it cannot work, whatever is given.
    """
    completed = [config]
    if config.data.train is None and not config.rollout.has_tasks:
        completed = [replace(config, data=replace(config.data, train=_LATER))]
    if not config.rollout.rewards:
        completed += [replace(one, rollout=replace(one.rollout, rewards=(_LATER,))) for one in completed]
    if not config.data.evaluates:
        completed += [replace(one, data=replace(one.data, validation=_LATER)) for one in completed]
    flaws = []
    for one in completed:
        try:
            check_config(one)
            return check_files(one, {_LATER})
        except UserError as flaw:
            flaws.append(flaw)
    raise flaws[0]


def _by_section(options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Sections, and options without one; later values win, and names may have their section: optim.lr."""
    found: dict[str, Any] = {}
    for name, value in options:
        section, _, option = str(name).rpartition(".")
        plain = _plain({option: value} if section else value)
        key = section or option
        both = isinstance(plain, dict) and isinstance(found.get(key), dict)
        found[key] = {**found[key], **plain} if both else plain
    return found


def _plain(value: Any) -> Any:
    """Mappings, lists and paths as YAML has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, PathLike):
        return fspath(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise UserError(
        f"The configuration has a value of type {type(value).__name__}, but texts, numbers, lists and mappings are "
        "expected: convert it."
    )


def _argument(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
