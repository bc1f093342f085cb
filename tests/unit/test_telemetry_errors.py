"""How commands end: one sentence for users, also under torchrun, and tracebacks for defects."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from engine.telemetry.log import Log
from engine.telemetry.progress import Progress
from engine.telemetry.torchrun import claim_once, leave_reason

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


@pytest.mark.parametrize(
    ("body", "size"),
    [
        ("import torch; torch.empty(2**50)", "4.0 PiB"),
        ("import numpy; numpy.empty(2**50)", "8.00 PiB"),
        ("raise MemoryError", ""),
        ("raise RuntimeError('CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has')", "2.50 GiB"),
    ],
)
def test_missing_memory_is_one_line(body: str, size: str) -> None:
    done = run(body)
    more = f" for {size} more" if size else ""
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: there is not enough memory{more}: use a smaller "), done.stderr
    assert done.stderr.count("\n") == 1


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


def _read_one_line(body: str) -> tuple[int, str]:
    """Status and stderr of a command whose reader leaves after the first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", command(body)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    return process.wait(timeout=30), errors


def test_results_that_nobody_reads() -> None:
    """Quiet, but no success: whether the pipe breaks while they are printed or when the last of them are flushed."""
    assert _read_one_line("for number in range(100000):\n    print(number)") == (141, "")
    last = "import time\nprint('one', flush=True)\ntime.sleep(1)\nprint('two')"
    assert _read_one_line(last) == (141, "")


def test_help_that_nobody_reads_to_its_end() -> None:
    many = "import argparse\nparser = argparse.ArgumentParser(epilog='word ' * 100000)\nparser.parse_args(['--help'])"
    assert _read_one_line(many) == (0, "")


def test_another_broken_pipe_is_a_defect() -> None:
    done = run("raise BrokenPipeError(32, 'Broken pipe')  # of a socket, say")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_stderr_that_nobody_reads() -> None:
    """What a command says of its progress is dropped, and the command goes on to its end and its own status."""
    body = "import time\nfor number in range(9):\n    print('x', file=sys.stderr, flush=True)\n    time.sleep(0.05)\n"
    for more, status in (("print('fine')", 0), ("raise UserError('no')", 2), ("raise ValueError", 1)):
        process = subprocess.Popen(
            [sys.executable, "-c", command(body + more)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        process.stderr.readline()
        process.stderr.close()
        assert process.stdout.read() == ("fine\n" if status == 0 else "")
        assert process.wait(timeout=30) == status


HOSTILE = "a\x1b[2J\x07\x9b1A b\r\u2028c\u202ed\ud800 \u3000\u00e9"
"""Clears the screen, rings, moves up, returns, ends a line, turns text around; the last two characters are innocent."""
TAMED = "a\\x1b[2J\\x07\\x9b1A b c\\u202ed\\ud800 \u00e9"


def test_no_control_character_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    done = run(f"raise UserError({HOSTILE!a})")
    assert (done.returncode, done.stderr) == (2, f"error: {TAMED}\n")
    Log().warning(HOSTILE)
    with Progress(Log(), HOSTILE, total=1) as progress:
        progress.advance()
    printed = capsys.readouterr().err
    assert printed.count("\\x1b[2J\\x07\\x9b1A b\\r\\u2028c\\u202ed\\ud800 \u3000\u00e9") == 3
    assert not set(printed) & set("\x1b\x07\x9b\r\u2028\u202e\ud800")


def test_no_control_character_of_a_file_is_among_results(tmp_path: Path) -> None:
    (tmp_path / "hostile.yaml").write_text('"lora_\\e[31mr": 3\nlora_r: 8\n', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "tools/convert.py", "config", tmp_path / "hostile.yaml", "--out", tmp_path / "run.yaml"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "lora_\\x1b[31mr" in done.stdout and "\x1b" not in done.stdout + done.stderr


def _ranks(folder: Path, count: int = 3) -> list[dict[str, str]]:
    """What torchrun sets for each rank of a machine."""
    paths = [folder / "attempt_0" / str(rank) / "error.json" for rank in range(count)]
    for path in paths:
        path.parent.mkdir(parents=True)
    return [{"TORCHELASTIC_RUN_ID": "a/b", "TORCHELASTIC_ERROR_FILE": str(path)} for path in paths]


def test_claims(tmp_path: Path) -> None:
    ranks = _ranks(tmp_path / "torchrun")
    assert [claim_once("user", rank) for rank in ranks] == [True, False, False]
    assert [claim_once("interrupt", rank) for rank in ranks] == [True, False, False]
    assert claim_once("user", ranks[1] | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert claim_once("user", ranks[2] | {"MASTER_PORT": "2"})
    assert [claim_once("user", rank) for rank in _ranks(tmp_path / "another")] == [True, False, False]
    assert [claim_once("user", {}) for _ in range(2)] == [True, True]


def test_nobody_else_can_silence_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _ranks(tmp_path)
    assert claim_once("user", ranks[0]) and not claim_once("user", ranks[1])
    somebody = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: somebody)  # to whom the file does not belong
    assert claim_once("user", ranks[2])


@pytest.mark.parametrize("file", ["absent/0/error.json", os.devnull, None])
def test_no_folder_of_torchruns(file: str | None, tmp_path: Path) -> None:
    """Better a sentence per rank than none."""
    rank = {"TORCHELASTIC_RUN_ID": "x"}
    if file is not None:
        rank["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / file)
    assert [claim_once("user", rank) for _ in range(2)] == [True, True]
    leave_reason("error: no.", None, rank)
    assert list(tmp_path.iterdir()) == []


def _torchrun(folder: Path, body: str, ranks: int = 3) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(command(body))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return subprocess.run(
        [*launch, str(program)], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.distributed
def test_one_sentence_under_torchrun(tmp_path: Path) -> None:
    """All ranks meet it, one prints it, and it is also the last thing that torchrun has to say."""
    done = _torchrun(tmp_path, "raise UserError('parallel.tensor is 3.')")
    assert done.returncode == 1
    ours, _, report = done.stderr.partition("error: parallel.tensor is 3.\n")
    assert "Traceback" not in ours
    head, _, cause = report.partition("Root Cause (first observed failure):")
    assert "parallel.tensor is 3" not in head
    *facts, sentence, border = cause.strip().splitlines()
    assert sentence == "  traceback : error: parallel.tensor is 3." and set(border) == {"="}
    assert any(re.match(r" *exitcode *: 2 ", fact) for fact in facts)


@pytest.mark.distributed
def test_a_defect_of_one_rank_under_torchrun(tmp_path: Path) -> None:
    """Its traceback is the cause that torchrun reports, whatever the other ranks say of having lost it."""
    body = f"""
        import os, time
        from pathlib import Path
        from engine.errors import LostRankError
        seen = Path({str(tmp_path / "seen")!r})
        if os.environ["RANK"] == "1":
            while not seen.exists():  # torchrun stops rank 0, which would say nothing if it were still starting
                time.sleep(0.1)
            time.sleep(0.3)
            raise ValueError("broken")
        seen.touch()
        raise LostRankError("rank 0 lost rank 1.")
    """
    done = _torchrun(tmp_path, body, ranks=2)
    cause = done.stderr.partition("Root Cause (first observed failure):")[2]
    assert "rank      : 1" in cause and cause.strip().splitlines()[-2].endswith("ValueError: broken"), done.stderr
    assert "error: rank 0 lost rank 1." in done.stderr and "lost" not in cause
