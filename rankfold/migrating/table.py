"""The tables of other trainers (tables/*.yaml): the options that their keys set, and their defaults for absent keys.

An absent key means the other trainer's default, never this engine's. So each option that a trainer's keys can set has
an entry in its defaults, which is written into the run's file where it differs from this engine's own default.

README.md explains the entries of a table.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from engine.config.option_names import sections
from engine.config.run import RunConfig
from engine.seams import resolve
from rankfold.migrating.conversion import NONE, Conversion, Rule, dropped, kind_of
from rankfold.migrating.given import Given
from rankfold.migrating.trainers import shared

_FOLDER = Path(__file__).parent / "tables"
IGNORED = "no option corresponds to it: it always holds here, or has no effect"


@dataclass(frozen=True, slots=True)
class Default:
    """A trainer's default for an option.

    Args:
        value: of the option here; or a function of the input that gives it, None where nothing follows.
        where: the trainer's own place for it, as Class.field or file: name.
    """

    value: Any
    where: str

    def of(self, conversion: Conversion) -> Any:
        return self.value(conversion) if callable(self.value) else self.value


@dataclass(frozen=True, slots=True)
class Choice:
    """A default that depends on the input.

    Args:
        what: the fact or option it depends on: "fact NAME", "option NAME", or "module.function" in trainers/.
        values: by the word that it is; "other" is for all others.
    """

    what: str
    values: Mapping[Any, Any]

    def __call__(self, conversion: Conversion) -> Any:
        kind, _, name = self.what.partition(" ")
        known = {"fact": conversion.facts, "option": conversion.options}
        word = known[kind].get(name) if kind in known else function(self.what)(conversion)
        return self.values.get(word, self.values["other"])


@dataclass(frozen=True, slots=True)
class Ours:
    """An option that keeps this engine's default: the trainer has none that could be written, or nothing computed
    changes.

    Args:
        why: in one clause.
    """

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """A trainer whose configurations can be converted.

    Args:
        name: as the report calls it.
        rules: key -> its rule.
        defaults: full name of an option here -> the trainer's default where no key sets it.
        adapters: whether the input trains adapters; all parameters train where it does not.
        finish: called once all keys are read, before the defaults.
        dropout_with_answers: whether adapters keep their dropout where answers are compared.
        installed: classes whose fields are known.
    """

    name: str
    rules: Mapping[str, Rule]
    defaults: Mapping[str, Default | Ours]
    adapters: Callable[[Conversion], bool]
    finish: Callable[[Conversion], None]
    dropout_with_answers: bool = True
    installed: tuple[str, ...] = field(default=())

    def rule(self, key: str) -> Rule | None:
        """Returns the rule for `key`, or for all keys that begin as it does."""
        return find_rule(self.rules, key)

    def field_of_package(self, key: str) -> Rule | None:
        """Returns the rule for a field of the trainer's installed classes that its table does not name."""
        return dropped(IGNORED) if any(key in class_fields(place) for place in self.installed) else None


@lru_cache(maxsize=32)
def trainer(table: str) -> Trainer:
    """Returns the trainer that a table describes."""
    data = read_table(table)
    return Trainer(
        name=data["name"],
        rules=table_rules(table),
        defaults=_defaults(table),
        adapters=_adapters(_inherited(table, "adapters")),
        finish=function(data["finish"]),
        dropout_with_answers=data.get("dropout with answers", True),
        installed=tuple((_inherited(table, "installed") or "").split()),
    )


def _inherited(table: str, entry: str) -> Any:
    """Returns an entry of a table, or of the nearest of those that it starts from; None where none has it."""
    data = read_table(table)
    found = (_inherited(base, entry) for base in data.get("from", ()))
    return data[entry] if entry in data else next((one for one in found if one is not None), None)


def _adapters(entry: bool | str) -> Callable[[Conversion], bool]:
    """Returns whether adapters train: a function says so; else the fact "lora", and without it `entry`, or whether one
    of the keys in it was given.
    """
    if isinstance(entry, str) and "." in entry:
        return function(entry)  # type: ignore[no-any-return]
    if isinstance(entry, bool):
        return lambda conversion: bool(conversion.facts.get("lora", entry))
    return lambda conversion: bool(conversion.facts.get("lora", conversion.given(*entry.split())))


@lru_cache(maxsize=32)
def table_rules(table: str) -> Mapping[str, Rule]:
    """Returns the rules of a table, with those of the tables that it starts from."""
    data = read_table(table)
    rules: dict[str, Rule] = {}
    for base in data.get("from", ()):
        rules |= table_rules(base)
    for key in data.get("without", "").split():
        del rules[key]
    rules |= _own_rules(data)
    if data.get("empty is absent"):
        rules = {key: shared.unless_empty(rule) for key, rule in rules.items()}
    for key, block in data.get("blocks", {}).items():
        rules |= {f"{key}.{name}": rule for name, rule in _own_rules(read_table(block)).items()}
    return rules


def find_rule(rules: Mapping[str, Rule], key: str) -> Rule | None:
    """Returns the rule of `key`; else that of its longest prefix that is in `rules` with a * after it."""
    if key in rules:
        return rules[key]
    beginnings = (f"{key[:end]}*" for end in range(len(key), 0, -1) if key[end - 1] in "._")
    return next((rules[name] for name in beginnings if name in rules), None)


@lru_cache(maxsize=512)
def engine_default(option: str) -> Any:
    """Returns this engine's default for `option`."""
    section, _, leaf = option.rpartition(".")
    owner = sections()[section] if section else RunConfig
    default = next(one.default for one in fields(owner) if one.name == leaf)
    return list(default) if isinstance(default, tuple) else default


def function(name: str) -> Any:
    """Returns the "module.function" of the folder trainers/."""
    module, _, attribute = name.partition(".")
    return resolve(f"{__package__}.trainers.{module}:{attribute}")


@lru_cache(maxsize=16)
def class_fields(place: str) -> frozenset[str]:
    """Returns the fields of an installed dataclass, none where it is not installed. Its file is read and not imported:
    importing transformers takes seconds.

    Args:
        place: package, modules and class, with dots between them.
    """
    package, *modules, name = place.split(".")
    spec = importlib.util.find_spec(package)
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    path = folder.joinpath(*modules).with_suffix(".py")
    if spec is None or not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    found = [one.target for body in bodies for one in body if isinstance(one, ast.AnnAssign)]
    return frozenset(target.id for target in found if isinstance(target, ast.Name))


@lru_cache(maxsize=32)
def read_table(table: str) -> dict[str, Any]:
    """Returns the content of a file of tables/."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # twenty times as fast, where libyaml is there
    found: dict[str, Any] = yaml.load((_FOLDER / f"{table}.yaml").read_text(encoding="utf-8"), Loader=loader)
    return found


def _option(head: str, note: str) -> Rule:
    """Returns the rule of a key that is an option of this engine."""
    name, kind = head.split()
    read = kind_of(kind)

    def rule(conversion: Conversion, given: Given) -> None:
        conversion.take(given, name, read(given), note)

    return Rule(rule, (name,))


def _option_or_none(head: str, why: str) -> Rule:
    """Returns the rule of a key that is an option of this engine where it is given, and none for "None" or, of the kind
    positive, for numbers not above 0.
    """
    name, kind = head.split()
    read = kind_of("whole" if kind == "positive" else kind)

    def rule(conversion: Conversion, given: Given) -> None:
        value = None if given.value in NONE or given.value is False else read(given)
        if value is None or (kind == "positive" and value <= 0):
            conversion.drop(given, why)
        else:
            conversion.take(given, name, value)

    return Rule(rule, (name,))


def _choices(head: str, why: str) -> Rule:
    """Returns the rule of a key whose words are others than here: WORD=VALUE, a word that is the same, WORD= where the
    key is dropped, and * for all other words, which are unsupported without it.
    """
    name, *words = head.split()
    values = {word: value if equals else word for word, equals, value in (one.partition("=") for one in words)}

    def rule(conversion: Conversion, given: Given) -> None:
        value = values.get(str(given.value).lower(), values.get("*"))
        if value is None:
            conversion.unsupported(given, why)
        elif value:
            conversion.take(given, name, str(given.value) if value == "*" else value)
        else:
            conversion.drop(given, "switched off")

    return Rule(rule, (name,))


def _fact(head: str, said: str) -> Rule:
    """Returns the rule of a key that options follow from; its text in the report is `said`, or else their names."""
    name, kind, *options = head.split()
    read, became = kind_of(kind), said or ", ".join(options)
    return Rule(lambda conversion, given: conversion.add_fact(given, name, read(given), became), tuple(options))


def _function(head: str, said: str) -> Rule:
    name, *arguments = head.split()
    found = function(name)
    if arguments or said:
        return found(*arguments, *([said] if said else []))  # type: ignore[no-any-return]
    return found if isinstance(found, Rule) else Rule(found)


_BUILDERS: dict[str, Callable[[str, str], Rule]] = {
    "options": _option,
    "options or auto": lambda head, said: shared.auto_or(_option(head, said)),
    "options or none": _option_or_none,
    "choices": _choices,
    "facts": _fact,
    "facts or auto": lambda head, said: shared.auto_or(_fact(head, said)),
    "functions": _function,
    "functions or auto": lambda head, said: shared.auto_or(_function(head, said)),
    "only": shared.only,
    "unsupported": lambda why, _: shared.off_or_unsupported(why),
    "only_or_refused": shared.only_or_refuse,
    "refused": lambda what, _: shared.off_or_refuse(what),
    "because": lambda why, _: dropped(why),
}
"""Entry of a table -> the function that makes a rule of its two texts, before and after " | "."""


RULE_ENTRIES = frozenset(_BUILDERS)
"""Entries of a table whose values are keys."""


def _own_rules(data: Mapping[str, Any]) -> dict[str, Rule]:
    rules = dict.fromkeys(data.get("ignored", "").split(), dropped(IGNORED))
    for entry, build in _BUILDERS.items():
        for text, keys in data.get(entry, {}).items():
            head, _, said = str(text).partition(" | ")
            rules |= dict.fromkeys(keys.split(), build(head, said))
    return rules


def _defaults(table: str) -> dict[str, Default | Ours]:
    data = read_table(table)
    found: dict[str, Default | Ours] = {}
    for base in data.get("defaults from", data.get("from", ())):
        found |= _defaults(base)
    found |= _own_defaults(data)
    for block in data.get("blocks", {}).values():
        found = _own_defaults(read_table(block)) | found
    return found


def _own_defaults(data: Mapping[str, Any]) -> dict[str, Default | Ours]:
    ours = {name: Ours(why) for why, names in data.get("ours", {}).items() for name in names.split()}
    entries = data.get("defaults", {}).items()
    return {name: Default(value_of(value), where) for name, (value, where) in entries} | ours


def value_of(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return function(value["from"]) if "from" in value else Choice(value["by"], value)
