"""Ray Train: a script with a TorchTrainer, one worker a node, each of which starts the ranks of its node.

Ray places the workers, tells them where the first one is, and starts all again when one fails. Ranks are processes of
their own beside the worker, because the run makes its process groups itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rankfold.launching.job import RANK_VARIABLES, Job

_TEMPLATE = '''\
"""@ABOUT@

python FILE                                     # on a node of the Ray cluster
ray job submit --working-dir . -- python FILE   # from elsewhere
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer

RUN_FILE = """\\
@CONFIG@"""
COMMAND = @COMMAND@
ENVIRONMENT = @ENVIRONMENT@
SECRETS = {name: os.environ.get(name, "") for name in @SECRETS@}
"""Of the environment in which this script is started. They travel with `train_node`: Ray shows runtime environments."""
RANKS_OF_RAY = @RANKS@


def end_with_the_worker() -> None:
    """Has the system stop the ranks, which then save, when Ray kills the worker."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def train_node() -> None:
    """Starts the ranks of one node and waits for them."""
    head, place = os.environ["MASTER_ADDR"], get_context().get_world_rank()
    environment = {name: value for name, value in os.environ.items() if name not in RANKS_OF_RAY}
    with tempfile.TemporaryDirectory() as folder:
        run_file = Path(folder, "run.yaml")
        run_file.write_text(RUN_FILE, encoding="utf-8")
        places = {
            "<rank>": str(place),
            "<endpoint>": f"{head}:@PORT@",
            "<address>": ray.util.get_node_ip_address(),
            "<config>": str(run_file),
        }
        words = [sys.executable, "-m", *(places.get(word, word) for word in COMMAND)]
        ranks = subprocess.Popen(words, env={**environment, **ENVIRONMENT, **SECRETS}, preexec_fn=end_with_the_worker)
        try:
            status = ranks.wait()
        finally:
            if ranks.poll() is None:
                ranks.terminate()
                ranks.wait()
    if status != 0:
        raise RuntimeError(f"the ranks of node {place} ended with status {status}; their output says why")


if __name__ == "__main__":
    if missing := [name for name, value in SECRETS.items() if not value]:
        sys.exit(f"error: {', '.join(missing)} is not set: export it before this script is started.")
    ray.init()
    trainer = TorchTrainer(
        train_node,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=@NODES@,
            use_gpu=@USE_GPU@,
            resources_per_worker=@RESOURCES@,
            placement_strategy="@PLACEMENT@",
        ),
        run_config=RunConfig(name="@NAME@", failure_config=FailureConfig(max_failures=@MAX_RESTARTS@)),
    )
    print(trainer.fit())
'''


def script(job: Job, about: str) -> str:
    """Returns the script.

    Args:
        about: the first line of its docstring.
    """
    command = job.train(
        config="<config>", node_rank="<rank>", rdzv_endpoint="<endpoint>", rdzv_id=job.name, local_addr="<address>"
    )
    resources: dict[str, float] = {"CPU": job.cpus or 1}
    if job.gpus:
        resources["GPU"] = job.gpus
    if job.memory is not None:
        resources["memory"] = job.memory * 2**30
    parts = {
        "ABOUT": _escaped(about),
        "CONFIG": _escaped(job.config_text),
        "COMMAND": _listed(command),
        "ENVIRONMENT": repr(job.variables),
        "PORT": str(job.port),
        "SECRETS": _listed(job.secrets),
        "RANKS": _listed(RANK_VARIABLES),
        "NODES": str(job.nodes),
        "USE_GPU": str(job.gpus > 0),
        "RESOURCES": repr(resources),
        # ranks of CPUs may share a machine; GPUs are whole nodes'
        "PLACEMENT": "STRICT_SPREAD" if job.gpus and job.nodes > 1 else "PACK",
        "NAME": job.name,
        "MAX_RESTARTS": str(job.max_restarts),
    }
    return re.sub(r"@([A-Z_]+)@", lambda found: parts[found[1]], _TEMPLATE)


def _escaped(text: str) -> str:
    """Returns a text as it stands between three quotation marks; line breaks stay, and are not taken for others."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(one if one == "\n" or one.isprintable() else one.encode("unicode_escape").decode() for one in plain)


def _listed(words: Iterable[str]) -> str:
    return "[\n" + "".join(f"    {word!r},\n" for word in words) + "]" if words else "[]"
