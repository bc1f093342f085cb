"""`rankfold launch`: one file from one run file; nothing is submitted unless --submit is given."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.config.rules import check_world
from engine.errors import UserError
from engine.files.durable import write_named
from engine.files.refusals import writing
from engine.telemetry.output import say
from rankfold.launching import kubernetes, ray_train, skypilot, slurm
from rankfold.launching.job import Job
from rankfold.launching.options import read_request
from rankfold.launching.remarks import remarks

_ENDINGS = {"slurm": "", "ray": ".py"}
_MARK = "Written by rankfold launch "
"""Near the top of each file, so that it may be written again."""
_NEXT = {
    "slurm": ["sbatch"],
    "skypilot": ["sky", "jobs", "launch"],
    "ray": ["python"],
}


def launch(words: Sequence[str], description: str | None = None) -> None:
    """Writes the file that a command line asks for, prints the next command, and runs it where that is asked for.

    Raises:
        SystemExit: with the submitting command's status, where it failed.
        UserError: an option cannot be used, the layout does not fit, or the program that submits is not installed.
        FileError: the file cannot be written.
    """
    request = read_request(words, description)
    job = request.job
    if request.gpu_memory is not None:
        # imported where it is asked: the planner needs torch
        from rankfold.launching.planned import planned_words

        more, config = planned_words(request.config, job, request.gpu_memory)
        check_world(config, job.nodes * job.ranks)
        job = replace(job, words=(*job.words, *more))
    path = request.out or Path(f"{job.name}.{request.target}{_ENDINGS.get(request.target, '.yaml')}")
    _check_free(path)
    text = text_of(request.target, job)
    with writing(path), write_named(path) as file:
        file.write(text)
    for line in remarks(request.target, job, request.config):
        say(line)
    command = _command(request.target, job, path)
    say(f"{path} is written; to start it:\n\n    {shlex.join(command)}", sys.stdout)
    if request.submit:
        _submit(command, program="ray" if request.target == "ray" else command[0])


def text_of(target: str, job: Job) -> str:
    """Returns the file of a job for a target."""
    about = f"{_MARK}{target} for {job.config_path}."
    match target:
        case "slurm":
            return slurm.script(job, about)
        case "jobset":
            return kubernetes.to_text(kubernetes.job_set(job), about)
        case "trainjob":
            return kubernetes.to_text(kubernetes.train_job(job), about)
        case "pytorchjob":
            return kubernetes.to_text(kubernetes.pytorch_job(job), about)
        case "skypilot":
            return skypilot.to_text(job, about)
        case _:
            return ray_train.script(job, about)


def _command(target: str, job: Job, path: Path) -> list[str]:
    """Returns the words of the command that submits the file."""
    file = str(path) if not str(path).startswith("-") else f"./{path}"
    # SkyPilot takes the value from the environment of this command; without it, from a store of its own
    named = [word for name in job.secrets for word in ("--secret", name)] if target == "skypilot" else []
    return [*_NEXT.get(target, ["kubectl", "apply", "-f"]), *named, file]


def _check_free(path: Path) -> None:
    """Refuses to replace a file that somebody else wrote, such as the run file.

    Raises:
        UserError: there is such a file.
    """
    if path.is_file() and _MARK not in path.read_bytes()[:200].decode(errors="replace"):
        raise UserError(f"{path} exists and was not written by rankfold launch: give another --out.")


def _submit(command: list[str], *, program: str) -> None:
    """Runs a command.

    Args:
        program: without which it would fail.
    """
    if shutil.which(program) is None:
        raise UserError(
            f"{program} is not installed here, so that the file is written but not submitted: {shlex.join(command)}"
        )
    sys.stdout.flush()
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(status)
