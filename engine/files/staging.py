"""Stages a folder in a hidden sibling, which takes its name when it is complete.

However the process ends, `out` is absent, as before, or complete; the same command given again resumes with what the
sibling holds, and leaves nothing beside `out`. In the order of a command's life:

| on the disk                            | meaning                                                               |
|----------------------------------------|-----------------------------------------------------------------------|
| `.out.partial` without a plan          | just created, or a replaced folder being deleted: cleared             |
| `.out.partial` with a plan, and locked | a command is writing: others are refused, with the process that does   |
| `.out.partial` with a plan             | left by a kill or a failing disk: the same plan resumes with it       |
| `.out.replaced` beside `out`           | the earlier `out`: deleted                                            |
| `.out.replaced` alone                  | killed between two renames: gets its name `out` back                  |

Links under these names are never followed, nor is an `out` that is a link.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from engine.errors import UserError
from engine.files import platforms
from engine.files.durable import delete_folder, has_other_names, sync_folder, write_durably
from engine.files.holder import MAX_BYTES, Holder
from engine.files.refusals import Unfinished, reading, shown, writing

_PLAN, _HOLDER = ".plan", ".holder"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def partial_folder(out: Path) -> Path:
    """Returns where `out` is made."""
    return out.with_name(f".{out.name}.partial")


def _replaced_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.replaced")


@contextmanager
def staged_folder(
    out: Path, *, check: Callable[[], None], plan: str | None = None, num_bytes: int = 0
) -> Iterator[Path]:
    """Creates a hidden sibling of `out`, held by this process, that takes the name `out` when the block ends.

    A refusal (`UserError`) in the block removes the written files. A kill leaves it, and so does a failing disk
    (`Unfinished`): the same plan resumes with it.

    Args:
        out: the folder to make. An earlier one is replaced, so `check` decides.
        check: raises UserError where `out` may not be made or replaced; called before anything is changed.
        plan: identity of the work, one line; None always starts from an empty folder, and leaves nothing on failure.
        num_bytes: about how much will be written; refused before the work where the disk has less.

    Raises:
        UserError: `out` is a link, another process is making it, or the disk does not take it.
    """
    out = out.absolute()
    _refuse_strange_names(out)
    _tidy(out)
    check()
    with _held(out) as staging:
        try:
            _restore(out)
            check()
            _adopt(staging, plan)
            _check_room(out, staging, num_bytes)
            yield staging
            with writing(out):
                for name in (_HOLDER, _PLAN):
                    (staging / name).unlink(missing_ok=True)
            sync_folder(staging)
            move_into_place(staging, out)
        except BaseException as error:
            refused = isinstance(error, UserError) and not isinstance(error, Unfinished)
            if refused or plan is None or not (staging / _PLAN).exists():
                with suppress(OSError):
                    delete_folder(staging)
            raise


def _refuse_strange_names(out: Path) -> None:
    with reading(out):
        is_link = out.is_symlink()
    if is_link:
        raise UserError(
            f"--out {shown(out)} is a symbolic link to {shown(os.readlink(out))}: give the folder itself, or remove "
            "the link."
        )
    if out.name in ("", ".."):
        raise UserError(f"--out {shown(out)} has no name of its own: give the path of a folder to make.")


def _tidy(out: Path) -> None:
    """Deletes leftovers of a finished command."""
    if not out.exists():
        return
    staging = partial_folder(out)
    with writing(out):
        delete_folder(_replaced_folder(out))
        if _is_own_folder(staging) and not (staging / _PLAN).exists():
            descriptor = platforms.open_folder(staging)
            try:
                if platforms.lock(descriptor) is True:
                    delete_folder(staging)
            finally:
                platforms.close_folder(descriptor)


def _restore(out: Path) -> None:
    """Gives a folder that a killed command had moved aside its name back."""
    replaced = _replaced_folder(out)
    if not out.exists() and _is_own_folder(replaced):
        with writing(out):
            os.rename(replaced, out)
            sync_folder(out.parent)


@contextmanager
def _held(out: Path) -> Iterator[Path]:
    """Creates the sibling and locks it; leftovers of an earlier command stay."""
    staging = partial_folder(out)
    with writing(out, "give another --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _make_and_lock(out, staging)
    try:
        write_durably(staging / _HOLDER, Holder.of_this_process().to_bytes())
        yield staging
    finally:
        platforms.close_folder(descriptor)


def _make_and_lock(out: Path, staging: Path) -> int:
    """Creates the sibling if necessary, and returns its locked descriptor."""
    while True:
        try:
            os.mkdir(staging)
        except FileExistsError:
            if not _is_own_folder(staging):
                raise UserError(
                    f"{shown(staging)} is in the way of --out {shown(out)}, and is no folder of yours: remove it, or "
                    "give another --out."
                ) from None
        try:
            descriptor = platforms.open_folder(staging)
        except FileNotFoundError:
            continue  # another command has just finished
        taken = platforms.lock(descriptor)
        if not _has_name(descriptor, staging):
            platforms.close_folder(descriptor)
            continue
        holder = _holder_in(staging)
        # Without locks on this disk, other processes of this machine at least are detected.
        alive = holder is not None and holder.pid != os.getpid() and holder.is_local() and holder.is_alive()
        if taken is False or (taken is None and alive):
            platforms.close_folder(descriptor)
            who = "another process" if holder is None else holder.describe()
            raise UserError(
                f"--out {shown(out)} is being written by {who}: wait until that has ended, or give another folder."
            )
        return descriptor


def _holder_in(staging: Path) -> Holder | None:
    try:
        descriptor = os.open(
            staging / _HOLDER, os.O_RDONLY | platforms.NOFOLLOW | platforms.NONBLOCK | platforms.CLOEXEC
        )
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        return Holder.from_bytes(file.read(MAX_BYTES))


def _adopt(staging: Path, plan: str | None) -> None:
    """Keeps what was left under the same plan, clears the folder otherwise."""
    path = staging / _PLAN
    with writing(staging):
        for entry in staging.iterdir():
            if has_other_names(entry):  # no file of a command's: writing on would change what has the other name
                entry.unlink()
        if plan is not None and _is_regular(path) and path.read_text(encoding="utf-8", errors="replace") == plan:
            return
        path.unlink(missing_ok=True) if not path.is_dir() or path.is_symlink() else shutil.rmtree(path)
        for entry in staging.iterdir():
            if entry.name != _HOLDER:
                delete_folder(entry)
        if plan is not None:
            write_durably(path, plan)


def _check_room(out: Path, staging: Path, num_bytes: int) -> None:
    with writing(staging):
        taken = sum(platforms.allocated_bytes(os.lstat(path)) for path in staging.iterdir())
        free = shutil.disk_usage(staging).free
    if free + taken < num_bytes:
        raise UserError(
            f"{shown(out)} needs {num_bytes / 1e6:,.1f} MB, but its disk has {(free + taken) / 1e6:,.1f} MB free: "
            "make room there, or give a folder on another disk."
        )


def move_into_place(staging: Path, out: Path) -> None:
    """Gives a finished folder its name, replacing what has that name now.

    Raises:
        FileError: the disk does not take it.
    """
    replaced = _replaced_folder(out)
    with writing(out):
        if not out.is_dir() or not any(out.iterdir()):
            platforms.rename_over_empty(staging, out)
            sync_folder(out.parent)
            return
        delete_folder(replaced)
        # locked, so that no other command takes it for its own sibling before it has its new name
        descriptor = platforms.open_folder(out)
        try:
            platforms.lock(descriptor)
            if _exchange(staging, out):
                os.rename(staging, replaced)
            else:
                os.rename(out, replaced)
                os.rename(staging, out)  # a kill in between is undone by `_restore`
            sync_folder(out.parent)
        finally:
            platforms.close_folder(descriptor)
    with writing(replaced, f"{shown(out)} is made, remove the other by hand"):
        delete_folder(replaced)


def _exchange(left: Path, right: Path) -> bool:
    """Swaps two names atomically; returns False where the system or the disk cannot."""
    function = _renameat2()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(left), None, str(right))


@cache
def _renameat2() -> Callable[..., int] | None:
    if not platforms.IS_LINUX:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return function


def _has_name(descriptor: int, folder: Path) -> bool:
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return False
    return descriptor == platforms.NO_FOLDER or os.path.samestat(os.fstat(descriptor), found)


def _is_own_folder(path: Path) -> bool:
    """Returns whether it is a folder, not a link to one, and belongs to this user."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == platforms.user_id()


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False
