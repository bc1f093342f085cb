"""Which changes are said when a run resumes: every option is one or the other, and every said one is seen."""

from __future__ import annotations

from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml

from engine.config.option import IGNORED, REPORTED, is_reported
from engine.config.option_names import option_fields, option_types, sections
from engine.config.resume_rules import changes


def test_every_option_is_reported_or_ignored() -> None:
    """A new option fails here until its field has decided which it is."""
    assert option_fields().keys() == option_types().keys()
    for name, declared in option_fields().items():
        assert declared.metadata.get("change") in (REPORTED, IGNORED), (
            f"{name} must be declared with engine.config.option"
        )


def _defaults() -> dict[str, Any]:
    values: dict[str, Any] = {"trainable": []}
    for section, kind in sections().items():
        values[section] = {
            field.name: list(field.default) if isinstance(field.default, tuple) else field.default
            for field in fields(kind)
            if field.name != "path"
        }
    values["model"]["path"] = "model"
    return values


def _another(kind: Any, value: Any) -> Any:
    """A value of the type that is not `value`."""
    if get_origin(kind) in (Union, UnionType):
        return _another(next(one for one in get_args(kind) if one is not type(None)), value)
    if get_origin(kind) is Literal:
        return next(one for one in get_args(kind) if one != value)
    if get_origin(kind) is tuple:
        return [0.5, 0.25] if get_args(kind)[0] is float else ["other"]
    if get_origin(kind) is dict:
        return {"other": 3}
    if kind is bool:
        return not value
    return {int: 77, float: 0.77, str: "other"}[kind]


@pytest.mark.parametrize("option", option_types())
def test_a_change_is_seen_where_it_is_said(option: str) -> None:
    before = _defaults()
    section, _, name = option.rpartition(".")
    after = yaml.safe_load(yaml.safe_dump(before))
    place = after[section] if section else after
    place[name] = _another(option_types()[option], place[name])
    found = changes(yaml.safe_dump(before), yaml.safe_dump(after))
    assert [change.option for change in found] == ([option] if is_reported(option_fields()[option]) else [])
    if found:
        assert str(found[0]).startswith(f"{option} ") and " -> " in str(found[0])


def test_what_an_older_checkpoint_does_not_know() -> None:
    before, after = _defaults(), _defaults()
    del before["optim"]["clip_grad_norm"], before["train"]["last_batch"], before["guards"]
    assert [str(change) for change in changes(yaml.safe_dump(before), yaml.safe_dump(after))] == [
        "train.last_batch full -> short"
    ]


def test_in_the_users_words() -> None:
    before, after = _defaults(), _defaults()
    after["optim"]["lr"], after["lora"]["dora"], after["train"]["steps"] = 1e-5, True, 30
    found = [str(change) for change in changes(yaml.safe_dump(before), yaml.safe_dump(after))]
    assert found == ["lora.dora false -> true", "optim.lr 0.0002 -> 1e-05", "train.steps null -> 30"]
