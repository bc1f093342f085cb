"""Runs steps one after the other: shows their progress, keeps their logs, and leaves out what is done already."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRESS = re.compile(r"^(step \d+/\d+  loss|(reading|importing|exporting|checking) .*/s)")
"""Lines that follow each other quickly: rewritten on a terminal, thinned out elsewhere."""
LAUNCHER = re.compile(r"^(E\d{4} .*distributed.elastic|W\d{4} .* closing signal )")
"""Where torchrun begins to speak of a rank that failed; the rank has said what matters, the rest goes to the log."""
PLAIN_SECONDS = 5.0


class StepFailed(Exception):
    """A step ended with an error; the message is for the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step.

    Args:
        name: of its log and stamp.
        title: what the user reads.
        commands: run one after the other.
        inputs: files that decide, beside the commands and the steps before, whether it has to run again.
        outputs: files and folders that it makes; they are removed before it starts anew.
        environment: variables to set.
    """

    name: str
    title: str
    commands: tuple[tuple[str, ...], ...]
    inputs: tuple[Path, ...] = ()
    outputs: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A step that has run: its title, the seconds it took when it ran, and whether this time it was left out."""

    title: str
    seconds: float
    reused: bool


def fingerprint(paths: Iterable[Path]) -> str:
    """Hashes small files' content, large ones' size and time of change; folders with all that is in them."""
    digest = hashlib.sha256()
    for path in paths:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            stat = file.stat()
            is_small = stat.st_size < 1 << 20
            digest.update(f"{file}\0{stat.st_size}\0{'' if is_small else stat.st_mtime_ns}\0".encode())
            digest.update(file.read_bytes() if is_small else b"")
    return digest.hexdigest()


class Runner:
    """Runs steps in a folder.

    Args:
        out: the folder; logs go to out/logs, stamps to out/stamps.
        total: number of steps, for "[3/9]".
        salt: whatever else decides whether steps have to run again.
    """

    def __init__(self, out: Path, total: int, salt: str) -> None:
        self._logs, self._stamps = out / "logs", out / "stamps"
        self._total = total
        self._chain = salt
        self._number = 0
        self.done: list[Done] = []
        for folder in (self._logs, self._stamps):
            folder.mkdir(parents=True, exist_ok=True)

    def run(self, step: Step) -> None:
        """Runs a step, or leaves it out where it, its inputs and all steps before are as they were.

        A step that was interrupted finds its outputs as they are, so that training resumes where it stopped.

        Raises:
            StepFailed: a command failed.
        """
        self._number += 1
        parts = (self._chain, step.name, json.dumps([step.commands, dict(step.environment)]), fingerprint(step.inputs))
        self._chain = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        stamp = self._stamps / f"{step.name}.json"
        before = json.loads(stamp.read_text(encoding="utf-8")) if stamp.is_file() else {}
        is_same = before.get("key") == self._chain and all(path.exists() for path in step.outputs)
        head = f"[{self._number}/{self._total}] {step.title}"
        if is_same and before["finished"]:
            print(f"{head}: done before", flush=True)
            self.done.append(Done(title=step.title, seconds=before["seconds"], reused=True))
            return
        print(head, flush=True)
        if before.get("key") != self._chain:
            for path in step.outputs:
                _remove(path)
        _write(stamp, {"key": self._chain, "finished": False})
        seconds = self._execute(step)
        _write(stamp, {"key": self._chain, "finished": True, "seconds": seconds})
        print(f"    done in {seconds:.1f} s", flush=True)
        self.done.append(Done(title=step.title, seconds=seconds, reused=False))

    def _execute(self, step: Step) -> float:
        started = time.monotonic()
        path = self._logs / f"{step.name}.log"
        with open(path, "w", encoding="utf-8") as log:
            for command in step.commands:
                status = _follow(command, {**os.environ, **step.environment}, log.write, started)
                if status:
                    raise StepFailed(f"step {self._number} ({step.title}) failed with status {status}: see {path}")
        return time.monotonic() - started


def _follow(command: tuple[str, ...], environment: dict[str, str], record, started: float) -> int:
    """Runs a command, shows what it prints as it comes, and returns its status."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        encoding="utf-8", errors="replace",
    )  # fmt: skip
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    shown = Display(started)
    launcher_speaks = False
    try:
        while True:
            try:
                line = lines.get(timeout=0.5)
            except queue.Empty:
                shown.tick()
                continue
            if line is None:
                return process.wait()
            record(line)
            launcher_speaks = launcher_speaks or bool(LAUNCHER.match(line))
            if not launcher_speaks:
                shown.line(line.rstrip())
    finally:
        shown.close()
        if process.poll() is None:
            process.terminate()
            process.wait()


def _pump(stream, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


class Display:
    """Lines of a running command, indented; on a terminal the last is rewritten with the seconds that have passed.

    Args:
        started: when the step began, by the monotonic clock.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._live = sys.stdout.isatty()
        self._status = ""
        self._shown_at = 0.0

    def line(self, text: str) -> None:
        """Show a line of output."""
        if not text:
            return
        if not PROGRESS.match(text):
            self.close()
            self._status = ""
            print(f"    {text}", flush=True)
            return
        self._status = text
        if self._live:
            self.tick()
        elif time.monotonic() - self._shown_at > PLAIN_SECONDS:
            self._shown_at = time.monotonic()
            print(f"    {self._shown_at - self._started:4.0f}s  {text}", flush=True)

    def tick(self) -> None:
        """Time has passed."""
        if self._live:
            seconds = f"    {time.monotonic() - self._started:4.0f}s"
            print(
                f"\r\x1b[K{fitted(seconds, self._status, shutil.get_terminal_size().columns - 1)}", end="", flush=True
            )
        elif time.monotonic() - max(self._shown_at, self._started) > 3 * PLAIN_SECONDS:
            self._shown_at = time.monotonic()
            print(f"    {self._shown_at - self._started:4.0f}s  ...", flush=True)

    def close(self) -> None:
        """Take the rewritten line away."""
        if self._live:
            print("\r\x1b[K", end="", flush=True)


def fitted(seconds: str, status: str, width: int) -> str:
    """The figures of a line of progress that a terminal has room for: how far it is and the time left come first."""
    head, *figures = status.split("  ")
    figures.sort(key=lambda figure: not figure.startswith("ETA"))
    if step := re.match(r"step (\d+)/(\d+)", head):
        head += f"  {100 * int(step[1]) // int(step[2])}%"
    line = f"{seconds}  {head}"[:width]
    for figure in figures:
        if len(line) + 2 + len(figure) > width:
            break
        line += f"  {figure}"
    return line


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value) + "\n", encoding="utf-8")
