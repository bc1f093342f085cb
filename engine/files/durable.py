"""Writes small files that are whole or absent, and survive a power cut.

A new file is created exclusively: a file of its name is removed first, never followed, so a link planted under that
name has no effect. A file that is added to, or written in place, is first parted from its other names (hard links).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import IO

from engine.files import platforms
from engine.files.refusals import reading, writing


def open_new(path: Path) -> int:
    """Creates an empty file at `path` and returns its descriptor; an earlier file is removed (a link, not its target).

    Raises:
        OSError: the system does not allow it, or `path` is a device.
    """
    _refuse_device(path)
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | platforms.NOFOLLOW | platforms.CLOEXEC, 0o666)


def _refuse_device(path: Path) -> None:
    """Raises OSError for a device, such as /dev/null: with a superuser's rights a file would take its place."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "it is a device, not a file", str(path))


def open_append(path: Path) -> IO[str]:
    """Opens the text file at `path` for appending, and creates it where it is missing.

    Where the file has other names too, a copy is added to, and they keep their contents.

    Raises:
        OSError: the system does not allow it, or that name is no file's: a pipe would block until there is a
            reader, and a link could lead anywhere.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if has_other_names(path):
        own = path.with_name(path.name + ".tmp")
        copy_file(path, own)
        os.replace(own, path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | platforms.NOFOLLOW | platforms.NONBLOCK | platforms.CLOEXEC
    file = open(os.open(path, flags, 0o666), "a", encoding="utf-8")  # noqa: SIM115 - the caller's
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return file


def has_other_names(path: Path) -> bool:
    """Returns whether there is a regular file at `path` whose bytes belong to another name too (a hard link).

    Raises:
        OSError: the system does not allow it.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_nlink > 1


def write_named(path: Path) -> IO[str]:
    """Opens the text file that a user named for writing; unlike a file with a name of ours it may be a link or a pipe.

    Raises:
        OSError: the system does not allow it.
    """
    if has_other_names(path):
        path.unlink()
    return open(path, "w", encoding="utf-8")


def write_durably(path: Path, data: bytes | str) -> None:
    """Creates or replaces a small file atomically; its bytes are durable, its name once the folder is synced.

    Args:
        path: of the file. `path`.tmp beside it is used on the way. A user may have named a folder, even / or `.`,
            which the system refuses.
        data: its bytes, or text to be encoded as UTF-8.

    Raises:
        FileError: the disk does not take it.
    """
    temporary = Path(f"{path}.tmp")  # not with_name: . and / have none
    with writing(path):
        _refuse_device(path)
        try:
            with open(open_new(temporary), "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            _remove_quietly(temporary)
            raise


def _remove_quietly(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # the disk fails, which the caller is about to report


def sync_folder(folder: Path) -> None:
    """Makes the folder's own entries (creations, renames) durable.

    Raises:
        FileError: the disk does not take them.
    """
    with writing(folder):
        platforms.sync_folder(folder)


def delete_folder(folder: Path) -> None:
    """Deletes a folder with all that is in it; where a link or a file has its name, that alone.

    Does nothing where there is nothing, and skips entries that others delete meanwhile. Links inside are removed,
    not followed.

    Raises:
        OSError: the system does not allow it.
    """
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode):
        shutil.rmtree(folder, onerror=_unless_gone)
    else:
        folder.unlink(missing_ok=True)


def _unless_gone(_: object, path: str, failure: tuple[type[BaseException], BaseException, object]) -> None:
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]


def copy_file(source: Path, target: Path) -> None:
    """Makes `target` a copy of the bytes of a regular file.

    Raises:
        FileError: one of them cannot be read or written.
    """
    with reading(source):
        descriptor = os.open(source, os.O_RDONLY | platforms.NONBLOCK | platforms.CLOEXEC)
    with open(descriptor, "rb") as original:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            with reading(source):
                raise OSError("it is not a regular file")
        with writing(target), open(open_new(target), "wb") as copy:
            shutil.copyfileobj(original, copy, 1 << 20)
