"""The checkpoints in a run's folder: their paths, which are complete, and which are deleted.

A checkpoint is a folder `checkpoints/step_00000050` of a run. It is written under another name that ends in .tmp and
is renamed when complete, so that a folder without a suffix can be opened. A process that writes into a temporary folder
holds a lock on it, which the system releases however the process ends.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from engine.checkpoint.folder import stats_of
from engine.checkpoint.manifest import MANIFEST
from engine.config.run_files import CHECKPOINTS
from engine.errors import UserError
from engine.files import platforms
from engine.files.durable import delete_folder, sync_folder, write_durably
from engine.files.refusals import writing

_STEP = re.compile(r"^step_(\d{8,})$")
_KEPT = re.compile(r"^step_(\d{8,})\.old$")
_LEFTOVER = re.compile(r"^step_\d{8,}(\.[0-9a-z]+-\d+)?\.(tmp|old|deleting)$")
_BEST = "best.json"
_UNLOCKABLE_SECONDS = 3600.0
"""Seconds after which an untouched temporary folder counts as abandoned, where the file system has no locks."""


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Returns the folder of the checkpoint of `step`."""
    return run_dir / CHECKPOINTS / f"step_{step:08d}"


def staging_folder(run_dir: Path, step: int, token: str, number: int) -> Path:
    """Returns the temporary folder of the `number`-th save of the run that `token` names."""
    return checkpoint_folder(run_dir, step).with_suffix(f".{token}-{number}.tmp")


@contextmanager
def held(staging: Path) -> Iterator[None]:
    """Creates the temporary folder, unless another rank has, and holds it, so that it is not deleted as abandoned.

    Raises:
        UserError: the disk does not take it.
    """
    with writing(staging):
        staging.mkdir(parents=True, exist_ok=True)
        descriptor = platforms.open_folder(staging)
    try:
        is_free = platforms.lock(descriptor, shared=True)
        if is_free is False:
            raise UserError(f"{staging} is being deleted by another run: start one run at a time there.")
        if is_free is None:
            os.utime(staging)  # the file system has no locks; see _is_in_use
        yield
    finally:
        platforms.close_folder(descriptor)


def _is_in_use(staging: Path) -> bool:
    try:
        descriptor = platforms.open_folder(staging)
    except (FileNotFoundError, NotADirectoryError):  # a link counts as abandoned too
        return False
    try:
        is_free = platforms.lock(descriptor)
        if is_free is not None:
            return not is_free
        newest = max(found.st_mtime for found in (staging.stat(), *stats_of(staging)))
        return time.time() - newest < _UNLOCKABLE_SECONDS
    finally:
        platforms.close_folder(descriptor)


def move_into_place(staging: Path, out: Path) -> None:
    """Gives a complete checkpoint its name; one that has it already is replaced.

    Raises:
        UserError: the disk does not take it.
    """
    old = out.with_name(out.name + ".old")
    with writing(out):
        if os.path.lexists(out):
            # Between the two renames only the ".old" one is there; latest_checkpoint knows that name.
            discard(old)
            os.rename(out, old)
        os.rename(staging, out)
        sync_folder(out.parent)
        discard(old)


def discard(path: Path) -> None:
    """Deletes a checkpoint. It is renamed first: a kill in between must not leave a folder that looks complete.

    Raises:
        OSError: the system does not allow it.
    """
    hidden = path.with_name(path.name.partition(".")[0] + ".deleting")
    delete_folder(hidden)
    if os.path.lexists(path):
        os.rename(path, hidden)
        delete_folder(hidden)


def mark_best(run_dir: Path, step: int, figure: Mapping[str, float]) -> None:
    """Records that the checkpoint of `step`, which is complete, had the best evaluation so far.

    Args:
        figure: by which it was judged, "loss" or "score", and its value.

    Raises:
        UserError: the disk does not take it.
    """
    write_durably(run_dir / CHECKPOINTS / _BEST, json.dumps({"step": step, **figure}) + "\n")


def best_step(run_dir: Path) -> int | None:
    """Returns the step that `mark_best` recorded last; None where there is none.

    Raises:
        UserError: the note is damaged.
    """
    path = run_dir / CHECKPOINTS / _BEST
    try:
        step = json.loads(path.read_text(encoding="utf-8"))["step"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        step = None
    if not isinstance(step, int):
        raise UserError(f"{path} is damaged, which says which checkpoint is the best: remove it, and name a step.")
    return step


def latest_checkpoint(run_dir: Path) -> Path | None:
    """Returns the newest complete checkpoint of a run, or None. Leftovers of a kill are skipped.

    Raises:
        UserError: the folder cannot be read.
    """
    steps = list_checkpoints(run_dir)
    return steps[max(steps)] if steps else None


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Returns step -> folder of every complete checkpoint of a run.

    Raises:
        UserError: the folder cannot be read.
    """
    folder = run_dir / CHECKPOINTS
    found: dict[int, Path] = {}
    try:
        names = sorted(os.listdir(folder))
        for pattern in (_KEPT, _STEP):  # a complete replacement wins over the folder it replaced
            for name in names:
                if (match := pattern.match(name)) and (folder / name / MANIFEST).is_file():
                    found[int(match[1])] = folder / name
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}): correct that, or give another run.") from error
    return found


def prune(run_dir: Path, keep: int, keep_every: int = 0, *, token: str | None = None) -> list[Path]:
    """Deletes all but the newest complete checkpoints and the best, and leftovers of killed runs.

    To be called by one rank. A temporary folder in which a process writes is kept.

    Args:
        keep: number of the newest that stay; 0 keeps all.
        keep_every: checkpoints of steps divisible by this are never deleted; 0 for none.
        token: of the run that calls, whose temporary folders stay.

    Returns:
        The checkpoints deleted.

    Raises:
        UserError: the system does not allow it.
    """
    folder = run_dir / CHECKPOINTS
    steps = list_checkpoints(run_dir)
    kept = {step for step in steps if keep_every and step % keep_every == 0} | {best_step(run_dir)}
    doomed = [step for step in sorted(steps)[:-keep] if step not in kept] if keep > 0 else []
    try:
        # A replaced checkpoint is deleted first, or it would reappear once its replacement is deleted.
        for path in list(folder.iterdir()) if folder.is_dir() else ():
            own = token is not None and path.suffixes[:1] and path.suffixes[0].startswith(f".{token}-")
            if not _LEFTOVER.match(path.name) or path in steps.values() or own:
                continue
            if path.suffix != ".tmp" or not _is_in_use(path):
                discard(path)
        for step in doomed:
            discard(steps[step])
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be deleted ({error.strerror}): see whose it is, or set checkpoint.keep "
            "to 0."
        ) from error
    return [steps[step] for step in doomed]
