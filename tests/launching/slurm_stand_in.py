"""Slurm's commands for a batch script: `srun` starts the nodes' tasks in network namespaces, each in a process group.

What slurmstepd does is done here too: a signal goes to all processes of a task, and with --kill-on-bad-exit the end of
one task is a SIGTERM to the others, and a SIGKILL after KillWait. srun ends with the highest status.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.launching.nodes import Nodes
from tests.support.commands import REPOSITORY

_SRUN = """\
import json, os, signal, subprocess, sys, time
words = sys.argv[1:]
bad_exit = any(word.startswith("--kill-on-bad-exit") for word in words)
while words[0].startswith("--"):
    words.pop(0)
places = json.loads(os.environ["STAND_IN_NODES"])
tasks = [
    subprocess.Popen([*place, *words], start_new_session=True, env={**os.environ, "SLURM_PROCID": str(number)})
    for number, place in enumerate(places)
]
with open(os.environ["STAND_IN"] + "/pids", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
told = None
while any(task.poll() is None for task in tasks):
    time.sleep(0.05)
    if told is None and bad_exit and any(task.poll() for task in tasks):
        told = time.monotonic()
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGTERM)
    if told is not None and time.monotonic() - told > 30:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
sys.exit(max(128 - task.returncode if task.returncode < 0 else task.returncode for task in tasks))
"""
_SCANCEL = """\
import os, sys
from contextlib import suppress
folder = os.environ["STAND_IN"]
with open(folder + "/asked", "a") as file:
    print(*sys.argv[1:], file=file)
for task in open(folder + "/pids").read().split():
    with suppress(ProcessLookupError):
        os.killpg(int(task), 15)
"""
_SCONTROL = """\
import os, sys
if sys.argv[1] == "show":
    print(os.environ["STAND_IN_NAMES"])
else:
    with open(os.environ["STAND_IN"] + "/asked", "a") as file:
        print(*sys.argv[1:], file=file)
"""


def slurm_environment(nodes: Nodes, folder: Path) -> dict[str, str]:
    """Writes the commands into a folder, and returns the environment of a job's batch script."""
    for name, text in (("srun", _SRUN), ("scancel", _SCANCEL), ("scontrol", _SCONTROL)):
        (folder / name).write_text(f"#!{sys.executable}\n{text}")
        (folder / name).chmod(0o755)
    return {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY), "STAND_IN": str(folder),
        "STAND_IN_NODES": json.dumps([nodes.words(number, []) for number in range(2)]),
        "STAND_IN_NAMES": "\n".join(nodes.names), "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "run",
        "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
