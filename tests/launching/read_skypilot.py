"""Reads a task of `rankfold launch` as SkyPilot does, with a value for each secret, and prints it as JSON.

Runs in an environment with skypilot. Buckets are checked by their schema alone: nothing is asked of a cloud.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml
from sky import Task
from sky.utils import common_utils, schemas

document = yaml.safe_load(Path(sys.argv[1]).read_text())
common_utils.validate_schema(document, schemas.get_task_schema(), "refused: ")
secrets = [(name, "value") for name in document.get("secrets", {})]
task = Task.from_yaml_config(document, secrets_overrides=secrets)
(resources,) = task.resources
print(
    json.dumps(
        {
            "name": task.name,
            "nodes": task.num_nodes,
            "accelerators": resources.accelerators,
            "spot": resources.use_spot,
            "cloud": resources.infra.to_str(),
            "recovery": resources.job_recovery,
            "image": resources.image_id,
            "secrets": sorted(task.secrets),
            "envs": task.envs,
            "volumes": task.volumes,
            "mounts": {path: one.mode.value for path, one in task.storage_mounts.items()},
            "files": task.file_mounts,
        }
    )
)
