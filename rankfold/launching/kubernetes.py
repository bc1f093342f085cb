"""Kubernetes: a JobSet, Kubeflow's TrainJob (Trainer, v2) or PyTorchJob (Training Operator, v1), and the run file.

Each node is a pod with one container, whose command is `rankfold train` itself: it gets the SIGTERM of a preemption,
saves and ends with 75. No shell is in between. Names in $( ) are variables that the controllers set in the container.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.telemetry.errors import EXIT_STOPPED
from rankfold.launching.job import Job
from rankfold.launching.yaml_text import to_yaml

Document = dict[str, Any]

_CONFIG = "/etc/rankfold/run.yaml"
_NODE = "node"
"""Name of the replicated job and of its container, which the Trainer expects."""
_AFTER_GRACE = 30
"""Seconds between the last moment of a save and the kubelet's SIGKILL."""


def job_set(job: Job) -> list[Document]:
    """Returns a ConfigMap with the run file and a JobSet."""
    spec = _job_set_spec(job)
    return [_config_map(job), _object(job, "jobset.x-k8s.io/v1alpha2", "JobSet", spec)]


def train_job(job: Job) -> list[Document]:
    """Returns a ConfigMap, a TrainingRuntime with the pods and their failure policy, and a TrainJob that uses it."""
    spec = _job_set_spec(job, limited=False)
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    spec["replicatedJobs"][0]["template"]["metadata"] = step
    runtime = {
        "mlPolicy": {"numNodes": job.nodes, "torch": {}},
        "template": {"spec": spec},
    }
    container = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    trainer = {
        "image": job.image,
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks,
        "command": container["command"],
        "resourcesPerNode": container["resources"],
    }
    asked: Document = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
        "trainer": trainer,
    }
    if job.seconds is not None:
        asked["activeDeadlineSeconds"] = job.seconds
    version = "trainer.kubeflow.org/v1alpha1"
    return [
        _config_map(job),
        _object(job, version, "TrainingRuntime", runtime, labels={"trainer.kubeflow.org/framework": "torch"}),
        _object(job, version, "TrainJob", asked),
    ]


def pytorch_job(job: Job) -> list[Document]:
    """Returns a ConfigMap and a PyTorchJob, whose failed pods the operator starts again one by one."""
    template = {"spec": _pod(job, f"{job.name}-master-0", "$(RANK)", container="pytorch", port="pytorchjob-port")}
    replicas = {"Master": {"replicas": 1, "restartPolicy": "OnFailure", "template": template}}
    if job.nodes > 1:
        replicas["Worker"] = {"replicas": job.nodes - 1, "restartPolicy": "OnFailure", "template": template}
    policy: Document = {"backoffLimit": job.max_restarts, "cleanPodPolicy": "Running"}
    if job.seconds is not None:
        policy["activeDeadlineSeconds"] = job.seconds
    spec = {"nprocPerNode": str(job.ranks), "runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return [_config_map(job), _object(job, "kubeflow.org/v1", "PyTorchJob", spec)]


def to_text(documents: list[Document], about: str) -> str:
    """Returns the documents as one YAML file.

    Args:
        about: a comment at its top.
    """
    return f"# {about}\n" + "---\n".join(map(to_yaml, documents))


def _object(job: Job, version: str, kind: str, spec: Document, labels: dict[str, str] | None = None) -> Document:
    return {"apiVersion": version, "kind": kind, "metadata": _metadata(job, labels), "spec": spec}


def _metadata(job: Job, labels: dict[str, str] | None = None) -> Document:
    found: Document = {"name": job.name}
    if job.namespace is not None:
        found["namespace"] = job.namespace
    if labels is not None:
        found["labels"] = labels
    return found


def _config_map(job: Job) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job),
        "data": {_CONFIG.rpartition("/")[2]: job.config_text},
    }


def _job_set_spec(job: Job, *, limited: bool = True) -> Document:
    """Returns a JobSet in which a failed pod restarts all: those of preemptions without end, others `max_restarts`
    times.

    Args:
        limited: whether its job has the time limit; a TrainJob has it itself.
    """
    work: Document = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                # the reason PodFailurePolicy is what the JobSet's rule below looks for
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": _NODE, "operator": "In", "values": [EXIT_STOPPED]},
                },
            ]
        },
        "template": {"spec": _pod(job, f"{job.name}-{_NODE}-0-0.{job.name}", "$(JOB_COMPLETION_INDEX)")},
    }
    work["template"]["spec"]["restartPolicy"] = "Never"
    rules: list[Document] = [
        {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
    ]
    if limited and job.seconds is not None:
        work["activeDeadlineSeconds"] = job.seconds
        rules.insert(0, {"name": "limit", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]})
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.max_restarts, "rules": rules},
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": work}}],
    }


def _pod(job: Job, head: str, node_rank: str, *, container: str = _NODE, port: str = "rendezvous") -> Document:
    """Returns the spec of a node's pod.

    Args:
        head: name under which the first pod is found.
        node_rank: variable with the pod's number.
        container, port: their names.
    """
    run_dir = None if job.run_dir is None else _plain(job.run_dir)
    plain = replace(job, words=tuple(map(_plain, job.words)), run_dir=run_dir)
    command = plain.train(
        config=_CONFIG,
        node_rank=node_rank,
        rdzv_endpoint=f"{head}:{job.port}",
        rdzv_id=job.name,
        local_addr="$(POD_IP)",
    )
    environment: list[Document] = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    environment += [{"name": name, "value": _plain(value)} for name, value in job.variables.items()]
    environment += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, (secret, key) in job.secrets.items()
    ]
    mounts = [
        {"name": "run", "mountPath": _CONFIG.rpartition("/")[0], "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    volumes: list[Document] = [
        {"name": "run", "configMap": {"name": job.name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _size(job.shm)}},
    ]
    for number, one in enumerate(job.mounts):
        mounts.append({"name": f"storage-{number}", "mountPath": one.path})
        where = (
            {"persistentVolumeClaim": {"claimName": one.source}}
            if one.kind == "pvc"
            else {"hostPath": {"path": one.source, "type": "Directory"}}
        )
        volumes.append({"name": f"storage-{number}", **where})
    main: Document = {
        "name": container,
        "image": job.image,
        "command": command,
        "env": environment,
        "ports": [{"name": port, "containerPort": job.port}],
        "resources": _resources(job),
        "volumeMounts": mounts,
    }
    if job.workdir is not None:
        main["workingDir"] = job.workdir
    pod: Document = {
        "terminationGracePeriodSeconds": job.grace + _AFTER_GRACE,
        "containers": [main],
        "volumes": volumes,
    }
    if job.node_selector:
        pod["nodeSelector"] = dict(job.node_selector)
    if job.tolerations:
        pod["tolerations"] = [_toleration(*one) for one in job.tolerations]
    return pod


def _plain(text: str) -> str:
    """Returns a text from which the kubelet makes `text`: it replaces $(NAME) by variables, and $$ by $."""
    return text.replace("$", "$$")


def _resources(job: Job) -> Document:
    """Returns requests that are limits too: what a rank was promised must be there."""
    amounts: dict[str, str] = {}
    if job.gpus:
        amounts[job.gpu_resource] = str(job.gpus)
    if job.cpus is not None:
        amounts["cpu"] = str(job.cpus)
    if job.memory is not None:
        amounts["memory"] = _size(job.memory)
    return {"requests": dict(amounts), "limits": amounts} if amounts else {}


def _size(gib: float) -> str:
    """Returns a size as Kubernetes writes it."""
    return f"{gib:.0f}Gi" if gib == int(gib) else f"{gib * 1024:.0f}Mi"


def _toleration(key: str, value: str | None, effect: str | None) -> Document:
    found: Document = {"key": key, "operator": "Exists" if value is None else "Equal"}
    if value is not None:
        found["value"] = value
    if effect is not None:
        found["effect"] = effect
    return found
