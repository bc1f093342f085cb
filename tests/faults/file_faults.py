"""Commands that are killed, or whose disk fails, at any one of their file operations.

A small library in C (`file_faults.c`) is compiled and preloaded into a process that has the engine loaded and forks
for each command. It counts what the command does to files below one folder and disturbs one of these operations.
`Sweep.judge` says what came of it: the result is right, or the command is refused in a sentence, and the same command
given once more makes what an undisturbed one makes and leaves nothing beside it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from tests.support.commands import REPOSITORY

HOWS = {"count": 0, "kill": 1, "kill group": 2, "no space": 3, "faulty": 4, "forbidden": 5, "short": 6}
"""What happens at the operation, by its number in file_faults.c."""

_HEAD = struct.Struct("@iilll1024s")
_LOG_BYTES = 1 << 20
_ALLOCATING = ("create", "write", "mkdir", "fsync", "fallocate", "link", "symlink", "copy")
_BY_NAME = ("create", "open", "mkdir", "rename", "unlink", "rmdir", "link", "symlink")
STUCK = 1000
"""In place of an exit status: it did not end."""


class Ended(NamedTuple):
    """How a command ended: its exit status, what it printed, and the operations that it came to."""

    status: int
    stdout: str
    stderr: str
    operations: list[str]


class Faults:
    """The process that runs commands, and the block that says what happens to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        library = folder / "faults.so"
        source = Path(__file__).with_name("file_faults.c")
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None or not sys.platform.startswith("linux"):
            pytest.skip("needs Linux and a C compiler")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        block = folder / "block"
        block.write_bytes(bytes(-(-(_HEAD.size + _LOG_BYTES) // 4096) * 4096))
        with block.open("r+b") as file:
            self._block = mmap.mmap(file.fileno(), 0)
        environment = {
            **os.environ, "LD_PRELOAD": str(library), "FILE_FAULTS_BLOCK": str(block), "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fault_worker.py"))],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def run(
        self,
        tool: str,
        arguments: Sequence[object],
        watched: Path,
        *,
        how: str = "count",
        at: int = 0,
        limit: float = 60,
    ) -> Ended:
        """Runs `tools/<tool>.py`; `how` happens at the `at`-th operation below `watched`."""
        self._block[: _HEAD.size] = _HEAD.pack(0, HOWS[how], at, 0, 0, os.fsencode(watched))
        request = {
            "script": str(REPOSITORY / "tools" / f"{tool}.py"), "arguments": [str(one) for one in arguments],
            "folder": str(self._folder), "stdout": str(self._folder / "stdout"), "stderr": str(self._folder / "stderr"),
            "limit": limit,
        }  # fmt: skip
        stdin: IO[str] | None = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        status = int(json.loads(self._read())["status"])
        _, _, _, _, log_bytes, _ = _HEAD.unpack(self._block[: _HEAD.size])
        log = self._block[_HEAD.size : _HEAD.size + min(log_bytes, _LOG_BYTES)].decode(errors="replace")
        stdout, stderr = ((self._folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Ended(status, stdout, stderr, log.splitlines())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@contextmanager
def faults() -> Iterator[Faults]:
    """The process, in a temporary folder of its own."""
    with tempfile.TemporaryDirectory(prefix="file-faults-") as folder:
        server = Faults(Path(folder))
        try:
            yield server
        finally:
            server.close()


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is swept.

    Args:
        name: of the case.
        tool: `tools/<tool>.py`.
        arguments: of it, from the folder that is watched.
        results: what it makes below that folder, by file name -> what must be the same as in an undisturbed run.
        before: puts into the folder what was there before.
        finished: a sentence that the same command may be refused with where the disturbed one had finished all but
            tidying up.
        left: names that may be left over where a warning says that they cannot be deleted; the next run deletes them.
        linkable: paths below the folder that a user may have made links, to keep a run elsewhere.
    """

    name: str
    tool: str
    arguments: Callable[[Path], Sequence[object]]
    results: Callable[[Path], Mapping[str, str]]
    before: Callable[[Path], None] = lambda folder: None
    finished: str | None = None
    left: str | None = None
    linkable: tuple[str, ...] = ()


def digests(folder: Path) -> dict[str, str]:
    """Every file and link below a folder -> digest of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }


@dataclass
class Sweep:
    """One command's points.

    Args:
        server: runs it.
        command: what is swept.
        folder: empty; watched.
        counts: (how, outcome) -> points.
        violations: what was wrong, one line each.
    """

    server: Faults
    command: Command
    folder: Path
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def undisturbed(self) -> list[str]:
        """Runs the command once; sets what is expected, and gives its operations."""
        ended = self.run("count", 0)
        assert ended.status == 0, ended.stderr
        assert ended.operations, "no operation was seen, so a sweep would try nothing"
        self._expected = dict(self.command.results(self.folder))
        return ended.operations

    def points(self, operations: Sequence[str], hows: Sequence[str]) -> list[tuple[str, int]]:
        """(how, operation) for all that can happen so."""
        kinds = [operation.partition(" ")[0] for operation in operations]
        able = {"no space": _ALLOCATING, "forbidden": _BY_NAME, "short": ("write",)}
        return [(how, at) for how in hows for at, kind in enumerate(kinds, 1) if kind in able.get(how, (kind,))]

    def different_points(self, operations: Sequence[str], hows: Sequence[str]) -> list[tuple[str, int]]:
        """Picks from `points` the first and the last of the same kind on the same file."""
        found: dict[tuple[str, str], list[tuple[str, int]]] = {}
        for how, at in self.points(operations, hows):
            found.setdefault((how, operations[at - 1]), []).append((how, at))
        return [point for same in found.values() for point in dict.fromkeys((same[0], same[-1]))]

    def prepare(self) -> None:
        """Brings the folder to its state before the command."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.command.before(self.folder)

    def run(self, how: str, at: int) -> Ended:
        """The command's first run."""
        self.prepare()
        return self.run_again(how, at)

    def run_again(self, how: str = "count", at: int = 0) -> Ended:
        """The command on whatever is in the folder."""
        return self.server.run(self.command.tool, self.command.arguments(self.folder), self.folder, how=how, at=at)

    def judge(self, how: str, at: int) -> str:
        """Runs the command with the disturbance, and once more without."""
        first = self.run(how, at)
        hit = first.operations[at - 1] if len(first.operations) >= at else "(not reached)"
        outcome, problem = self._outcome(first, how)
        self.counts[how, outcome] = self.counts.get((how, outcome), 0) + 1
        if problem is not None:
            self.violations.append(f"{self.command.name}: {how} at {at}, {hit}: {outcome}: {problem}")
        return outcome

    def _outcome(self, first: Ended, how: str) -> tuple[str, str | None]:
        killed = first.status == -9 and how.startswith("kill")
        if first.status == STUCK:
            return "stuck", "did not end"
        if first.status not in (0, 2) and not killed:
            return "traceback", f"status {first.status}: {_tail(first.stderr)}"
        if first.status == 2 and (flaw := _flaw_of_refusal(first.stderr)):
            return "traceback", flaw
        if first.status == 0 and "Traceback" in first.stderr:
            return "traceback", _tail(first.stderr)
        if first.status == 0:
            difference = self._difference(self.command.left if "warning: " in first.stderr else None)
            return ("wrong", f"status 0: {difference}") if difference else ("right at once", None)
        second = self.run_again()
        if second.status == 2 and self.command.finished is not None and re.search(self.command.finished, second.stderr):
            difference = self._difference()
            return ("wrong", f"finished: {difference}") if difference else ("was finished", None)
        if second.status != 0:
            return "stuck", f"first {_tail(first.stderr)!r}, then status {second.status}: {_tail(second.stderr)}"
        difference = self._difference()
        if difference:
            return "wrong", f"after the second: {difference}"
        return ("killed, then right" if killed else "refused, then right"), None

    def _difference(self, left: str | None = None) -> str | None:
        found = dict(self.command.results(self.folder))
        if left is not None:
            found = {name: digest for name, digest in found.items() if not re.search(left, name)}
        if found == self._expected:
            return None
        odd = sorted(
            name for name in found.keys() | self._expected.keys() if found.get(name) != self._expected.get(name)
        )
        return ", ".join(
            f"{name} {'is missing' if name not in found else 'differs' if name in self._expected else 'is left over'}"
            for name in odd[:6]
        )


def _flaw_of_refusal(stderr: str) -> str | None:
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    if "Traceback" in stderr or len(lines) != 1 or not stderr.rstrip().endswith(lines[0]):
        return _tail(stderr)
    return None


def _tail(stderr: str) -> str:
    return " | ".join(stderr.strip().splitlines()[-3:])[-400:]
