"""Data sets of the Hugging Face hub that an input names, as this engine's hub:OWNER/NAME?KEY=VALUE."""

from __future__ import annotations

import re
from typing import Any

from engine.config.hub import HubName, looks_like_hub_name
from engine.seams import resolve
from rankfold.migrating.conversion import NONE, Conversion
from rankfold.migrating.given import Given

_SPLIT = re.compile(r"(?P<name>[\w.-]+)(?:\[:(?P<limit>[1-9]\d*)\])?", re.ASCII)
"""A split, or its first records: train, train[:1000]."""


def is_named(value: Any) -> bool:
    """Returns whether a value names a data set on the hub, rather than a file or folder of this machine."""
    return isinstance(value, str) and looks_like_hub_name(value)


def add(conversion: Conversion, given: Given, which: str) -> None:
    """Keeps the name of a data set for `which` of data.train and data.validation until its split is known."""
    fact, name = f"{which} on the hub", str(given.value)
    earlier = conversion.facts.get(fact)
    if earlier not in (None, name) and given.source.endswith(".py"):
        conversion.to_fill.append(f"{which}: {given.source} loads {earlier} and {name}; the last is written")
    said = f"hub:{name}" if which == "data.train" else "its test split, where there are evaluations"
    conversion.add_fact(given, fact, name, f"{which}: {said}")


def take(conversion: Conversion, which: str) -> None:
    """Sets `which` of data.train and data.validation to the data set on the hub that the input has for it, if any."""
    facts = conversion.facts
    name, split = facts.get(f"{which} on the hub"), facts.get("train_split")
    if which == "data.validation":
        split = facts.get("test_split")
        if name is None and split not in (*NONE, False):
            name = facts.get("data.train on the hub")
        elif name is not None and split in (*NONE, False):
            conversion.to_fill.append(f"{which}: the input has no split of {name} for it; train is written")
    if name is not None:
        written = with_parts(conversion, which, name, split=split, subset=facts.get("subset"))
        conversion.set_default("derived", "data set and split", which, written)


def with_parts(
    conversion: Conversion, which: str, name: str, *, split: Any = None, subset: Any = None, revision: Any = None
) -> str:
    """Returns the name of a data set as data.train has it; adds to the remaining work where a split has no name here.

    Args:
        conversion: the result so far.
        which: the option.
        name: OWNER/NAME, with its revision or without one.
        split: such as train or train[:1000]; none for train.
        subset: none for the data set's own default.
        revision: none for that in the name.
    """
    repo, _, at = name.partition("@")
    parts = {"split": "train", "limit": None}
    if split not in (*NONE, False):
        found = _SPLIT.match(str(split))
        if found is not None:
            parts = {"split": found["name"], "limit": found["limit"]}
        if found is None or found.end() < len(str(split)):
            conversion.to_fill.append(
                f"{which}: {split} is no split by name; {parts['split']} is written: name another, or add limit=RECORDS"
            )
    limit = parts["limit"]
    return str(
        resolve("engine.hub.data_names:DataName")(
            repo=HubName(repo, str(revision) if revision not in NONE else at or None),
            subset=None if subset in NONE else str(subset),
            split=parts["split"],
            limit=None if limit is None else int(limit),
        )
    )
