"""One run on a cluster, as the writers of the files read it. Nothing here knows a scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PORT = 29400
"""Of the rendezvous."""
RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "POD_IP",
    "JOB_COMPLETION_INDEX",
)  # fmt: skip
"""Variables by which schedulers and launchers tell a process its place."""
NCCL = {"NCCL_DEBUG": "WARN"}
"""Variables of every job on GPUs, which --env overrides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """Storage that all nodes see at the same path.

    Args:
        kind: "pvc", "host" or "volume", or the scheme of a bucket.
        source: name of the claim, path on the nodes, name of the volume, or the bucket's address.
        path: where the run sees it.
    """

    kind: str
    source: str
    path: str

    def holds(self, path: str | None) -> bool:
        """Returns whether a path of the run is on this storage."""
        return path is not None and f"{path}/".startswith(f"{self.path}/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run, the machines that it gets, and what is to happen when they fail or are taken away.

    Args:
        name: of the job: lower-case letters, digits and dashes.
        config_path: absolute path of the run file on this machine.
        config_text: its content.
        words: options of the run that win over it.
        nodes, gpus, ranks: machines, GPUs of each, and ranks on each.
        run_dir: folder of the run, on storage that all nodes see; None leaves it to the run file or the writer.
        python: interpreter on the nodes, where the file names one.
        port: of the rendezvous, on the first node.
        seconds: time limit; None for none.
        grace: seconds that the save may take after a signal.
        max_restarts: times that failed ranks, and then failed nodes, start again.
        cpus, memory: of each node, memory in GiB; None leaves it to the scheduler.
        shm: GiB of shared memory in a container.
        image: container image; None for none.
        setup: shell commands that install the program on a node; None for none.
        workdir: folder to which relative paths of the run file belong; None for the image's or the scheduler's.
        mounts: shared storage.
        environment: variables of the ranks.
        secrets: variable -> (name of the scheduler's secret, key in it); values are never read.
        node_selector, tolerations: of Kubernetes' nodes: labels, and (key, value or None, effect or None).
        gpu_resource: Kubernetes' name of a GPU.
        namespace: of Kubernetes' objects; None for kubectl's.
        accelerator: SkyPilot's name of a GPU.
        infra: SkyPilot's cloud, as aws/us-east-1; None for any.
        spot: whether preemptible machines are asked for.
        batch_options: Slurm's further options, as {"partition": "gpu"}; None for one without a value.
    """

    name: str
    config_path: str
    config_text: str
    words: tuple[str, ...] = ()
    nodes: int = 1
    gpus: int = 1
    ranks: int = 1
    run_dir: str | None = None
    python: str = "python"
    port: int = PORT
    seconds: int | None = None
    grace: int = 300
    max_restarts: int = 3
    cpus: int | None = None
    memory: float | None = None
    shm: float = 16.0
    image: str | None = None
    setup: str | None = None
    workdir: str | None = None
    mounts: tuple[Mount, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[tuple[str, str | None, str | None], ...] = ()
    gpu_resource: str = "nvidia.com/gpu"
    namespace: str | None = None
    accelerator: str | None = None
    infra: str | None = None
    spot: bool = False
    batch_options: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the ranks."""
        return {**(NCCL if self.gpus else {}), **self.environment}

    def train(self, *, config: str, **start: str | int | None) -> list[str]:
        """Returns the words of the command on one node.

        Args:
            config: path of the run file there.
            start: options of the start, such as node_rank="$RANK"; None and those of a single node are left out.
        """
        alone = self.nodes == 1
        words = ["rankfold", "train", "--nproc", str(start.pop("nproc", self.ranks))]
        given = {} if alone else {"nnodes": self.nodes, **start}
        for name, value in (*given.items(), ("max_restarts", self.max_restarts), ("shutdown_timeout", self.grace)):
            if value is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        words += ["--config", config]
        if self.run_dir is not None:
            words += ["--checkpoint.dir", self.run_dir]
        return [*words, *self.words]
