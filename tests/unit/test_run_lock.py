"""One run in a folder: who is alive is refused, who is not is taken over."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from engine.config.run_files import LOCK
from engine.errors import UserError
from engine.files import platforms
from engine.files.holder import Holder
from engine.runtime import run_lock
from engine.runtime.run_lock import RunLock
from tests.support.commands import REPOSITORY

SCRIPT = """
import sys, time
from pathlib import Path
from engine.runtime.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), print)
print("held", flush=True)
time.sleep(100)
"""


def _other_run(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("has_flock", [True, False])
def test_another_process(has_flock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused while it lives, stopped or not, by the system's lock or by its process; taken over once it is killed."""
    if not has_flock:
        monkeypatch.setattr(platforms, "lock", lambda file: None)
    other, said = _other_run(tmp_path), []
    os.kill(other.pid, signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match=rf"is in use by process {other.pid} on .+ since .+: wait until"):
            RunLock(tmp_path, said.append)
        assert not said
    finally:
        other.kill()
        other.wait()
    lock = RunLock(tmp_path, said.append)
    assert len(said) == 1 and f"was left by process {other.pid} on" in said[0] and "taken over" in said[0]
    lock.require_own()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_in_one_process(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, print)
    with pytest.raises(UserError, match=f"process {os.getpid()} on"):
        RunLock(tmp_path, print)
    lock.release()
    RunLock(tmp_path, print).release()


def _foreign(tmp_path: Path) -> Path:
    """A lock from a host that this one knows nothing about."""
    path = tmp_path / LOCK
    holder = replace(Holder.of_this_process(), token="theirs", host="far", machine="far 1", pid=4)
    path.write_text(json.dumps({name: getattr(holder, name) for name in Holder.__dataclass_fields__}))
    return path


def test_another_host_that_touches_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock is a day behind."""
    monkeypatch.setattr(run_lock, "WATCH_SECONDS", 10.0)
    monkeypatch.setattr(run_lock, "TOUCH_SECONDS", 0.5)
    path, end = _foreign(tmp_path), threading.Event()

    def touch() -> None:
        stamp = time.time() - 86400
        while not end.wait(0.2):
            stamp += 1
            os.utime(path, (stamp, stamp))

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(UserError, match="in use by process 4 on far"):
            RunLock(tmp_path, print)
    finally:
        end.set()
        thread.join()


def test_another_host_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "WATCH_SECONDS", 0.6)
    path, said = _foreign(tmp_path), []
    os.utime(path, (time.time() + 86400, time.time() + 86400))
    RunLock(tmp_path, said.append).release()
    assert "watching" in said[0] and "taken over" in said[1]


def test_holder_touches_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "TOUCH_SECONDS", 0.1)
    lock = RunLock(tmp_path, print)
    before = (tmp_path / LOCK).stat().st_mtime_ns
    time.sleep(0.5)
    assert (tmp_path / LOCK).stat().st_mtime_ns > before
    lock.release()


def test_a_lock_that_was_taken_over_is_noticed(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, print)
    path = _foreign(tmp_path)
    with pytest.raises(UserError, match="was taken over from this run, .* names process 4 on far"):
        lock.require_own()
    lock.release()
    assert path.exists(), "it is theirs"


@pytest.mark.parametrize(
    "record",
    [
        b'{"token": "a',
        b"",
        b"[" * 30000,
        b"\xff",
        b"[]",
        json.dumps({**asdict(Holder.of_this_process()), "started": "zz"}).encode(),
        json.dumps({**asdict(Holder.of_this_process()), "pid": 1.5}).encode(),
        json.dumps({**asdict(Holder.of_this_process()), "more": 1}).encode(),
    ],
)
def test_a_lock_that_names_no_holder(record: bytes, tmp_path: Path) -> None:
    """Cut off while it was written, or not ours at all."""
    (tmp_path / LOCK).write_bytes(record)
    said: list[str] = []
    RunLock(tmp_path, said.append).release()
    assert len(said) == 1 and "names no holder" in said[0]


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (os.mkfifo, "a pipe"),
        (os.mkdir, "a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "a symbolic link"),
        (lambda path: path.symlink_to("nowhere"), "a symbolic link"),
    ],
)
def test_what_is_no_file_is_refused(plant: Callable[[Path], None], kind: str, tmp_path: Path) -> None:
    plant(tmp_path / LOCK)
    with pytest.raises(UserError, match=f"is {kind} and not a file of a run: remove it if you know"):
        RunLock(tmp_path, print)
    assert os.path.lexists(tmp_path / LOCK)


def test_a_lock_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    said: list[str] = []
    lock = RunLock(tmp_path, said.append)
    monkeypatch.setattr(Path, "unlink", refuse)
    lock.release()
    assert len(said) == 1 and "run.lock cannot be removed (Input/output error)" in said[0]


def test_a_process_number_that_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "lock", lambda file: None)
    mine = Holder.of_this_process()
    holder = replace(mine, token="theirs", started=mine.started - 1)
    (tmp_path / LOCK).write_text(json.dumps({name: getattr(holder, name) for name in Holder.__dataclass_fields__}))
    RunLock(tmp_path, print).release()


def test_many_at_once_leave_one(tmp_path: Path) -> None:
    """All find a stale lock together."""
    path = _foreign(tmp_path)
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "machine": Holder.of_this_process().machine, "pid": 2**22 + 1, "started": 1}))
    won: list[RunLock] = []
    refused: list[str] = []

    def attempt() -> None:
        try:
            won.append(RunLock(tmp_path, lambda line: None))
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=attempt) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(refused) == 5
    won[0].require_own()
    won[0].release()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written .*: give another checkpoint.dir"):
        RunLock(tmp_path / "file" / "run", print)
