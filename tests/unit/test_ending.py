"""How a process ends that has asked to end at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOIN = "import os; os.environ.update(WORLD_SIZE='2', RANK={rank!r}, MASTER_ADDR='127.0.0.1', MASTER_PORT={port!r})\n"
END = """
import sys
from engine.distributed.launch import end_at_once, start, stop
start(60)
end_at_once(5)
stop()
sys.exit(3)
"""


def _run(code: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True)


def test_a_process_without_ranks_keeps_the_status_of_whoever_called() -> None:
    """A command that is called from a longer-lived program must not decide how that program ends."""
    assert _run(END).wait(60) == 3


@pytest.mark.distributed
def test_a_rank_ends_with_the_status_it_was_given() -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    ranks = [_run(JOIN.format(rank=str(rank), port=port) + END) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [5, 5]
