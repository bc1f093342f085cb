"""The defaults of all tables against those recorded from the trainers' own sources, and these against the packages that
are installed."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from rankfold.migrating.recognition import sources
from rankfold.migrating.table import Choice, Default, class_fields, read_table, trainer, value_of
from tests.support.trainer_commands import LEAST, converted

RECORDED: dict[str, dict[str, Any]] = {
    entry["table"]: entry
    for entry in json.loads((Path(__file__).parent / "recorded_defaults.json").read_text(encoding="utf-8"))
}
"""Table -> version, and for each option `theirs`: the trainer's keys and their defaults, read from `file`; and `here`,
the option's value, where it is not the same."""


@pytest.mark.parametrize("table", [table for tables in sources().values() for table in tables])
def test_defaults_are_as_recorded(table: str) -> None:
    """A default that the trainer does not have fails; one without an entry has to be looked up and recorded."""
    recorded = {one["option"]: one for one in RECORDED[table]["defaults"]}
    defaults = read_table(table).get("defaults", {})
    assert defaults.keys() == recorded.keys() and RECORDED[table]["version"]
    conversion, _ = converted(LEAST[trainer(table).name])
    for option, (value, where) in defaults.items():
        one = recorded[option]
        theirs = list(one.get("theirs", {}).values())
        expected = one["here"] if "here" in one else theirs[0]
        found = value_of(value)
        if isinstance(found, Choice):
            found = {str(word): value for word, value in found.values.items() if word != "by"}
        assert Default(found, where).of(conversion) == expected, (option, where)
        assert not theirs or one["file"], option


PACKAGES = {
    "TrainingArguments": "transformers", "LoraConfig": "peft", "SFTConfig": "trl", "DPOConfig": "trl",
    "KTOConfig": "trl", "ModelConfig": "trl", "GRPOConfig": "trl", "CPOConfig": "trl.experimental.cpo",
}  # fmt: skip


@pytest.mark.parametrize("table", ["hugging_face", "trl", "trl_grpo", "axolotl"])
def test_recorded_defaults_are_those_of_the_installed_packages(table: str) -> None:
    checked = 0
    for one in RECORDED[table]["defaults"]:
        for key, value in one.get("theirs", {}).items():
            kind, _, name = key.partition(".")
            if one["file"] == PACKAGES.get(kind):
                assert installed_default(kind, name) == value, (one["option"], key)
                checked += 1
    assert checked >= (3 if table == "axolotl" else 10)


def installed_default(kind: str, name: str) -> Any:
    """Returns the default of a field of an installed package's class."""
    found = getattr(importlib.import_module(PACKAGES[kind]), kind)
    field = next(one for one in dataclasses.fields(found) if one.name == name)
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return getattr(default, "value", default)


@pytest.mark.parametrize(
    ("place", "package", "kind"),
    [
        ("transformers.training_args.TrainingArguments", "transformers", "TrainingArguments"),
        ("peft.tuners.lora.config.LoraConfig", "peft", "LoraConfig"),
    ],
)
def test_fields_that_are_read_are_those_of_the_class(place: str, package: str, kind: str) -> None:
    """They are read from its file; those of a package that is not installed are none."""
    found = getattr(importlib.import_module(package), kind)
    own = {one.name for one in dataclasses.fields(found)}
    assert own - class_fields(place) <= {one.name for base in found.__bases__ for one in _fields(base)}
    assert class_fields(place) <= own and len(class_fields(place)) > 30
    assert class_fields("no_such_package.module.Arguments") == frozenset()


def _fields(kind: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
