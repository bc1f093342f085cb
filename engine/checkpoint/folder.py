"""Output folders that are either absent or whole, and the small files that travel with a model.

A result is made in a hidden sibling and renamed into place, so that a process that is killed never leaves half a
checkpoint under the name that was asked for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.checkpoint.manifest import MANIFEST
from engine.errors import UserError
from engine.files.durable import sync_folder

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
MERGE_REPORT = "merge_report.json"
"""What a merge's rounding did; about the folder it lies in, so it does not travel with the model."""

_AUXILIARY_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".md", ".py")
_AUXILIARY_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")


@contextmanager
def staged_folder(
    out: Path, *, overwrite: bool = False, inputs: Iterable[Path] = (), num_bytes: int = 0
) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its name when the block ends without an exception.

    Args:
        out: the folder to make; must be absent or empty.
        overwrite: replace an existing `out`, provided that it holds a model, adapter or checkpoint.
        inputs: folders that are read meanwhile; `out` must be neither one of them, nor inside or around one.
        num_bytes: about how much will be written; refused before the work where the disk has less.

    Raises:
        UserError: `out` cannot be used.
    """
    out = out.absolute()
    check_output(out, overwrite, inputs)
    staging = out.with_name(f".{out.name}.partial")
    if staging.exists():
        shutil.rmtree(staging)  # left by a run that was killed
    staging.mkdir(parents=True)
    if (free := shutil.disk_usage(staging).free) < num_bytes:
        staging.rmdir()
        raise UserError(
            f"--out {out} needs {num_bytes / 1e9:.2f} GB, but its disk has {free / 1e9:.2f} GB free: "
            "make room or give a folder on another disk."
        )
    try:
        yield staging
        sync_folder(staging)
        move_into_place(staging, out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def stats_of(folder: Path) -> Iterator[os.stat_result]:
    """Of what lies in a folder that others write to: a file that is renamed or deleted meanwhile is passed over."""
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            yield entry.stat()


def check_output(out: Path, overwrite: bool, inputs: Iterable[Path]) -> None:
    """Raises UserError where a folder cannot be made at `out`; see `staged_folder`."""
    resolved = out.resolve()
    for folder in inputs:
        source = folder.resolve()
        if resolved == source or resolved in source.parents or source in resolved.parents:
            raise UserError(f"--out {out} overlaps with {folder}, which is read: give a folder apart from it.")
    if out.is_file() or (out.is_symlink() and not out.exists()):
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


def move_into_place(staging: Path, out: Path) -> None:
    """Gives a finished folder its name, in place of what has that name now."""
    if out.is_dir() and any(out.iterdir()):
        old = out.with_name(f".{out.name}.replaced")
        if old.exists():
            shutil.rmtree(old)
        os.rename(out, old)
        os.rename(staging, out)
        shutil.rmtree(old)
    else:
        os.rename(staging, out)
    sync_folder(out.parent)


def auxiliary_files(folder: Path) -> list[Path]:
    """The config, tokenizer and text files of a model's folder, which conversions copy byte for byte."""
    return sorted(path for path in folder.iterdir() if path.is_file() and _is_auxiliary(path.name))


def _is_auxiliary(name: str) -> bool:
    if name in (MANIFEST, MERGE_REPORT) or name.endswith(".index.json") or name.startswith((".", "adapter_")):
        return False
    return name.endswith(_AUXILIARY_SUFFIXES) or name.startswith(_AUXILIARY_NAMES)
