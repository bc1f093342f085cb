"""Runs a check in processes forked from this one, with limits of time and memory: one, or several ranks of a group.

What this process has imported a child need not; so a type costs what it computes.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

SECONDS, BYTES = 150, 7 << 30
_GRACE_SECONDS = 2.0
"""How long the other ranks may take once one has failed."""

Result = dict[str, Any]


def run_apart(check: Callable[..., Result], *arguments: Any, ranks: int = 1, seconds: float = SECONDS) -> Result:
    """Returns what `check(*arguments)` found on the first rank, or under "failed" why a rank did not end.

    Args:
        check: returns what JSON can hold.
        ranks: above 1, that many ranks of a Gloo group.
        seconds: after which what still runs is killed.
    """
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        children = [_fork(check, arguments, rank, ranks, Path(folder), seconds) for rank in range(ranks)]
        said = _read([reader for _, reader in children], seconds)
        for child, reader in children:
            os.close(reader)
            if said[reader] is None:
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    limit = f"more than {seconds:g} s or {BYTES >> 30} GiB"
    found = [json.loads(text) if text else {"failed": limit} for text in said.values()]
    failed = [one for one in found if "failed" in one]
    return dict(next((one for one in failed if one["failed"] != limit), failed[0] if failed else found[0]))


def _fork(
    check: Callable[..., Result], arguments: tuple[Any, ...], rank: int, ranks: int, folder: Path, seconds: float
) -> tuple[int, int]:
    """Returns the child and the pipe in which it says what it found."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        return child, reader
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        try:
            if ranks > 1:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{folder}/store",
                    rank=rank,
                    world_size=ranks,
                    timeout=timedelta(seconds=seconds),
                )
            out.write(as_json(check(*arguments)))
        except BaseException as error:
            out.write(as_json({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}))
    os._exit(0)


def _read(readers: list[int], seconds: float) -> dict[int, str | None]:
    """Returns what was said in each pipe; None where its other end was still open at the end of the time."""
    held, said = dict.fromkeys(readers, b""), dict[int, str | None](dict.fromkeys(readers))
    deadline = time.monotonic() + seconds
    while waiting := [reader for reader in readers if said[reader] is None]:
        ready, _, _ = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            part = os.read(reader, 1 << 16)
            held[reader] += part
            if not part:
                text = said[reader] = held[reader].decode()
                if not text or "failed" in json.loads(text):
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return said


def as_json(found: Result) -> str:
    """Returns a result as a line."""
    return json.dumps(
        {key: float(f"{value:.1e}") if isinstance(value, float) else value for key, value in found.items()}
    )
