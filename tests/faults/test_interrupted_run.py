"""Ctrl-C on a terminal: the first saves and says how to resume, the second ends at once."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from tests.faults.ranks import run_environment, run_settings
from tests.support.commands import options
from tests.support.terminal import OnTerminal
from tests.support.warm_python import warm_python

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

SAVES = "Ctrl-C: the run stops after the step under way and saves; press it again to end at once"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    return run_settings(tmp_path_factory.mktemp("data"), stories_dir, data_dir)


def train(settings: dict[str, object], folder: Path, *launcher: str) -> OnTerminal:
    command = [warm_python(), *launcher, "-m", "rankfold", "train", *options(settings)]
    return OnTerminal(command, run_environment(), folder)


def lines(run: OnTerminal) -> list[str]:
    """What is on the terminal in the end, line by line."""
    return [line.rpartition("\r\x1b[K")[2] for line in run.output.replace("\r\n", "\n").split("\n")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_saves_and_says_how_to_resume(ranks: int, settings: dict[str, object], tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    with train({**settings, "parallel.tensor": ranks}, tmp_path, *launcher) as run:
        run.wait_for(r"step \d+/")
        run.press()
        assert run.wait() == (130 if ranks == 1 else 1), "torchrun's own status, which docs/runs.md names"
    assert run.output.count(SAVES) == 1 and "error: " not in run.output, run.output
    (stopped,) = (line for line in lines(run) if line.startswith("stopped after step "))
    found = re.fullmatch(r"stopped after step (\d+), Ctrl-C: resume with (.+)", stopped)
    assert found, stopped
    assert "Traceback" not in run.output.partition(stopped)[0], "torchrun's comes after"
    assert found[2].endswith(f"--checkpoint.dir {next((tmp_path / 'runs').iterdir()).relative_to(tmp_path)}")
    (checkpoint,) = tmp_path.glob("runs/*/checkpoints/step_*")
    assert checkpoint.name == f"step_{int(found[1]):08d}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_second_ends_at_once(ranks: int, settings: dict[str, object], tmp_path: Path) -> None:
    """While a long step is under way; torchrun forwards the second press as SIGTERM."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    long = {**settings, "train.global_batch_size": 20_000, "parallel.tensor": ranks, "checkpoint.dir": "run"}
    with train(long, tmp_path, *launcher) as run:
        run.wait_for("run: ")
        time.sleep(1)
        run.press()
        run.wait_for("press it again to end at once")
        time.sleep(0.7)
        pressed = run.press()
        status = run.wait(20)
        assert time.monotonic() - pressed < 5
    assert status == (130 if ranks == 1 else 1)
    assert re.search("a second signal, (Ctrl-C|SIGTERM to rank [01]): ended at once", run.output), run.output
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_while_it_starts(settings: dict[str, object], tmp_path: Path) -> None:
    """In the imports, where libraries abort if an exception is raised as they initialise, and as data are read."""
    for moment in (0.3, 1.0, 1.5):
        command = [sys.executable, "-m", "rankfold", "train", *options({**settings, "train.global_batch_size": 2000})]
        with OnTerminal(command, run_environment(), tmp_path) as run:
            time.sleep(moment)
            run.press()
            assert run.wait(30) == 130
        assert lines(run)[-2:] == ["^Cinterrupted", ""], run.output


PROGRAM = """
import signal
from engine.api import load_config, train
before = signal.getsignal(signal.SIGINT)
try:
    train(load_config({settings!r}))
except KeyboardInterrupt as interrupt:
    print("caught:", interrupt, signal.getsignal(signal.SIGINT) is before)
    raise
"""


def test_a_program_gets_a_keyboard_interrupt_after_the_save(settings: dict[str, object], tmp_path: Path) -> None:
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    (tmp_path / "program.py").write_text(PROGRAM.format(settings={**plain, "checkpoint.dir": "run"}))
    with OnTerminal([warm_python(), "program.py"], run_environment(), tmp_path) as run:
        run.wait_for(r"step \d+/")
        run.press()
        run.wait()
    assert re.search(r"caught: stopped after step \d+ of the run in run True\r\n", run.output), run.output
    assert re.search(r"stopped after step \d+, Ctrl-C: the same configuration resumes from there\r\n", run.output)
    assert run.output.count('File "') <= 12, "none of the frames of training"
    assert "trainer.py" not in run.output and list(tmp_path.glob("run/checkpoints/step_*"))


def test_the_command_is_shown_as_it_was_typed(tmp_path: Path) -> None:
    """Behind an installed program's interpreter; as a shell takes it."""
    script = tmp_path / "rankfold"
    script.write_text(
        f"#!{sys.executable}\nfrom engine.runtime.command import given_command\nprint(given_command('--more', '1'))\n"
    )
    script.chmod(0o755)
    environment = {**run_environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for typed in ("rankfold", str(script)):
        with OnTerminal([typed, "train", "--data.train", "my file.txt"], environment, tmp_path) as run:
            assert run.wait() == 0, run.output
        assert shlex.split(run.output) == ["rankfold", "train", "--data.train", "my file.txt", "--more", "1"]
