"""The batch script of examples/slurm, with Slurm's commands replaced: two nodes on this machine, and a time limit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.support.commands import REPOSITORY, losses
from tests.support.warm_python import warm_python

SCRIPT = REPOSITORY / "examples" / "slurm" / "train.sbatch"

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

STUBS = {
    # all nodes of the job are this machine
    "srun": """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for _ in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & echo $! >> "$STUBS/pids"; done
failed=0
for pid in $(cat "$STUBS/pids"); do wait "$pid" || failed=$?; done
exit $failed
""",
    "scontrol": """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf 'localhost\\nother\\n'; else echo "$*" >> "$STUBS/asked"; fi
""",
    "scancel": """#!/usr/bin/env bash
echo "$*" >> "$STUBS/asked"
kill -TERM $(cat "$STUBS/pids")
""",
}


@pytest.fixture
def job(tmp_path: Path, stories_dir: Path) -> dict[str, str]:
    """The environment that Slurm gives, and a configuration in the folder."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in STUBS.items():
        (stubs / name).write_text(text, encoding="utf-8")
        (stubs / name).chmod(0o755)
    text = tmp_path / "text.txt"
    text.write_text("All the world's a stage, and all the men and women merely players. " * 20, encoding="utf-8")
    config = (
        f"model: {{path: {stories_dir}}}\nlora: {{rank: 2}}\ndata: {{train: {text}, seq_length: 32}}\n"
        "train: {global_batch_size: 2}\nlog: {peak_tflops: 0}\n"
    )
    (tmp_path / "run.yaml").write_text(config, encoding="utf-8")
    return {
        **os.environ, "PATH": f"{stubs}:{os.environ['PATH']}", "STUBS": str(stubs), "ENGINE": str(REPOSITORY),
        "PYTHON": str(warm_python()), "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NAME": "train",
        "OMP_NUM_THREADS": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]",
        "RUN_DIR": str(tmp_path / "run"),
    }  # fmt: skip


def _start(job: dict[str, str], folder: Path, *options: object) -> subprocess.Popen[str]:
    Path(job["STUBS"], "pids").unlink(missing_ok=True)
    return subprocess.Popen(
        ["bash", str(SCRIPT), "run.yaml", *map(str, options)], env=job, cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_two_nodes_then_the_limit_then_on(job: dict[str, str], tmp_path: Path) -> None:
    """Told to stop, both nodes' ranks save after one step and the job is requeued; the next one goes on from there."""
    first = _start(job, tmp_path, "--train.steps", 5000, "--parallel.tensor", 2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 150
    while not metrics.is_file() or metrics.read_text(encoding="utf-8").count("\n") < 2:
        assert time.monotonic() < deadline and first.poll() is None, first.communicate()[0]
        time.sleep(0.1)
    first.send_signal(signal.SIGUSR1)
    output, _ = first.communicate(timeout=100)
    assert first.returncode == 0, output
    asked = Path(job["STUBS"], "asked").read_text(encoding="utf-8").splitlines()
    assert asked == [f"--signal=TERM {job['SLURM_JOB_ID']}.0", f"requeue {job['SLURM_JOB_ID']}"], output
    last = max(losses(tmp_path / "run"))
    again = _start({**job, "SLURM_RESTART_COUNT": "1"}, tmp_path, "--train.steps", last + 2, "--parallel.tensor", 2)
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0 and f"after step {last}, " in output, output
    assert sorted(losses(tmp_path / "run")) == list(range(1, last + 3))


def test_an_error_is_the_jobs_error(job: dict[str, str], tmp_path: Path) -> None:
    """A mistake in the configuration ends the job, which is not requeued."""
    result = _start({**job, "SLURM_JOB_NUM_NODES": "1"}, tmp_path, "--train.stepz", 3)
    output, _ = result.communicate(timeout=100)
    assert result.returncode != 0 and "--train.stepz is not an option" in output
    limited = "--shutdown-timeout" not in get_args_parser().format_help()
    assert ("kills the ranks 30 seconds after" in output) == limited
    assert not Path(job["STUBS"], "asked").exists()


def test_nothing_given(job: dict[str, str], tmp_path: Path) -> None:
    result = subprocess.run(["bash", str(SCRIPT)], env=job, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "usage: sbatch" in result.stderr


def test_the_script_is_sound() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    if shutil.which("shellcheck"):
        result = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout
