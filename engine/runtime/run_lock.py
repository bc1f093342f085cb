"""A lock that keeps two runs out of one folder, also on stores without locks of their own.

The file is created exclusively and names its holder: host, process, start time. A run that finds such a file decides
whether the holder is alive by the best available means:

- it holds a lock of the system (flock) on the file as long as it lives: known at once, where the store supports these
locks; - on the same host, with the same process ids, a process of that number and start time is alive or not; - from
another host, the holder touches the file every few seconds. A file that does not change while it is watched for
  several times as long is abandoned. No clocks are compared.

A file whose holder is gone is taken over, with a line in the log. If two runs take over at once, the name in the file
decides. A holder that was taken for dead, because it was suspended, finds another's name there and must stop.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.config.run_files import LOCK
from engine.errors import UserError
from engine.files import platforms
from engine.files.holder import MAX_BYTES, Holder

TOUCH_SECONDS = 5.0
WATCH_SECONDS = 4 * TOUCH_SECONDS
_SETTLE_SECONDS = 0.5
_JOIN_SECONDS = 5.0
_KINDS = {
    stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
}  # fmt: skip


class RunLock:
    """A lock that is held from construction to `release`, or to the end of the process.

    Args:
        folder: to be locked; made where it is missing.
        say: prints a line.

    Raises:
        UserError: another run holds it, or the folder cannot be written.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._path, self._say = folder, folder / LOCK, say
        self._me = Holder.of_this_process()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._take()
        except OSError as error:
            raise UserError(
                f"the run's folder {folder} cannot be written ({error.strerror}): give another checkpoint.dir."
            ) from None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="run lock", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Returns this holder's entry in the file."""
        return self._me.to_bytes().decode()

    def _take(self) -> int:
        while True:
            made = self._make()
            if made is not None:
                return made
            before = self._read()
            if before is None:  # just released, or just being written
                self._take_over_unreadable()
                continue
            holder, file = before
            try:
                self._refuse_if_alive(holder, file)
                if (status := self._look()) is None or status[0] != os.fstat(file).st_ino:
                    continue  # another was quicker
                self._say(f"{self._path} was left by {holder.describe()}, which has ended: taken over")
                taken = self._replace()
            finally:
                os.close(file)
            if taken is not None:
                return taken

    def _make(self) -> int | None:
        """Creates the file, where there is none."""
        try:
            file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        except FileExistsError:
            return None
        return self._fill(file)

    def _fill(self, file: int) -> int:
        platforms.lock(file)
        os.write(file, self._me.to_bytes())
        os.fsync(file)
        return file

    def _read(self) -> tuple[Holder, int] | None:
        """Returns the holder and the open file; None where it is gone or not whole."""
        self._require_file()
        try:
            file = os.open(
                self._path, os.O_RDWR | platforms.NOFOLLOW | platforms.NONBLOCK
            )  # a pipe must not hold us up
        except FileNotFoundError:
            return None
        if (holder := Holder.from_bytes(os.read(file, MAX_BYTES))) is None:
            os.close(file)
            return None
        return holder, file

    def _require_file(self) -> None:
        """Refuses a file that no run has made: it is not removed, and another folder is not the remedy."""
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISREG(mode):
            raise UserError(
                f"{self._path}, by which a run holds its folder, is {_KINDS.get(stat.S_IFMT(mode), 'a device')} and "
                "not a file of a run: remove it if you know what it is, or give another checkpoint.dir."
            )

    def _take_over_unreadable(self) -> None:
        """Takes over a file that stays without a holder's name: its write was cut off."""
        for _ in range(20):
            time.sleep(0.1)
            if (now := self._read()) is not None:
                os.close(now[1])
                return
            if not self._path.exists():
                return
        self._say(f"{self._path} names no holder: removed")
        self._path.unlink(missing_ok=True)

    def _refuse_if_alive(self, holder: Holder, file: int) -> None:
        if platforms.lock(file) is False:
            now = self._read()  # it may be about to change hands
            self._refuse(holder if now is None else now[0])
        if holder.is_local():
            if holder.is_alive():
                self._refuse(holder)
            return
        self._say(f"{self._path} names {holder.describe()}: watching for {WATCH_SECONDS:g} s whether it is alive")
        seen, deadline = self._look(), time.monotonic() + WATCH_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(1.0, TOUCH_SECONDS / 5))
            if self._look() != seen:
                self._refuse(holder)

    def _look(self) -> tuple[int, int] | None:
        """Reads attributes that change when the file is touched or replaced; opens it anew, past a network's cache."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _refuse(self, holder: Holder) -> None:
        raise UserError(
            f"the run's folder {self._folder} is in use by {holder.describe()}: wait until that has ended, end it, or "
            "give another checkpoint.dir."
        )

    def _replace(self) -> int | None:
        """This process's name in the place of one that is gone; None where another was quicker."""
        own = self._path.with_name(f".{LOCK}.{self._me.token}")
        file = self._fill(os.open(own, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644))
        file = platforms.replace_open(file, own, self._path)
        time.sleep(_SETTLE_SECONDS)
        if self.is_own():
            return file
        os.close(file)
        return None

    def is_own(self) -> bool:
        """Returns whether the file still names this process."""
        try:
            now = Holder.from_bytes(self._path.read_bytes())
        except OSError:
            return False
        return now is not None and now.token == self._me.token

    def require_own(self) -> None:
        """Refuses a lock that was lost; called before the folder is written.

        Raises:
            UserError: the lock was lost.
        """
        if not self.is_own():
            now = self._read()
            who = "nobody" if now is None else now[0].describe()
            raise UserError(
                f"the run's folder {self._folder} was taken over from this run, {self._path} names {who} now: this run "
                "was suspended for too long, or the file was removed; start it again once the other has ended."
            )

    def _touch(self) -> None:
        while not self._closed.wait(TOUCH_SECONDS):
            try:
                os.utime(self._file if os.utime in os.supports_fd else self._path)
            except OSError:
                continue  # a store that is away for a moment; `require_own` finds one that is gone for good

    def release(self) -> None:
        """Gives the lock up, and ends its thread."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(_JOIN_SECONDS)  # it must not touch the file's number once that may be another's
        try:
            if self.is_own():
                self._file = platforms.unlink_open(self._file, self._path)
        except OSError as error:  # the run is over, and the next one finds that its holder has ended
            self._say(f"warning: {self._path} cannot be removed ({error.strerror})")
        os.close(self._file)
