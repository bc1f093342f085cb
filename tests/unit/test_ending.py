"""How a process that has joined others ends: at once, with its own status and words, whatever a group waits for."""

from __future__ import annotations

import ast
import os
import socket
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist

from engine.errors import UserError
from engine.runtime import launch
from engine.telemetry.ending import end, has_joined
from engine.telemetry.errors import run_command
from tests.support.spawning import fork_context
from tests.unit.test_layering import ROOT, SOURCES

LIMIT = 20.0
"""Seconds to start two ranks on a busy machine and to see both end; the stand-in for the group blocks far longer."""

FAILURES: dict[str, tuple[BaseException, int, str]] = {
    "user": (UserError("train.steps is 0: give 1."), 2, "error: train.steps is 0: give 1."),
    "defect": (RuntimeError("an assertion"), 1, "RuntimeError: an assertion"),
    "memory": (MemoryError("CUDA out of memory"), 2, "settings that fit with `rankfold plan memory`."),
    "disk": (OSError(28, "No space left on device"), 2, "free some space, or use a folder on another disk."),
    "interrupt": (KeyboardInterrupt(), 130, "interrupted"),
    "status": (SystemExit(7), 7, ""),
}
"""What rank 1 fails with alone; the status and the last line with which it ends."""


def _blocks(*_: object) -> None:
    """Stands in for NCCL leaving a group, which waits for ranks that wait for this one."""
    time.sleep(600)


def _fail_alone(kind: str) -> None:
    rank = launch.start(60).rank
    dist.barrier()
    if rank == 1:
        raise FAILURES[kind][0]
    dist.barrier()


def _end_well() -> None:
    launch.start(60)
    dist.barrier()  # nobody goes before all have found each other
    launch.stop()
    sys.exit(5)


def _rank(rank: int, port: int, kind: str, output: str) -> None:
    """One rank's process, as torchrun would start it."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    if kind in FAILURES:
        dist.destroy_process_group = _blocks
    try:
        run_command(_end_well if kind == "success" else lambda: _fail_alone(kind))
    finally:
        _blocks()  # the interpreter's way out, which may wait as well


class _Pair:
    """Two ranks."""

    def __init__(self, kind: str, folder: Path) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.outputs = [folder / f"{kind}{rank}" for rank in range(2)]
        self.ranks: list[BaseProcess] = [
            fork_context().Process(target=_rank, args=(rank, port, kind, str(output)), daemon=True)
            for rank, output in enumerate(self.outputs)
        ]
        for rank in self.ranks:
            rank.start()

    def statuses(self, deadline: float) -> list[int | None]:
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        statuses = [rank.exitcode for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
            rank.join()
        return statuses


@pytest.mark.distributed
def test_a_rank_that_fails_alone_ends_at_once(tmp_path: Path) -> None:
    """All kinds side by side. The other rank is in a collective, and learns of it only when the connection closes."""
    pairs = {kind: _Pair(kind, tmp_path) for kind in FAILURES}
    deadline = time.monotonic() + LIMIT
    statuses = {kind: pair.statuses(deadline) for kind, pair in pairs.items()}
    for kind, (_, status, words) in FAILURES.items():
        other, own = statuses[kind]
        said = pairs[kind].outputs[1].read_text()
        assert own == status, (kind, statuses[kind], said)
        assert other not in (0, None), (kind, statuses[kind], pairs[kind].outputs[0].read_text())
        assert said.strip().rpartition("\n")[2].endswith(words), (kind, said)
        assert ("Traceback" in said) is (kind == "defect"), (kind, said)


@pytest.mark.distributed
def test_a_rank_ends_with_the_status_it_was_given(tmp_path: Path) -> None:
    """Also when nothing is wrong: threads of the C++ library abort now and then what ends in the ordinary way."""
    pair = _Pair("success", tmp_path)
    assert pair.statuses(time.monotonic() + LIMIT) == [5, 5], [output.read_text() for output in pair.outputs]


def test_a_process_on_its_own_ends_as_any_program() -> None:
    """A command that is called from a longer-lived program must not decide how that program ends."""
    assert not has_joined()
    with pytest.raises(SystemExit) as ended:
        end(5)
    assert ended.value.code == 5


PEERS = {"rankfold/benchmarking/start_script.py"}
"""Plain scripts that others are timed with, which know nothing of the engine."""
ENDS = {
    "destroy_process_group": {"engine/runtime/launch.py", *PEERS},
    "_exit": {
        "engine/telemetry/ending.py",
        "engine/rollouts/rewards/worker.py",  # copies that a reward or a tool has forked
        "engine/foreign/supervisor.py",  # a process that runs nothing else, and its child
    },
    "register": set[str](),  # of atexit
}
"""What ends a process or is called at its end, and the files that may call it."""


def _calls(path: str) -> set[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    if not any(f".{name}" in text for name in ENDS):
        return set()
    modules = {"dist", "distributed", "os", "atexit"}
    return {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and node.attr in ENDS
        and isinstance(node.value, ast.Name | ast.Attribute)
        and (node.value.id if isinstance(node.value, ast.Name) else node.value.attr) in modules
    }


def test_one_place_ends_processes() -> None:
    calls = {path: _calls(path) for path in SOURCES}
    assert {name: {path for path in SOURCES if name in calls[path]} for name in ENDS} == ENDS
    joins = [path for path in SOURCES if "init_process_group(" in (ROOT / path).read_text(encoding="utf-8")]
    for path in set(joins) - PEERS:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert "joins_others()" in text, f"{path} joins others, and does not say so"
    assert len(joins) >= 2
