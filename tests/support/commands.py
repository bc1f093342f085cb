"""Runs the engine's command lines as a user does, and reads what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support.warm_python import warm_python

REPOSITORY = Path(__file__).resolve().parents[2]


def run_tool(
    tool: str, *arguments: object, ranks: int = 0, status: int = 0, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Runs `tools/<tool>.py`, under torchrun with `ranks` processes where that is not 0, in a Python that is warm.

    Fails the test with everything printed when the exit status is not `status` (under torchrun any failure is 1).
    """
    launcher = [str(warm_python())]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*launcher, str(REPOSITORY / "tools" / f"{tool}.py"), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == status, f"status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def options(values: dict[str, object]) -> list[str]:
    """{"train.steps": 5} -> ["--train.steps", "5"]."""
    return [item for name, value in values.items() for item in (f"--{name}", str(value))]


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> training loss, as written to the run's metrics file."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if "loss" in record}
