"""Reads and tokenises records once per machine: its first rank does it, and the others map the result.

The ranks of a machine meet in a folder of their own among its temporary files, not in a collective: tokenising may take
longer than `train.collective_timeout`, and machines need not share a disk. The folder's name follows from the launcher,
whose children they all are, and from this start, and it is deleted by the last rank to map its files. The first rank
holds the system's lock on it as long as it lives, so that the first rank of a later run can recognise, and delete, the
folders of killed runs.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine.data.dataset import TokenDataset
from engine.errors import UserError
from engine.files import platforms
from engine.files.durable import delete_folder
from engine.runtime.launch import Launch, Launcher, local_rank, ranks_of_this_node
from engine.telemetry.output import say

_PREFIX = "rankfold-data-"
_READY, _PROBLEM, _NO_ROOM = "ready", "problem", "no-room"
_FIRST_LOOK, _LAST_LOOK = 0.01, 0.5
"""Seconds between two checks for the first rank's result, at first and after a while."""


class NodeData:
    """The data sets of a run that the ranks of this machine share. All of them ask for the same ones, in one order.

    Args:
        say: prints a line, whatever the rank: each machine has a first rank.
        key: the same on all ranks of this start on this machine, and on no others; None shares nothing.
        rank, size: of this process among those of the machine.
    """

    def __init__(self, say: Callable[[str], None], key: str | None, *, rank: int, size: int) -> None:
        self._say, self._rank, self._size = say, rank, size
        self._prefix = None
        if key is not None and size > 1:
            self._prefix = Path(tempfile.gettempdir()) / f"{_PREFIX}{platforms.user_id()}-{key}"
        self._count = 0
        self._held: list[int] = []
        """Folders that this process has locked; the system closes them."""

    @classmethod
    def of_this_process(cls, launch: Launch) -> NodeData:
        """Returns the shared data of a rank under torchrun; elsewhere one that shares nothing."""
        launcher = Launcher.from_environment()
        key = None
        if launcher is not None and launcher.key is not None:
            key = f"{launcher.key}-{zlib.crc32(launch.meeting.encode()):08x}"
        return cls(say, key, rank=local_rank(), size=ranks_of_this_node())

    def get(self, build: Callable[[], TokenDataset]) -> TokenDataset:
        """Returns the result of `build` on the machine's first rank, the same arrays on all of its ranks.

        Raises:
            UserError: `build` failed; the same sentence on all of the machine's ranks.
        """
        if self._prefix is None:
            return build()
        self._count += 1
        folder = self._prefix.with_name(f"{self._prefix.name}-{self._count}")
        return self._lead(folder, build) if self._rank == 0 else self._follow(folder, build)

    def _lead(self, folder: Path, build: Callable[[], TokenDataset]) -> TokenDataset:
        try:
            self._tidy()
            self._held.append(_make_and_lock(folder))
        except OSError as error:
            raise UserError(
                f"{folder} cannot be made ({error.strerror}), in which the ranks of this machine share the data: "
                "delete it, or set TMPDIR to another folder."
            ) from error
        try:
            dataset = build()
        except UserError as error:
            with suppress(OSError):  # where it cannot be reported, the other ranks are ended with this one
                self._tell(folder, _PROBLEM, str(error))
            raise
        from engine.data.mapped_dataset import save_dataset

        try:
            save_dataset(dataset, folder)
            (folder / _READY).touch()
        except OSError as error:
            reason = error.strerror or error  # numpy's has only words
            self._say(
                f"warning: {folder} does not take the data ({reason}), so that each rank of this machine reads it by "
                "itself: set TMPDIR to a folder with more room"
            )
            self._tell(folder, _NO_ROOM, "")
            return dataset
        return self._mapped(folder)

    def _tidy(self) -> None:
        """Deletes folders of this user's runs whose first rank has ended."""
        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{platforms.user_id()}-*"):
            with suppress(OSError):  # it belongs to another user, or another rank deletes it too
                descriptor = platforms.open_folder(folder)
                try:
                    found = os.fstat(descriptor)
                    is_own = found.st_uid == platforms.user_id() and not found.st_mode & 0o077
                    if is_own and platforms.lock(descriptor):
                        delete_folder(folder)
                finally:
                    platforms.close_folder(descriptor)

    def _follow(self, folder: Path, build: Callable[[], TokenDataset]) -> TokenDataset:
        pause = _FIRST_LOOK
        while True:
            if (folder / _READY).exists():
                _require_own(folder)
                return self._mapped(folder)
            for name in (_PROBLEM, _NO_ROOM):
                if (note := folder / name).exists():
                    _require_own(folder)
                    text = note.read_text(encoding="utf-8")
                    self._seen(folder)
                    if name == _PROBLEM:
                        raise UserError(text)
                    return build()
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)

    def _mapped(self, folder: Path) -> TokenDataset:
        from engine.data.mapped_dataset import map_dataset

        dataset = map_dataset(folder)
        self._seen(folder)
        return dataset

    def _tell(self, folder: Path, name: str, text: str) -> None:
        for path in folder.iterdir():  # frees the space that the note needs
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        unfinished = folder / f"{name}.tmp"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.rename(folder / name)
        self._seen(folder)

    def _seen(self, folder: Path) -> None:
        """Notes that this rank no longer needs the files, and deletes them where it is the last."""
        (folder / f"seen-{self._rank}").touch()
        with suppress(FileNotFoundError):  # another rank counted at the same moment, and deleted them
            if sum(name.startswith("seen-") for name in os.listdir(folder)) == self._size:
                shutil.rmtree(folder, ignore_errors=True)


def _make_and_lock(folder: Path) -> int:
    """Makes a folder that is locked as soon as it has its name; returns its descriptor.

    Raises:
        OSError: the system does not allow it, or the name is taken.
    """
    while True:
        unnamed = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{platforms.user_id()}-", dir=folder.parent))
        with suppress(FileNotFoundError):  # a run that starts now may have seen it unlocked, and deletes it
            descriptor = platforms.open_folder(unnamed, flags=0)
            try:
                if platforms.lock(descriptor) is not False:
                    unnamed.rename(folder)
                    return descriptor
            except OSError as error:
                platforms.close_folder(descriptor)
                if not isinstance(error, FileNotFoundError):
                    unnamed.rmdir()
                raise
            platforms.close_folder(descriptor)


def _require_own(folder: Path) -> None:
    """Refuses a folder of another user: all users can write to temporary folders."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != platforms.user_id() or found.st_mode & 0o077:
        raise UserError(f"{folder} is not this run's own: delete it, or set TMPDIR to another folder.")
