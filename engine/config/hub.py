"""Recognises names on the Hugging Face hub where a path was expected, and resolves them to folders of this machine.

A name is resolved in one place, before anything is read, so that everything behind it sees a folder. Without
`--download` (`hub.download`) only the cache of huggingface_hub is looked at. The work is done by `engine.hub`, which is
loaded only where a name was given.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

from engine.seams import resolve

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\w[\w./-]*))?", re.ASCII)
_FILES = (".jsonl", ".json", ".txt", ".csv", ".parquet", ".bin", ".idx", ".jinja", ".model", ".yaml", ".yml")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
DATA_PREFIX = "hub:"
"""Begins the name of a data set on the hub where a file could stand."""

Need = Literal["model", "config", "tokenizer", "adapter", "either"]
"""The part of a repository that is used: all of a model, its config.json, its tokenizer, an adapter, or a model or an
adapter, whichever it holds."""


@dataclass(frozen=True, slots=True)
class HubName:
    """The name of a model or an adapter on the hub: OWNER/NAME, or OWNER/NAME@REVISION.

    Args:
        repo: OWNER/NAME.
        revision: a branch, a tag or a commit; None for the default branch.
    """

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


def parse_name(given: str | Path) -> HubName | None:
    """Returns the name that a text has the form of; None where it has the form of a path."""
    text = str(given)
    found = _NAME.fullmatch(text)
    if found is None or text.lower().endswith(_FILES) or ".." in text or "--" in found["repo"]:
        return None
    return HubName(found["repo"], found["revision"])


def looks_like_hub_name(given: str | Path) -> bool:
    """Returns whether a path that does not exist has the form of a name, and OWNER is no folder here either."""
    name = parse_name(given)
    if name is None or Path(given).exists():
        return False
    return name.revision is not None or not Path(given).parent.is_dir()


@overload
def local_folder(given: str, *, download: bool, need: Need = ...) -> str: ...
@overload
def local_folder(given: Path, *, download: bool, need: Need = ...) -> Path: ...
@overload
def local_folder(given: None, *, download: bool, need: Need = ...) -> None: ...
def local_folder(given: str | Path | None, *, download: bool, need: Need = "model") -> str | Path | None:
    """Returns the folder of a name on the hub, and any other path as it is; a folder of that name here comes first.

    A name whose snapshot is neither in the cache nor may be downloaded is returned too: it is no path that exists, and
    the check of the option that it was given to says so.

    Args:
        given: a path or a name; None where an option was left out.
        download: whether the hub may be asked.
        need: the part of the repository that will be used.

    Raises:
        UserError: the hub does not have it, does not give it, or cannot be reached.
    """
    if given is None or (name := parse_name(given)) is None or Path(given).exists():
        return given
    found: Path | None = resolve("engine.hub.snapshots:find_snapshot")(name, download=download, need=need)
    return given if found is None else type(given)(found)


def name_of_snapshot(folder: str | Path) -> HubName | None:
    """Returns the name and commit of a folder in the hub's cache; None for any other folder."""
    path = Path(folder)
    found = _SNAPSHOT.fullmatch(path.parent.parent.name)
    if found is None or path.parent.name != "snapshots" or _COMMIT.fullmatch(path.name) is None:
        return None
    return HubName(f"{found['owner']}/{found['name']}", path.name)


def recorded(folder: str | Path) -> str:
    """Returns a path as records of a run have it: name and commit of a snapshot, which is found on any machine."""
    name = name_of_snapshot(folder)
    return str(folder) if name is None else str(name)


def shown(folder: str) -> str:
    """Returns a path as lines for a person have it: a snapshot by its name and the beginning of its commit."""
    name = name_of_snapshot(folder)
    return folder if name is None or name.revision is None else f"{name.repo}@{name.revision[:12]}"


def instead_of(given: str | Path, otherwise: str, kind: Literal["model", "dataset"] = "model") -> str:
    """Returns advice on a path that does not exist, to be appended to "which is not a folder" and the like.

    Args:
        given: the text where a path was expected.
        otherwise: the advice where the text does not look like a name on the hub.
        kind: of the repository.
    """
    if not looks_like_hub_name(given):
        return f": {otherwise}"
    known = f", but looks like a {kind} on the Hugging Face hub"
    if kind == "dataset":
        return f"{known}: give {DATA_PREFIX}{given}, with --download where it was not downloaded before"
    name = parse_name(given)
    lacks: str = resolve("engine.hub.snapshots:state_in_cache")(name)
    return f"{known}, {lacks}: add --download, which fetches it"
