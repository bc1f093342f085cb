"""Reads a file of `rankfold launch` into the classes of Kubeflow's packages, which come from the resources' schemas.

Runs in an environment with kubeflow and kubeflow-training, and prints a line for each field that is lost on the way
there and back: a class drops what its resource does not have, and refuses values of other types.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubeflow.training.models as operator
import yaml
from kubeflow_trainer_api import models as trainer
from kubernetes import client

CLASSES = {
    "JobSet": trainer.JobsetV1alpha2JobSet,
    "TrainingRuntime": trainer.TrainerV1alpha1TrainingRuntime,
    "TrainJob": trainer.TrainerV1alpha1TrainJob,
}


def there_and_back(document: dict[str, Any]) -> Any:
    kind = document["kind"]
    if kind in CLASSES:
        return json.loads(CLASSES[kind].from_dict(document).to_json())
    for name in dir(operator):
        if name.startswith("KubeflowOrgV1"):
            setattr(client.models, name, getattr(operator, name))
    api = client.ApiClient()
    name = {"PyTorchJob": "KubeflowOrgV1PyTorchJob", "ConfigMap": "V1ConfigMap", "Pod": "V1Pod"}[kind]
    return api.sanitize_for_serialization(api.deserialize(SimpleNamespace(data=json.dumps(document)), name))


def differences(ours: Any, theirs: Any, place: str) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in ours.keys() | theirs.keys():
            if key not in theirs:
                yield f"{place}.{key} is not known"
            elif key in ours:
                yield from differences(ours[key], theirs[key], f"{place}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{place}[{number}]")
    elif ours != theirs:
        yield f"{place} is {ours!r}, then {theirs!r}"


for found in yaml.safe_load_all(Path(sys.argv[1]).read_text()):
    for line in differences(found, there_and_back(found), found["kind"]):
        print(line)
    print(found["kind"], "read", file=sys.stderr)
