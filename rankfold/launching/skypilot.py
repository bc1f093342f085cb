"""SkyPilot: a task for `sky jobs launch`, which starts again on other machines when its own are taken away."""

from __future__ import annotations

import shlex
from typing import Any

from engine.telemetry.errors import EXIT_LOST_RANK, EXIT_STOPPED
from rankfold.launching.job import Job
from rankfold.launching.yaml_text import to_yaml

_CONFIG = "~/rankfold-run.yaml"


def task(job: Job) -> dict[str, Any]:
    """Returns the task."""
    resources: dict[str, Any] = {
        "job_recovery": {
            "max_restarts_on_errors": job.max_restarts,
            # stopped and saved, or without a rank that was lost: neither counts as an error of the run
            "recover_on_exit_codes": [EXIT_STOPPED, EXIT_LOST_RANK],
        }
    }
    if job.infra is not None:
        resources["infra"] = job.infra
    if job.gpus:
        resources["accelerators"] = f"{job.accelerator}:{job.gpus}"
    for name, amount in (("cpus", job.cpus), ("memory", job.memory)):
        if amount is not None:
            resources[name] = f"{amount:g}+"
    if job.spot:
        resources["use_spot"] = True
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    found: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes, "resources": resources}
    if job.workdir is not None:
        found["workdir"] = job.workdir
    found["file_mounts"] = {_CONFIG: job.config_path}
    for one in job.mounts:
        if one.kind == "volume":
            found.setdefault("volumes", {})[one.path] = one.source
        else:
            # a run appends to files and renames folders, which a bucket alone cannot
            mode = "MOUNT_CACHED" if one.holds(job.run_dir) else "MOUNT"
            found["file_mounts"][one.path] = {"source": f"{one.kind}://{one.source}", "mode": mode}
    if job.variables:
        found["envs"] = job.variables
    if job.secrets:
        found["secrets"] = dict.fromkeys(job.secrets)
    if job.setup is not None:
        found["setup"] = job.setup
    found["run"] = _run(job)
    return found


def to_text(job: Job, about: str) -> str:
    """Returns the task as YAML, with a comment at its top."""
    return f"# {about}\n" + to_yaml(task(job))


def _run(job: Job) -> str:
    words = job.train(
        config="<config>", node_rank="<rank>", rdzv_endpoint="<endpoint>", rdzv_id=job.name, local_addr="<address>"
    )
    shell = {
        "<config>": _CONFIG,  # unquoted, so that the shell puts the home folder there
        "<rank>": '"$SKYPILOT_NODE_RANK"',
        "<endpoint>": f'"${{nodes[0]}}:{job.port}"',
        "<address>": '"${nodes[$SKYPILOT_NODE_RANK]}"',
    }
    line = " ".join(shell.get(word) or shlex.quote(word) for word in words)
    return f'mapfile -t nodes <<< "$SKYPILOT_NODE_IPS"\nexec {line}\n' if job.nodes > 1 else f"exec {line}\n"
