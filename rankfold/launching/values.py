"""Values of the options of `rankfold launch`: parsed, and refused where a scheduler would refuse them later.

No secret is taken here: a value that looks like one is refused, and no sentence repeats it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from engine.errors import UserError
from engine.sentences import as_written
from rankfold.launching.job import RANK_VARIABLES, Job, Mount

BUCKETS = ("s3", "gs", "r2", "https", "cos", "oci", "nebius")
"""Schemes of SkyPilot's buckets; https is Azure's."""
_OWN_PLACES = ("/dev/shm", "/etc/rankfold")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_LABEL_KEY = rf"({_SUBDOMAIN}/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?"
_FORMS = {
    "image": (r"\S+", "a name without spaces"),
    "namespace": (r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "a name of at most 63 lower-case letters, digits and dashes"),
    "gpu_resource": (rf"{_SUBDOMAIN}/[A-Za-z0-9][-\w.]*", "the name of a resource such as nvidia.com/gpu"),
    "accelerator": (r"[A-Za-z0-9][-\w.]*", "one kind of GPU such as H100, without a number,"),
    "infra": (r"[a-z0-9-]+(/[\w*-]+){0,2}", "CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE"),
}
"""Option -> the form of its value, and its words."""
_SLURM_OWN = {
    "nodes": "--nodes", "time": "--time", "job-name": "--name", "cpus-per-task": "--cpus", "ntasks": "--nodes",
    "ntasks-per-node": "--ranks-per-node", "signal": "--grace", "requeue": "", "no-requeue": "", "array": "",
}  # fmt: skip
"""Options of sbatch that the script depends on -> the option of this command that stands for it, if there is one."""
_SECRET_NAME = re.compile(r"(.*_)?(TOKEN|SECRET|PASSWORD|PASSWD|(API)?KEY)", re.I)
_SECRET_VALUE = re.compile(
    r"(?<![A-Za-z0-9])(hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|ghp_\w{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16})"
    r"|://[^\s/:@]*:[^\s/@]+@"
)
"""A token, or an address with a password."""
_KEY_OF_DIGITS = re.compile(r"[0-9a-f]{32,}")


def check_forms(arguments: argparse.Namespace) -> None:
    """Refuses names that the scheduler would not take.

    Raises:
        UserError: there is one.
    """
    for option, (form, words) in _FORMS.items():
        value = getattr(arguments, option)
        if value is not None and not re.fullmatch(form, value, re.ASCII):
            raise UserError(f"--{option.replace('_', '-')} is {as_written(value)}, but {words} is expected: change it.")


def check_texts(job: Job) -> None:
    """Refuses what no file can hold, or what would end a line of it where a line is all there is.

    Raises:
        UserError: there is such a text.
    """
    for one in fields(job):
        for text in _texts(getattr(job, one.name)):
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise UserError(f"{as_written(text)} has bytes that are not UTF-8, but the file is: give another name.")
            if one.name not in ("config_text", "words", "environment", "setup") and re.search(r"[\x00-\x1f\x7f]", text):
                raise UserError(
                    f"{as_written(text)} has a line break or another control character, which the file cannot have "
                    "there: give another name."
                )
            if one.name not in ("environment", "secrets") and _SECRET_VALUE.search(text):
                place = job.config_path if one.name == "config_text" else "an option"
                raise UserError(
                    f"{place} holds what looks like a token or a password, which would be in the file that is "
                    "written: take it out, and give the variable that has it as --secret NAME."
                )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mount):
        yield from (value.source, value.path)
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for one in pair for text in _texts(one))
    elif isinstance(value, Sequence):
        yield from (text for one in value for text in _texts(one))


def variables(given: Sequence[str], secrets: Mapping[str, object]) -> dict[str, str]:
    """Returns --env as variable -> value.

    Raises:
        UserError: a name or its value cannot be used, or is a secret's.
    """
    found: dict[str, str] = {}
    for text in given:
        name, value = pair("--env", text, is_variable)
        if name in found or name in secrets:
            raise UserError(f"--env {name} is given twice, or as --secret too: leave one of them out.")
        if _SECRET_NAME.fullmatch(name) or _SECRET_VALUE.search(value):
            raise UserError(
                f"--env {name} would write its value into the file, and it looks like a secret: give --secret {name}, "
                "which names it alone."
            )
        found[name] = value
    return found


def secrets(target: str, given: Sequence[str], *, kubernetes: bool) -> dict[str, tuple[str, str]]:
    """Returns --secret as variable -> (name of the scheduler's secret, key in it).

    Args:
        kubernetes: whether the target keeps secrets under names of its own.

    Raises:
        UserError: it is not the name of a secret, or the target takes variables only.
    """
    found: dict[str, tuple[str, str]] = {}
    for text in given:
        name, equals, source = text.partition("=")
        secret, slash, key = source.partition("/")
        meant = not equals or (
            re.fullmatch(_SUBDOMAIN, secret) is not None
            and not _KEY_OF_DIGITS.fullmatch(secret)
            and (not slash or re.fullmatch(r"[-\w.]{1,60}", key, re.ASCII) is not None)
            and not _SECRET_VALUE.search(source)
        )
        shown = name if is_variable(name) else "given"
        if not is_variable(name) or not meant:
            flaw = " with what no secret is called" if is_variable(name) else ""
            raise UserError(
                f"--secret is {shown!r}{flaw}, but NAME or NAME=SECRET/KEY is expected, the name of a secret and never "
                "its value: change it."
            )
        if equals and not kubernetes:
            raise UserError(
                f"--secret {name} names a secret of Kubernetes, but {target} takes the variable of the environment in "
                f"which the job is submitted: give --secret {name}."
            )
        if name in found:
            raise UserError(f"--secret {name} is given twice: leave one of them out.")
        found[name] = (secret or name.lower().replace("_", "-"), key or name)
    return found


def is_variable(name: str) -> bool:
    """Returns whether a variable may have that name.

    Raises:
        UserError: the launcher or the scheduler sets it.
    """
    if name in RANK_VARIABLES or name.startswith(("TORCHELASTIC_", "PET_")):
        raise UserError(f"{name} is set by the launcher on each node: leave it out.")
    return re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is not None


def pair(option: str, text: str, is_name: Callable[[str], bool] = bool) -> tuple[str, str]:
    """Returns NAME=VALUE divided.

    Raises:
        UserError: it has another form.
    """
    name, equals, value = text.partition("=")
    if not equals or not is_name(name):
        raise UserError(f"{option} is {as_written(text)}, but NAME=VALUE is expected: change it.")
    return name, value


def node_label(text: str) -> tuple[str, str]:
    """Returns a label of Kubernetes' nodes.

    Raises:
        UserError: it is none.
    """
    name, value = pair("--node-selector", text)
    if not re.fullmatch(_LABEL_KEY, name, re.ASCII) or not re.fullmatch(r"([A-Za-z0-9]([-\w.]*[A-Za-z0-9])?)?", value):
        raise UserError(f"--node-selector is {as_written(text)}, but LABEL=VALUE is expected, as pool=h100: change it.")
    return name, value


def toleration(text: str) -> tuple[str, str | None, str | None]:
    """Returns a toleration as key, value and effect.

    Raises:
        UserError: it has another form.
    """
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    effects = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
    if not re.fullmatch(_LABEL_KEY, key, re.ASCII) or effect not in effects:
        raise UserError(
            f"--toleration is {as_written(text)}, but KEY[=VALUE][:EFFECT] is expected, as gpu:NoSchedule: change it."
        )
    return key, value if equals else None, effect or None


def mounts(target: str, given: Sequence[str]) -> tuple[Mount, ...]:
    """Returns --mount as storage, each at a place of its own.

    Raises:
        UserError: a kind is not the target's, or a place is taken.
    """
    found: dict[str, Mount] = {}
    for text in given:
        one = _mount(target, text)
        taken = [*found, *(() if target == "skypilot" else _OWN_PLACES)]
        if one.path == "/" or any(f"{place}/".startswith(f"{one.path}/") for place in taken):
            raise UserError(f"--mount is {as_written(text)}, but {one.path} is taken: give another path.")
        found[one.path] = one
    return tuple(found.values())


def _mount(target: str, text: str) -> Mount:
    source, equals, path = text.rpartition("=")
    kind, colon, where = source.partition(":")
    kinds, roots = (("volume", *BUCKETS), ("/", "~/")) if target == "skypilot" else (("pvc", "host"), ("/",))
    name = where.removeprefix("//") if kind in BUCKETS else where
    if not equals or not colon or kind not in kinds or not path.startswith(roots) or ":" in path:
        example = "s3://bucket=/data" if target == "skypilot" else "pvc:claim=/data"
        raise UserError(
            f"--mount is {as_written(text)}, but one of {', '.join(kinds)} with a path is expected, as {example}."
        )
    form = {"pvc": _SUBDOMAIN, "host": r"/.*", "volume": r"[A-Za-z0-9][-\w.]*"}.get(kind, r"[A-Za-z0-9][-\w./]*")
    if not re.fullmatch(form, name, re.ASCII if kind != "host" else 0):
        needed = "a path from the root" if kind == "host" else f"the name of a {'claim' if kind == 'pvc' else kind}"
        raise UserError(f"--mount is {as_written(text)}, but {needed} is expected behind {kind}: change it.")
    return Mount(kind=kind, source=name, path=path.rstrip("/") or "/")


def batch_options(given: Sequence[str]) -> dict[str, str | None]:
    """Returns --slurm as option -> value, None for an option without one.

    Raises:
        UserError: it is no option, or one that the script depends on.
    """
    found: dict[str, str | None] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            raise UserError(
                f"--slurm is {as_written(text)}, but OPTION=VALUE is expected, as partition=gpu, without dashes before "
                "it: change it."
            )
        if name in _SLURM_OWN:
            instead = _SLURM_OWN[name]
            advice = f"give {instead} instead" if instead else "leave it out"
            raise UserError(f"--slurm {name} is an option on which the script depends: {advice}.")
        found[name] = value if equals else None
    return found


def seconds(text: str) -> int:
    """Parses a time limit.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if found := re.fullmatch(r"(\d{1,9})([smhd])", text, re.ASCII):
        value = int(found[1]) * _UNITS[found[2]]
    elif found := re.fullmatch(r"(\d{1,6}):([0-5]\d):([0-5]\d)", text, re.ASCII):
        value = int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3])
    else:
        raise argparse.ArgumentTypeError(
            f"is {as_written(text)}, but a time such as 12h, 90m or 24:00:00 is expected: change it."
        )
    if not 60 <= value <= 3650 * 86400:
        raise argparse.ArgumentTypeError(f"is {text}, but a minute to ten years is expected: change it.")
    return value
