"""Turns the system's errors about files into sentences for the user.

with writing(out):
    out.write_text(text, encoding="utf-8")
with reading(path, "give another --source"):
    text = path.read_text(encoding="utf-8")
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import UserError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_SUCH_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL)
_SHOWN = 200


class Unfinished(UserError):
    """Work stopped for an external reason: what was written stays, and the same command resumes it."""


class FileError(Unfinished):
    """The system did not let a file be read or written."""


@contextmanager
def reading(path: str | os.PathLike[str], advice: str | None = None) -> Iterator[None]:
    """Turns the system's errors while `path` is read into a sentence.

    Args:
        path: named in the sentence.
        advice: what to change, such as "give another --source"; None for what the kind of error suggests.

    Raises:
        FileError: it is missing, unreadable, not UTF-8 where text is read, on a failing disk and the like.
    """
    try:
        yield
    except OSError as error:
        raise _refusal(path, "read", error, advice) from error
    except UnicodeDecodeError as error:
        raise FileError(
            f"{shown(path)} is not UTF-8 text (byte {error.start}): {advice or 'copy or save it again'}."
        ) from error
    except ValueError as error:
        if _is_a_path(path):
            raise
        raise _no_path(path) from error


@contextmanager
def writing(path: str | os.PathLike[str], advice: str | None = None) -> Iterator[None]:
    """Turns the system's errors while `path` is created, written or deleted into a sentence.

    Args:
        path: named in the sentence.
        advice: what to change, such as "give another --out"; None for what the kind of error suggests.

    Raises:
        FileError: the disk is full, read-only, failing, gone and the like.
    """
    try:
        yield
    except OSError as error:
        raise _refusal(path, "written", error, advice) from error
    except ValueError as error:
        if _is_a_path(path):
            raise
        raise _no_path(path) from error


def shown(path: str | os.PathLike[str]) -> str:
    """Returns a path for a sentence: on one line, printable, and short."""
    text = os.fspath(path)
    if not text.isprintable():
        text = ascii(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def sentence_of(error: OSError) -> str | None:
    """Returns the sentence for an uncaught system error about a file; None where it is not about a file.

    Args:
        error: caught by nothing but the end of the command.
    """
    if isinstance(error, ConnectionError | ChildProcessError | ProcessLookupError | TimeoutError | BlockingIOError):
        return None
    verb = "written" if error.errno in (*_NO_ROOM, errno.EROFS) else "used"
    if isinstance(error.filename, str | bytes):
        return str(_refusal(os.fsdecode(error.filename), verb, error, None))
    if error.errno in (*_NO_ROOM, errno.EROFS, errno.EIO):
        return str(_refusal("a file of this command", verb, error, None))
    return None


def _refusal(path: str | os.PathLike[str], verb: str, error: OSError, advice: str | None) -> FileError:
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno == errno.ELOOP:
        reason = "it is a symbolic link, or there is one too many on the way"
    if error.errno in _NOT_ALLOWED and verb == "read":
        advice = None  # a caller's advice is about the file's content
    return FileError(f"{shown(path)} cannot be {verb} ({reason}): {advice or _advice(verb, error.errno)}.")


def _advice(verb: str, code: int | None) -> str:
    reads = verb == "read"
    if code in _NO_ROOM:
        return "free some space, or use a folder on another disk"
    if code in _NOT_ALLOWED:
        if verb == "used":
            return "see whose it is, and who may use it"
        return "use a copy that you may read" if reads else "use a folder that you may write to"
    if code == errno.ENAMETOOLONG:
        return "use a shorter name"
    if code in _NO_SUCH_PATH:
        return "check the path" if reads else "use another path"
    if code == errno.ELOOP:
        return "use the file itself" if reads else "remove the link, or use another path"
    return "use another copy if its disk is failing" if reads else "use a folder on another disk if this one is failing"


def _is_a_path(path: str | os.PathLike[str]) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half a character
        return False


def _no_path(path: str | os.PathLike[str]) -> FileError:
    return FileError(f"{os.fspath(path)!a} is not the name of a file or folder: use another path.")
