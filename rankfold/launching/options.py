"""The options of `rankfold launch`, read and checked into a `Job`; options of the run stand among them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.command_line import CommandLine
from engine.config.load import has_adapters, parse_config
from engine.config.paths import path_text
from engine.config.rules import check_config, check_world
from engine.config.run import RunConfig
from engine.config.units import read_gib
from engine.errors import UserError
from engine.files.documents import read_text
from rankfold.launching.job import PORT, Job, Mount

KUBERNETES = ("jobset", "trainjob", "pytorchjob")
TARGETS = ("slurm", *KUBERNETES, "skypilot", "ray")
ONLY: dict[str, tuple[str, ...]] = {
    "image": (*KUBERNETES, "skypilot"), "shm": KUBERNETES, "mount": (*KUBERNETES, "skypilot"),
    "node_selector": KUBERNETES, "toleration": KUBERNETES, "namespace": KUBERNETES, "gpu_resource": KUBERNETES,
    "slurm": ("slurm",), "python": ("slurm",), "accelerator": ("skypilot",), "infra": ("skypilot",),
    "spot": ("skypilot",), "setup": ("skypilot",), "workdir": ("slurm", *KUBERNETES, "skypilot"),
    "time": ("slurm", *KUBERNETES),
}  # fmt: skip
"""Option -> the targets that have it; all others are for every target."""
_SIZES = {"s": 1, "m": 60, "h": 3600, "d": 86400}


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
    group.add_argument("--port", type=int, default=PORT, help=f"of the rendezvous, on the first node (default {PORT})")


def _add_life(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--name", help="of the job (default: the run file's)")
    group.add_argument("--time", type=_seconds, metavar="TIME", help="limit, as 12h, 90m or 24:00:00")
    group.add_argument(
        "--max-restarts", type=int, default=3, metavar="N", help="times that what failed starts again (default 3)"
    )
    group.add_argument(
        "--grace", type=int, default=300, metavar="SECONDS", help="time of the save after a signal (default 300)"
    )
    group.add_argument(
        "--run-dir", type=path_text, metavar="DIR", help="the run's folder, on storage that all nodes share"
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
    group.add_argument("--workdir", type=path_text, metavar="DIR", help="where relative paths of the run file begin")
    group.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="variable of the ranks")
    group.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME[=SECRET[/KEY]]",
        help="variable of the ranks whose value the scheduler has: a Kubernetes secret and its key (default: the "
        "variable's name); elsewhere the submitting environment's variable. No value is read or written",
    )


def _add_own(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--namespace", help="Kubernetes: of the objects")
    group.add_argument("--node-selector", action="append", default=[], metavar="LABEL=VALUE", help="Kubernetes")
    group.add_argument(
        "--toleration", action="append", default=[], metavar="KEY[=VALUE][:EFFECT]", help="Kubernetes: of taints"
    )
    group.add_argument(
        "--gpu-resource", default="nvidia.com/gpu", metavar="NAME", help="Kubernetes (default nvidia.com/gpu)"
    )
    group.add_argument(
        "--slurm", action="append", default=[], metavar="OPTION=VALUE", help="Slurm: a further #SBATCH line"
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
    text = read_text(arguments.config)
    given = ["--config", arguments.config, *run]
    if has_adapters(given):
        raise UserError(
            f"{arguments.config} lists several runs, but a file is written for one: start the list with "
            "rankfold train --nproc, or launch a run file for each."
        )
    config = parse_config(given)
    check_config(config)
    job = _job(arguments, text, run, config)
    if not arguments.plan:
        check_world(config, job.nodes * job.ranks)
    return Request(
        target=arguments.target,
        job=job,
        config=config,
        out=arguments.out,
        submit=arguments.submit,
        gpu_memory=(arguments.gpu_memory or 80.0) if arguments.plan else None,
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
    if arguments.plan and not arguments.gpus_per_node:
        raise UserError(
            "--plan is given with --gpus-per-node 0, but the planner answers for GPUs: leave one of them out."
        )


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
        if size is not None and not 0 < size < 2**20:
            raise UserError(f"--{option.replace('_', '-')} is {size:g}, but a size above 0 GiB is expected: change it.")


def _job(arguments: argparse.Namespace, text: str, run: Sequence[str], config: RunConfig) -> Job:
    ranks = arguments.ranks_per_node or arguments.gpus_per_node or 1
    return Job(
        name=_name(arguments),
        config_path=str(Path(arguments.config).absolute()),
        config_text=text,
        words=tuple(run),
        nodes=arguments.nodes,
        gpus=arguments.gpus_per_node,
        ranks=ranks,
        run_dir=_run_dir(arguments, config),
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
        mounts=tuple(_mount(arguments.target, one) for one in arguments.mount),
        environment=dict(_pair("--env", one, _is_variable) for one in arguments.env),
        secrets=dict(_secret(one) for one in arguments.secret),
        node_selector=dict(_pair("--node-selector", one) for one in arguments.node_selector),
        tolerations=tuple(_toleration(one) for one in arguments.toleration),
        gpu_resource=arguments.gpu_resource,
        namespace=arguments.namespace,
        accelerator=arguments.accelerator,
        infra=arguments.infra,
        spot=arguments.spot,
        batch_options=dict(_pair("--slurm", one) for one in arguments.slurm),
    )


def _run_dir(arguments: argparse.Namespace, config: RunConfig) -> str | None:
    """Returns the folder of the run: a job that starts again has to find it."""
    if arguments.run_dir is not None and config.checkpoint.dir is not None:
        raise UserError("--run-dir and checkpoint.dir are both given: leave one of them out.")
    found = arguments.run_dir or config.checkpoint.dir
    if found is None and arguments.target != "slurm":
        raise UserError(
            "neither --run-dir nor checkpoint.dir is given, but a run that starts again has to find its folder: add "
            "--run-dir with a folder on storage that all nodes share."
        )
    return found


def _name(arguments: argparse.Namespace) -> str:
    stem = Path(arguments.config).name.partition(".")[0].lower()
    name = arguments.name or re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:40].strip("-") or "run"
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise UserError(
            f"--name is {name!r}, but at most 40 lower-case letters, digits and dashes are expected, a letter first: "
            "give such a name."
        )
    return name


def _is_variable(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*", name) is not None


def _pair(option: str, text: str, is_name: Callable[[str], bool] = bool) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not is_name(name):
        raise UserError(f"{option} is {text!r}, but NAME=VALUE is expected: change it.")
    return name, value


def _secret(text: str) -> tuple[str, tuple[str, str]]:
    name, equals, source = text.partition("=")
    secret, _, key = source.partition("/")
    if not _is_variable(name) or (equals and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", secret)):
        raise UserError(
            f"--secret is {name!r}{' with a name that no secret can have' if equals else ''}, but NAME or "
            "NAME=SECRET/KEY is expected, the name of a secret and never its value: change it."
        )
    return name, (secret or name.lower().replace("_", "-"), key or name)


def _mount(target: str, text: str) -> Mount:
    source, equals, path = text.rpartition("=")
    kind, colon, where = source.partition(":")
    kinds = ("volume", "s3", "gs", "r2", "azure", "cos", "oci") if target == "skypilot" else ("pvc", "host")
    if not equals or not colon or kind not in kinds or not path.startswith(("/", "~/")):
        example = "s3://bucket=/data" if target == "skypilot" else "pvc:claim=/data"
        raise UserError(f"--mount is {text!r}, but one of {', '.join(kinds)} with a path is expected, as {example}.")
    if kind == "host" and not where.startswith("/"):
        raise UserError(f"--mount is {text!r}, but host: needs a path from the root: change it.")
    return Mount(kind=kind, source=where.removeprefix("//"), path=path)


def _toleration(text: str) -> tuple[str, str | None, str | None]:
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    effects = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
    if not key or effect not in effects:
        raise UserError(
            f"--toleration is {text!r}, but KEY[=VALUE][:EFFECT] is expected, as gpu:NoSchedule: change it."
        )
    return key, value if equals else None, effect or None


def _seconds(text: str) -> Any:
    if found := re.fullmatch(r"(\d+)([smhd])", text):
        return int(found[1]) * _SIZES[found[2]]
    if found := re.fullmatch(r"(\d+):(\d\d):(\d\d)", text):
        return int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3])
    raise argparse.ArgumentTypeError(f"is {text!r}, but a time such as 12h, 90m or 24:00:00 is expected: change it.")
