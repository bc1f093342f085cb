"""How commands end: one sentence for users, also under torchrun, and tracebacks for defects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from engine.telemetry.errors import claim_once

ROOT = Path(__file__).resolve().parents[2]


def command(body: str) -> str:
    """A program whose main has this body."""
    head = "import sys\nfrom engine.errors import UserError\nfrom engine.telemetry.errors import run_command\n"
    return f"{head}\ndef main():\n{textwrap.indent(textwrap.dedent(body), '    ')}\n\nrun_command(main)\n"


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", command(body)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


def test_success() -> None:
    done = run("print('fine')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_a_user_error_is_one_line_and_status_2() -> None:
    done = run("raise UserError('optim.lr is -1:\\n   use 1.')")
    assert (done.returncode, done.stderr) == (2, "error: optim.lr is -1: use 1.\n")


def test_a_defect_keeps_its_traceback() -> None:
    done = run("raise ValueError('broken')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "ValueError: broken" in done.stderr


def test_a_status_of_its_own_stays() -> None:
    assert run("sys.exit(7)").returncode == 7


def test_interrupt_is_one_line() -> None:
    body = "import time\nprint('up', flush=True)\ntime.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", command(body)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell without job control starts background work with the signal ignored, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "interrupted\n")


def test_a_closed_pipe_is_quiet() -> None:
    body = "for number in range(100000):\n    print(number)"
    process = subprocess.Popen(
        [sys.executable, "-c", command(body)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=30) == 0


def test_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    node = {"TORCHELASTIC_RUN_ID": "a/b", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert [claim_once("user", node) for _ in range(3)] == [True, False, False]
    assert claim_once("user", node | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert claim_once("user", node | {"MASTER_PORT": "2"})
    assert claim_once("interrupt", node)
    assert [claim_once("user", {}) for _ in range(2)] == [True, True]


def test_old_claims_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    node = {"TORCHELASTIC_RUN_ID": "x"}
    assert claim_once("user", node)
    (claim,) = tmp_path.iterdir()
    os.utime(claim, (time.time() - 7200,) * 2)
    assert claim_once("user", node | {"MASTER_PORT": "9"})
    assert claim not in tmp_path.iterdir() and len(list(tmp_path.iterdir())) == 1


def test_a_temporary_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    assert claim_once("user", {"TORCHELASTIC_RUN_ID": "x"})


@pytest.mark.distributed
def test_one_sentence_under_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(command("raise UserError('parallel.tensor is 3.')"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for _ in range(2):  # the second run must not find the first one's claim
        done = subprocess.run(
            [*launch, str(program)], env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode != 0
        assert done.stderr.count("error: parallel.tensor is 3.") == 1
        before_summary = done.stderr[: done.stderr.index("error: parallel.tensor is 3.")]
        assert "Traceback" not in before_summary
