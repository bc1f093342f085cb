"""Recognises names on the Hugging Face hub where a path was expected, and says how to download: nothing is fetched."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_FILES = (".jsonl", ".json", ".txt", ".parquet", ".bin", ".idx", ".jinja", ".model", ".yaml", ".yml")


def looks_like_hub_name(given: str | Path) -> bool:
    """Returns whether a path that does not exist has the form OWNER/NAME, and OWNER is no folder here either."""
    text = str(given)
    if _NAME.fullmatch(text) is None or text.lower().endswith(_FILES):
        return False
    return not Path(text).exists() and not Path(text).parent.is_dir()


def instead_of(given: str | Path, otherwise: str, kind: Literal["model", "dataset"] = "model") -> str:
    """Returns advice on a path that does not exist, to be appended to "which is not a folder" and the like.

    Args:
        given: the text where a path was expected.
        otherwise: the advice where the text does not look like a name on the hub.
        kind: of the repository.
    """
    if not looks_like_hub_name(given):
        return f": {otherwise}"
    name = str(given)
    known = f", but looks like a {kind} on the Hugging Face hub"
    if (cached := _cached(name, kind)) is not None:
        return f"{known}, which was downloaded before: give {cached}"
    flags = "" if kind == "model" else "--repo-type dataset "
    folder = name.rpartition("/")[2]
    then = f"give {folder}" if kind == "model" else f"give a file in {folder}"
    return f"{known}: download it with `hf download {flags}{name} --local-dir {folder}` and {then}"


def _cached(name: str, kind: str) -> Path | None:
    """Returns the newest snapshot of a repository in the cache of huggingface_hub."""
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub.constants import HF_HUB_CACHE

    snapshots = Path(HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    if not snapshots.is_dir():
        return None
    found = sorted((path for path in snapshots.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None
