"""Folders of models: which may be created or replaced, and the small files that are copied with a model."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from engine.checkpoint.manifest import MANIFEST
from engine.errors import UserError
from engine.files.durable import copy_file
from engine.files.refusals import reading, shown

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
MERGE_REPORT = "merge_report.json"
"""The report on a merge's rounding; it describes the folder it is in, so it is not copied with the model."""

_AUXILIARY_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".md", ".py")
ENCODING_FILE = "hf_quant_config.json"
"""ModelOpt's file about weights in few bits."""
_OF_ENCODINGS = (ENCODING_FILE, "quantize_config.json", "quant_config.json")
"""Files about how weights are stored, which conversions write otherwise."""
_AUXILIARY_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
_MAX_COMPANION_BYTES = 256 << 20
"""Size limit of a file beside the weights; the largest tokenizers have some 30 MB."""


def stats_of(folder: Path) -> Iterator[os.stat_result]:
    """Yields the stats of a folder's entries, skipping files that others rename or delete meanwhile."""
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            yield entry.stat()


def check_output(out: Path, overwrite: bool, inputs: Iterable[Path]) -> None:
    """Refuses to make a model, adapter or checkpoint at `out` where something else is there.

    Args:
        out: must be absent or an empty folder.
        overwrite: it may hold a model, adapter or checkpoint too, which is replaced.
        inputs: folders that are read at the same time; `out` must be neither one of them, nor inside or around one.

    Raises:
        UserError: it may not.
    """
    resolved = out.resolve()
    for folder in inputs:
        source = folder.resolve()
        if resolved == source or resolved in source.parents or source in resolved.parents:
            raise UserError(f"--out {out} overlaps with {folder}, which is read: give a folder apart from it.")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file: give a folder that does not exist yet.")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise UserError(f"--out {out} exists and is not empty: give another folder, or add --overwrite to replace it.")
    if not any((out / name).is_file() for name in (MANIFEST, CONFIG, ADAPTER_CONFIG)):
        raise UserError(
            f"--out {out} is not empty and holds no model, adapter or checkpoint, so --overwrite will not delete it: "
            "give another folder."
        )


class Companion(NamedTuple):
    """A small file that travels with a model.

    Args:
        name: in the model's folder.
        path: the file itself, which is elsewhere where the folder has a link.
        num_bytes: its size.
    """

    name: str
    path: Path
    num_bytes: int


class Companions(NamedTuple):
    """The config, tokenizer and text files of a model, which conversions copy byte for byte.

    Args:
        files: by name.
        left_out: why other files of that kind are not copied, a sentence each.
    """

    files: tuple[Companion, ...]
    left_out: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def copy_to(self, folder: Path) -> None:
        """Copies the files to a folder; raises UserError where one cannot be read or written."""
        for file in self.files:
            copy_file(file.path, folder / file.name)


def find_companions(folder: Path) -> Companions:
    """Returns the small files that travel with the model in `folder`.

    A model may come from an untrusted source, and copies may be published: so a link is followed
    only inside the folder, or inside the same repository of a Hugging Face cache, whose snapshots consist of links.

    Raises:
        UserError: config.json is a link to elsewhere, or the folder cannot be read.
    """
    files, left_out = [], []
    with reading(folder):
        homes = _homes(folder)
        for path in sorted(folder.iterdir()):
            if not _is_auxiliary(path.name):
                continue
            found = _resolved(path)
            if found is None or found.is_dir():
                continue
            status = found.stat()
            if not any(home in found.parents for home in homes):
                reason = f"it is a link to {shown(found)}, outside the model's folder"
            elif not stat.S_ISREG(status.st_mode):
                reason = "it is not a regular file"
            elif status.st_size > _MAX_COMPANION_BYTES:
                reason = f"it has {status.st_size / 1e9:.2f} GB, too much for a file beside the weights"
            else:
                files.append(Companion(path.name, found, status.st_size))
                continue
            if path.name == CONFIG:
                raise UserError(f"{path} is not taken: {reason}; put the file itself there.")
            left_out.append(f"{shown(path.name)} is not copied: {reason}")
    return Companions(tuple(files), tuple(left_out))


def _homes(folder: Path) -> list[Path]:
    """Returns the folders whose files are the model's own: itself, and the blobs beside a snapshot of a Hugging Face
    cache.
    """
    real = folder.resolve()
    repository = real.parent.parent
    is_snapshot = real.parent.name == "snapshots" and repository.name.startswith("models--")
    return [real, repository / "blobs"] if is_snapshot else [real]


def _resolved(path: Path) -> Path | None:
    """Returns the target of a path; None where a link is broken."""
    try:
        return path.resolve(strict=True)
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # RuntimeError: a loop of links
        return None


def _is_auxiliary(name: str) -> bool:
    if (
        name in (MANIFEST, MERGE_REPORT, *_OF_ENCODINGS)
        or name.endswith(".index.json")
        or name.startswith((".", "adapter_"))
    ):
        return False
    return name.endswith(_AUXILIARY_SUFFIXES) or name.startswith(_AUXILIARY_NAMES)
