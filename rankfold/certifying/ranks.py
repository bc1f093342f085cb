"""Runs a layout on its own processes: on GPUs where there are enough of them, else on CPU ranks with Gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from engine.config.load import to_yaml
from engine.errors import UserError
from engine.telemetry.processors import available_processors
from rankfold.certifying.certificate import Recording
from rankfold.certifying.layouts import Layout
from rankfold.certifying.worker import RECIPE, REFUSED

WORKER = Path(__file__).with_name("worker.py")


def choose_device(num_ranks: int) -> str:
    """Returns "cuda" where every rank of the largest layout gets its own GPU, else "cpu"."""
    return "cuda" if torch.cuda.device_count() >= num_ranks else "cpu"


def run_layout(
    layout: Layout, folder: Path, *, steps: int, device: str, say: Callable[[str], None], worker: Path = WORKER
) -> Recording:
    """Starts the ranks of a layout, which train and record.

    Args:
        layout: the layout.
        folder: an empty one for the ranks' files.
        steps: to take.
        device: "cuda" or "cpu", the same for all layouts of a comparison.
        say: called with each line that rank 0 prints.
        worker: the script that each rank runs.

    Raises:
        UserError: the ranks refused the run.
        RuntimeError: they failed, which is a defect; their output is on stderr.
    """
    recipe = {"config": to_yaml(layout.config), "steps": steps}
    (folder / RECIPE).write_text(json.dumps(recipe), encoding="utf-8")
    complaints = folder / "stderr.txt"
    with open(complaints, "w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [*_launcher(layout.num_ranks), str(worker), str(folder)],
            env=_environment(layout.num_ranks, device),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                say(f"[{layout.label}] {line.rstrip()}")
            status = process.wait()
        finally:
            # leaving early, by Ctrl-C or a closed pipe, ends the ranks too; torchrun ends its own
            if process.poll() is None:
                process.terminate()
                process.wait()
    if status:
        _fail(layout, folder, complaints.read_text(encoding="utf-8", errors="replace"), status)
    return Recording(folder, layout.num_ranks)


def _launcher(num_ranks: int) -> list[str]:
    if num_ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]


def _environment(num_ranks: int, device: str) -> dict[str, str]:
    # the ranks import the modules of this process: a checkout that is not installed, or not the one that is
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # without it torchrun uses one thread per rank, and prints a warning
    environment.setdefault("OMP_NUM_THREADS", str(max(1, available_processors() // num_ranks)))
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        # cuBLAS is deterministic only with a separate workspace for each stream
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return environment


def _fail(layout: Layout, folder: Path, complaints: str, status: int) -> None:
    """Raises the reason: one sentence where a rank refused, else everything that they printed."""
    sentences = [path.read_text(encoding="utf-8") for path in sorted(folder.glob(REFUSED.format("*")))]
    # a rank that was ended while it wrote leaves an empty file
    if said := next(filter(None, sentences), None):
        raise UserError(f"{layout.source}: {said}")
    print(complaints, file=sys.stderr, flush=True)
    raise RuntimeError(f"the ranks of {layout.label} ended with status {status}; what they printed stands above")
