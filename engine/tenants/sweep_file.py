"""A configuration file that describes several runs over one base: a list `adapters` beside the sections of a run.

Each entry of the list has a name, and sections of which each option takes the place of that at the top of the file. An
entry becomes the configuration of a run of its own, which knows nothing of the others. Nothing here needs torch.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from engine.config.keys import ADAPTERS, JOINED_TOKENS
from engine.config.load import config_files, load_text
from engine.config.run import RunConfig
from engine.config.units import read_length
from engine.errors import UserError
from engine.files.documents import read_text
from engine.files.strict_yaml import YamlFlaw, compose_yaml
from engine.sentences import listed

SHARED = ("model", "parallel", "memory")
"""Sections that say what the base is and where it lies: the same in all runs."""
_OF_THE_PROCESS = ("train.deterministic", "train.collective_timeout", "train.hang_report_after")
"""Options of the process, which all runs share."""
_TOKENS = 4096
_MOST = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run of the list.

    Args:
        name: of it.
        config: of it, with the options that it shares.
    """

    name: str
    config: RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Several runs over one base.

    Args:
        entries: the runs, in the order of the file.
        tokens: of a micro-batch of several runs, at most, unless one part alone has more.
    """

    entries: tuple[Entry, ...]
    tokens: int


def read_sweep(arguments: Sequence[str]) -> Sweep:
    """Reads the runs that a command line means.

    Args:
        arguments: with one --config; the others are options of every run, and win over the file.

    Raises:
        UserError: an entry is malformed, or sets what runs over one base share.
    """
    path, others = _split(arguments)
    source = f"--config {path}"
    try:
        node = compose_yaml(read_text(path, "give the path of a YAML file after --config"))
    except YamlFlaw as flaw:
        raise UserError(f"{source} {flaw}.") from None
    assert isinstance(node, yaml.MappingNode), "the file has been read before"
    top = dict[str, yaml.Node]()
    for key, value in node.value:
        top[str(key.value)] = value
    listing, tokens = top.pop(ADAPTERS), _tokens(top.pop(JOINED_TOKENS, None), source)
    if not isinstance(listing, yaml.SequenceNode) or not 0 < len(listing.value) <= _MOST:
        raise UserError(f"{source} has {ADAPTERS}, but a list of 1 to {_MOST} runs is expected: give each a name.")
    entries = [_entry(one, number, top, source, others) for number, one in enumerate(listing.value, 1)]
    _check_apart(entries, source)
    return Sweep(entries=tuple(entries), tokens=tokens)


def _split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the file of the one --config, and the other words."""
    files, others, words = config_files([*arguments]), list[str](), iter(arguments)
    for word in words:
        if word == "--config":
            next(words, None)
        elif word == "--print_config":
            raise UserError("--print_config prints one run, but the file of --config lists several: leave it out.")
        elif not word.startswith("--config="):
            others.append(word)
    if len(files) != 1:
        raise UserError(f"{len(files)} files are given with --config, and one lists several runs: give that one alone.")
    return files[0], others


def _tokens(node: yaml.Node | None, source: str) -> int:
    if node is None:
        return _TOKENS
    try:
        tokens = read_length(node.value if isinstance(node, yaml.ScalarNode) else "")
    except ArgumentTypeError:
        tokens = 0
    if tokens < 1:
        raise UserError(f"{source} has {JOINED_TOKENS}, but a number of tokens is expected: use for example {_TOKENS}.")
    return tokens


def _entry(node: yaml.Node, number: int, top: dict[str, yaml.Node], source: str, others: list[str]) -> Entry:
    if not isinstance(node, yaml.MappingNode):
        raise UserError(
            f"{source} has an entry {number} of {ADAPTERS} that is no mapping: write `- name:` and options."
        )
    own = {str(key.value): value for key, value in node.value}
    name = own.pop("name", None)
    if not isinstance(name, yaml.ScalarNode) or _NAME.fullmatch(name.value) is None:
        given = f"the name {name.value[:80]!r}" if isinstance(name, yaml.ScalarNode) else "no name"
        raise UserError(
            f"{source}, entry {number} of {ADAPTERS}, has {given}, but up to 64 letters, digits, dots, dashes and "
            "underscores are expected: it names the run's folder."
        )
    where = f"{source}, entry {name.value} of {ADAPTERS},"
    for section in SHARED:
        if section in own:
            raise UserError(
                f"{where} has the section {section}, of which runs over one base have one: give it at the top."
            )
    if "trainable" in own or "trainable" in top:
        raise UserError(f"{where} has trainable, but runs over one base train adapters alone: leave it out.")
    text = yaml.serialize(_merged(top, own))
    try:
        config = load_text(text, where, others)
    except UserError as error:
        raise UserError(str(error) if where in str(error) else f"{where} cannot run: {error}") from None
    if config.trainable or config.lora.rank == 0:
        raise UserError(f"{where} trains no adapter, or more: set lora.rank to at least 1, and leave trainable out.")
    if config.log.profile_steps or config.log.communication:
        key = "profile_steps" if config.log.profile_steps else "communication"
        raise UserError(f"{where} has log.{key}, but what runs take turns in cannot be told apart: leave it out.")
    return Entry(name=name.value, config=_in_its_folder(name.value, config, own, others, where))


def _merged(top: dict[str, yaml.Node], own: dict[str, yaml.Node]) -> yaml.MappingNode:
    """Returns a run's document: the options at the top, and in their places those of the entry."""
    found = {**top}
    for section, value in own.items():
        before = top.get(section)
        if isinstance(before, yaml.MappingNode) and isinstance(value, yaml.MappingNode):
            named = {str(key.value) for key, _ in value.value}
            merged = copy(value)
            merged.value = [pair for pair in before.value if str(pair[0].value) not in named] + value.value
            value = merged
        found[section] = value
    pairs = [(yaml.ScalarNode("tag:yaml.org,2002:str", key), value) for key, value in found.items()]
    return yaml.MappingNode("tag:yaml.org,2002:map", pairs)


def _in_its_folder(
    name: str, config: RunConfig, own: dict[str, yaml.Node], others: Sequence[str], where: str
) -> RunConfig:
    """Returns the configuration with a folder of the run's own: the entry's, or one of its name in that at the top."""
    folder, section = config.checkpoint.dir, own.get("checkpoint")
    keys = [str(key.value) for key, _ in section.value] if isinstance(section, yaml.MappingNode) else []
    if folder is None:
        raise UserError(
            f"{where} has no checkpoint.dir: give one at the top, in which each run gets a folder of its name."
        )
    if "dir" in keys and not any(word.partition("=")[0] == "--checkpoint.dir" for word in others):
        return config
    return replace(config, checkpoint=replace(config.checkpoint, dir=str(Path(folder) / name)))


def _check_apart(entries: Sequence[Entry], source: str) -> None:
    """Checks that the runs have names and folders of their own, and one process."""
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{source} has several entries of {ADAPTERS} with the name {listed(twice)}: rename one.")
    folders: dict[Path, str] = {}
    for entry in entries:
        folder = Path(str(entry.config.checkpoint.dir)).resolve()
        if folder in folders:
            raise UserError(
                f"{source} has entries {folders[folder]} and {entry.name} of {ADAPTERS} with one checkpoint.dir, "
                f"{entry.config.checkpoint.dir}: give each its own."
            )
        folders[folder] = entry.name
    draws = entries[0].config.model.init == "random"
    for option in (*_OF_THE_PROCESS, *(["train.seed"] if draws else [])):
        section, _, key = option.partition(".")
        first, *rest = ((entry.name, getattr(getattr(entry.config, section), key)) for entry in entries)
        for name, value in rest:
            if value != first[1]:
                raise UserError(
                    f"{source}, entry {name} of {ADAPTERS}, has {option} {value}, and entry {first[0]} has {first[1]}, "
                    f"but runs over one base have {'one base, drawn from it' if draws else 'one process'}: give it at "
                    "the top."
                )
