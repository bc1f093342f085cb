"""The options of `rankfold launch`, read and checked into a `Job`; options of the run stand among them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config.command_line import CommandLine
from engine.config.load import has_adapters, parse_config
from engine.config.paths import path_text
from engine.config.rules import check_config, check_world
from engine.config.run import RunConfig
from engine.config.units import read_gib
from engine.errors import UserError
from engine.files.documents import read_text
from rankfold.launching import values
from rankfold.launching.job import PORT, Job
from rankfold.launching.slurm import notice_before_limit

KUBERNETES = ("jobset", "trainjob", "pytorchjob")
TARGETS = ("slurm", *KUBERNETES, "skypilot", "ray")
ONLY: dict[str, tuple[str, ...]] = {
    "image": (*KUBERNETES, "skypilot"), "shm": KUBERNETES, "mount": (*KUBERNETES, "skypilot"),
    "node_selector": KUBERNETES, "toleration": KUBERNETES, "namespace": KUBERNETES, "gpu_resource": KUBERNETES,
    "slurm": ("slurm",), "python": ("slurm",), "accelerator": ("skypilot",), "infra": ("skypilot",),
    "spot": ("skypilot",), "setup": ("skypilot",), "workdir": ("slurm", *KUBERNETES, "skypilot"),
    "time": ("slurm", *KUBERNETES), "port": (*KUBERNETES, "skypilot", "ray"),
}  # fmt: skip
"""Option -> the targets that have it; all others are for every target."""
_DOWNLOAD = "--hub.download=true"
_LONGEST_NOTICE = 65535
"""Seconds before the limit at which Slurm can tell a job, at most."""


def build_parser(description: str | None) -> CommandLine:
    """Returns the parser with all options."""
    parser = CommandLine(description=description)
    parser.add_argument("target", choices=TARGETS, metavar="TARGET", help=f"one of {', '.join(TARGETS)}")
    parser.add_argument("--config", type=path_text, required=True, metavar="FILE", help="the run file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the file to write (default: by the job's name)")
    parser.add_argument("--submit", action="store_true", help="also run the command that submits the file")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="ask the planner for the layout, and write its answer's options into the file",
    )
    parser.add_argument(
        "--download", action="store_true", help="nodes download what is named as on the Hugging Face hub"
    )
    parser.add_argument(
        "--gpu-memory", type=read_gib, metavar="GIB", help="memory of a GPU, for --plan, as 80 or 80GB (default 80)"
    )
    _add_machines(parser.add_argument_group("machines"))
    _add_life(parser.add_argument_group("life of the job"))
    _add_place(parser.add_argument_group("containers and storage"))
    _add_own(parser.add_argument_group("options of one scheduler"))
    return parser


def _add_machines(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default 1)")
    group.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of each (default 8; 0 for CPUs)")
    group.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="ranks of each (default: one for each GPU, or one on CPUs)"
    )
    group.add_argument("--cpus", type=int, metavar="N", help="CPU cores of each (default: the scheduler's)")
    group.add_argument("--memory", type=read_gib, metavar="GIB", help="memory of each, as 512 or 512GiB")
    group.add_argument(
        "--port", type=int, default=PORT, help=f"port of the rendezvous on the first node (default {PORT})"
    )


def _add_life(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--name", help="name of the job (default: the run file's)")
    group.add_argument("--time", type=values.seconds, metavar="TIME", help="time limit, as 12h, 90m or 24:00:00")
    group.add_argument("--max-restarts", type=int, default=3, metavar="N", help="restarts after a failure (default 3)")
    group.add_argument(
        "--grace", type=int, default=300, metavar="SECONDS", help="time for the save after a signal (default 300)"
    )
    group.add_argument(
        "--run-dir",
        type=path_text,
        metavar="DIR",
        help="the run's folder, on storage that all nodes share; wins over checkpoint.dir of the run file",
    )


def _add_place(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--image", help="container image that has rankfold")
    group.add_argument(
        "--mount",
        action="append",
        default=[],
        metavar="WHAT=PATH",
        help="storage at PATH: pvc:CLAIM or host:/FOLDER on Kubernetes; volume:NAME, s3://BUCKET, gs://... on SkyPilot",
    )
    group.add_argument("--shm", type=read_gib, default=16.0, metavar="GIB", help="shared memory (default 16)")
    group.add_argument(
        "--workdir", type=path_text, metavar="DIR", help="folder where relative paths of the run file start"
    )
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable of the ranks"
    )
    group.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME[=SECRET[/KEY]]",
        help="environment variable whose value the scheduler supplies: a Kubernetes secret and its key (default: the "
        "variable's name); elsewhere the submitting environment's variable. No value is read or written",
    )


def _add_own(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--namespace", help="Kubernetes: namespace of the objects")
    group.add_argument(
        "--node-selector", action="append", default=[], metavar="LABEL=VALUE", help="Kubernetes: label of the nodes"
    )
    group.add_argument(
        "--toleration", action="append", default=[], metavar="KEY[=VALUE][:EFFECT]", help="Kubernetes: tolerated taint"
    )
    group.add_argument(
        "--gpu-resource",
        default="nvidia.com/gpu",
        metavar="NAME",
        help="Kubernetes: resource of the GPUs (default nvidia.com/gpu)",
    )
    group.add_argument(
        "--slurm", action="append", default=[], metavar="OPTION[=VALUE]", help="Slurm: a further #SBATCH line"
    )
    group.add_argument(
        "--python", type=path_text, metavar="PATH", help="Slurm: Python on the nodes (default: this one)"
    )
    group.add_argument("--accelerator", metavar="NAME", help="SkyPilot: kind of GPU, such as H100")
    group.add_argument("--infra", metavar="CLOUD", help="SkyPilot: cloud, region and zone, as aws/us-east-1")
    group.add_argument("--spot", action="store_true", help="SkyPilot: preemptible machines")
    group.add_argument("--setup", metavar="COMMANDS", help="SkyPilot: shell commands that install rankfold on a node")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was asked for.

    Args:
        target: one of TARGETS.
        job: without the planner's options.
        config: of the run, checked.
        out: the file; None by the job's name.
        submit: whether it is submitted.
        gpu_memory: GiB of a GPU, where the planner is asked; None where it is not.
    """

    target: str
    job: Job
    config: RunConfig
    out: Path | None
    submit: bool
    gpu_memory: float | None


def read_request(words: Sequence[str], description: str | None = None) -> Request:
    """Reads a command line.

    Raises:
        UserError: an option cannot be used, or not by this target, or the layout does not fit the ranks.
    """
    own, run = _split(words)
    parser = build_parser(description)
    arguments = parser.parse_args(own)
    _check_target(arguments, own)
    _check_numbers(arguments)
    values.check_forms(arguments)
    if arguments.download:
        run.append(_DOWNLOAD)
    if arguments.plan:
        _check_plan(arguments, run)
    text = read_text(arguments.config)
    given = ["--config", arguments.config, *run]
    if has_adapters(given):
        raise UserError(
            f"{arguments.config} lists several runs, but a file is written for one: start the list with "
            "rankfold train --nproc, or launch a run file for each."
        )
    config = parse_config(given)
    check_config(config)
    if config.checkpoint.resume == "none":
        raise UserError(
            "checkpoint.resume is none, with which a job that starts again is refused in its own folder: set auto, "
            "which begins anew in an empty one."
        )
    job = _job(arguments, text, run, config)
    values.check_texts(job)
    if not arguments.plan:
        check_world(config, job.nodes * job.ranks)
    return Request(
        target=arguments.target,
        job=job,
        config=config,
        out=arguments.out,
        submit=arguments.submit,
        gpu_memory=_gpu_memory(arguments) if arguments.plan else None,
    )


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divides the words into this command's and the run's: those are --SECTION.OPTION with their values."""
    own: list[str] = []
    run: list[str] = []
    into = own
    for word in words:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            into = run if "." in name else own
            into.append(word)
            if equals:
                into = own
            continue
        into.append(word)
        if into is run:
            into = own
    return own, run


def _check_target(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    given = {word.partition("=")[0] for word in words}
    for option, targets in ONLY.items():
        flag = f"--{option.replace('_', '-')}"
        if flag in given and arguments.target not in targets:
            raise UserError(
                f"{flag} is for {' and '.join(targets)}, but the target is {arguments.target}: leave it out."
            )
    if arguments.target in KUBERNETES and arguments.image is None:
        raise UserError(f"--image is not given, but {arguments.target} runs containers: add --image NAME.")
    if arguments.target == "skypilot":
        if arguments.gpus_per_node and arguments.accelerator is None:
            raise UserError("--accelerator is not given: add the kind of GPU, such as --accelerator H100.")
        if arguments.image is None and arguments.setup is None:
            raise UserError(
                "neither --image nor --setup is given, but machines of SkyPilot start without rankfold: add an image "
                "that has it, or --setup 'pip install ...'."
            )
    if arguments.gpu_memory is not None and not arguments.plan:
        raise UserError("--gpu-memory is for --plan, which is not given: add it, or leave --gpu-memory out.")
    if not arguments.gpus_per_node and arguments.accelerator is not None:
        raise UserError("--accelerator is given with --gpus-per-node 0: leave one of them out.")
    if arguments.target == "skypilot" and arguments.workdir is not None and not Path(arguments.workdir).is_dir():
        raise UserError(
            f"--workdir is {arguments.workdir}, which is no folder here, but SkyPilot copies it from here to the "
            "nodes: change it."
        )
    if arguments.target in KUBERNETES and arguments.workdir is not None and not arguments.workdir.startswith("/"):
        raise UserError(
            f"--workdir is {arguments.workdir}, but a path of the container that begins with / is expected: change it."
        )
    if arguments.plan and not arguments.gpus_per_node:
        raise UserError(
            "--plan is given with --gpus-per-node 0, but the planner answers for GPUs: leave one of them out."
        )


def _check_plan(arguments: argparse.Namespace, run: Sequence[str]) -> None:
    """Refuses a plan that contradicts the run's options, or that is for another GPU than the job gets.

    Raises:
        UserError: it does.
    """
    chosen = next((word.partition("=")[0] for word in run if word.startswith(("--parallel.", "--memory."))), None)
    if chosen is not None:
        raise UserError(f"--plan chooses what {chosen} sets: leave one of them out.")
    if _gpu_memory(arguments) is None:
        raise UserError(
            f"--plan is given with --accelerator {arguments.accelerator}, but not its memory: add --gpu-memory, as "
            "--gpu-memory 80."
        )


def _gpu_memory(arguments: argparse.Namespace) -> float | None:
    """Returns GiB of a GPU: as given, as in the name of an accelerator, or 80; None of an accelerator without."""
    if arguments.gpu_memory is not None:
        return float(arguments.gpu_memory)
    if arguments.accelerator is None:
        return 80.0
    named = re.search(r"-(\d{2,3})GB", arguments.accelerator, re.IGNORECASE)
    return float(named[1]) if named else None


def _check_numbers(arguments: argparse.Namespace) -> None:
    for option, least, most in (
        ("nodes", 1, 10000), ("gpus_per_node", 0, 64), ("ranks_per_node", 1, 1024), ("cpus", 1, 4096),
        ("port", 1024, 65535), ("max_restarts", 0, 10000), ("grace", 1, 86400),
    ):  # fmt: skip
        value = getattr(arguments, option)
        if value is not None and not least <= value <= most:
            raise UserError(f"--{option.replace('_', '-')} is {value}, but {least} to {most} is expected: change it.")
    for option in ("memory", "shm", "gpu_memory"):
        size = getattr(arguments, option)
        if size is not None and not 2**-10 <= size < 2**20:
            raise UserError(
                f"--{option.replace('_', '-')} is {size:g}, but a size from 1 MiB to a PiB is expected, in GiB: change "
                "it."
            )
    gpus, ranks = arguments.gpus_per_node, arguments.ranks_per_node
    if ranks is not None and 0 < gpus < ranks:
        raise UserError(
            f"--ranks-per-node is {ranks} and --gpus-per-node {gpus}, but each rank needs a GPU of its own: give at "
            f"most --ranks-per-node {gpus}, or --gpus-per-node 0 for ranks on CPUs."
        )
    if arguments.target == "slurm":
        _check_notice(arguments)


def _check_notice(arguments: argparse.Namespace) -> None:
    """Refuses a job that Slurm would stop as soon as it starts, or cannot tell in time."""
    notice = notice_before_limit(arguments.grace)
    if notice > _LONGEST_NOTICE:
        raise UserError(
            f"--grace is {arguments.grace}, but Slurm tells a job at most {_LONGEST_NOTICE} seconds before its limit: "
            f"give at most {_LONGEST_NOTICE - notice_before_limit(0)}."
        )
    if arguments.time is not None and arguments.time <= 2 * notice:
        raise UserError(
            f"--time is {arguments.time} seconds, of which the last {notice} are for the save and its --grace: give "
            f"more than {2 * notice} seconds, or less --grace."
        )


def _job(arguments: argparse.Namespace, text: str, run: Sequence[str], config: RunConfig) -> Job:
    ranks = arguments.ranks_per_node or arguments.gpus_per_node or 1
    secrets = values.secrets(arguments.target, arguments.secret, kubernetes=arguments.target in KUBERNETES)
    return Job(
        name=_name(arguments),
        config_path=str(Path(arguments.config).absolute()),
        config_text=text,
        words=tuple(run),
        nodes=arguments.nodes,
        gpus=arguments.gpus_per_node,
        ranks=ranks,
        run_dir=_run_dir(arguments, run, config),
        python=arguments.python or sys.executable,
        port=arguments.port,
        seconds=arguments.time,
        grace=arguments.grace,
        max_restarts=arguments.max_restarts,
        cpus=arguments.cpus,
        memory=arguments.memory,
        shm=arguments.shm,
        image=arguments.image,
        setup=arguments.setup,
        workdir=arguments.workdir,
        mounts=values.mounts(arguments.target, arguments.mount),
        environment=values.variables(arguments.env, secrets),
        secrets=secrets,
        node_selector=dict(values.node_label(one) for one in arguments.node_selector),
        tolerations=tuple(values.toleration(one) for one in arguments.toleration),
        gpu_resource=arguments.gpu_resource,
        namespace=arguments.namespace,
        accelerator=arguments.accelerator,
        infra=arguments.infra,
        spot=arguments.spot,
        batch_options=values.batch_options(arguments.slurm),
    )


def _run_dir(arguments: argparse.Namespace, run: Sequence[str], config: RunConfig) -> str | None:
    """Returns the folder of the run, which a job that starts again has to find; --run-dir wins over the run file."""
    if arguments.run_dir is not None and any(word.partition("=")[0] == "--checkpoint.dir" for word in run):
        raise UserError("--run-dir and --checkpoint.dir are both given: leave one of them out.")
    found = arguments.run_dir or config.checkpoint.dir
    if found is None and arguments.target != "slurm":
        raise UserError(
            "neither --run-dir nor checkpoint.dir is given, but a run that starts again has to find its folder: add "
            "--run-dir with a folder on storage that all nodes share."
        )
    return found


def _name(arguments: argparse.Namespace) -> str:
    stem = Path(arguments.config).name.partition(".")[0].lower()
    plain = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")
    name = arguments.name or (plain if plain[:1].isalpha() else f"run-{plain}")[:40].strip("-")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise UserError(
            f"--name is {name!r}, but at most 40 lower-case letters, digits and dashes are expected, a letter first: "
            "give such a name."
        )
    return name
