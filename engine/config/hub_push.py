"""The flags by which a command uploads what it writes to the Hugging Face hub."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from engine.config.hub import HubName, parse_name
from engine.errors import UserError
from engine.seams import resolve
from engine.sentences import as_written

_BRANCH = re.compile(r"\w[\w./-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """Where an export is uploaded to.

    Args:
        repo: OWNER/NAME of a model on the hub, which is made where it is not there.
        branch: that gets the commit, made where it is not there; None for the default branch.
        private: others may not see the repository.
        message: of the commit; None for one that names the kind of export.
        replace: the repository may hold a model or an adapter that was not uploaded by rankfold.
    """

    repo: str
    branch: str | None = None
    private: bool = False
    message: str | None = None
    replace: bool = False

    def __str__(self) -> str:
        return str(HubName(self.repo, self.branch))


def add_push(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to a parser that has --overwrite."""
    group = parser.add_argument_group("upload to the Hugging Face hub")
    group.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="upload what was written to this repository, which is made where it is not there; the token is HF_TOKEN "
        "or that of `hf auth login`",
    )
    group.add_argument("--private", action="store_true", help="others may not see the repository")
    group.add_argument(
        "--revision", "--branch", metavar="BRANCH", help="branch that gets the commit (default: the repository's own)"
    )
    group.add_argument("--commit-message", metavar="TEXT", help="first line of the commit's message")


def push_of(arguments: argparse.Namespace) -> Push | None:
    """Returns what parsed arguments ask to be uploaded; None without --push.

    Raises:
        UserError: a value cannot be used, or belongs to --push, which is not there.
    """
    given, branch, message = arguments.push, arguments.revision, arguments.commit_message
    if given is None:
        flags = {"--private": arguments.private, "--revision": branch, "--commit-message": message}
        if alone := [flag for flag, value in flags.items() if value]:
            raise UserError(f"{alone[0]} is for an upload: add --push OWNER/NAME, or leave it out.")
        return None
    name = parse_name(given)
    if name is None:
        raise UserError(f"--push is {as_written(given)}, but a name on the hub is expected: give OWNER/NAME.")
    if name.revision is not None and branch is not None:
        raise UserError(f"--push {given} names a branch, and so does --revision {branch}: leave one of them out.")
    branch = branch if branch is not None else name.revision
    if branch is not None:
        _check_branch(branch)
    if message is not None and not message.strip():
        raise UserError("--commit-message is empty: write one, or leave it out.")
    return Push(repo=name.repo, branch=branch, private=arguments.private, message=message, replace=arguments.overwrite)


def check_push(push: Push) -> None:
    """Refuses before any work what can be known about an upload.

    Raises:
        UserError: it cannot succeed.
    """
    resolve("engine.hub.publish:check")(push)


def upload(folder: Path, push: Push, *, stays: bool = True) -> None:
    """Uploads a folder that holds a PEFT adapter or a model that transformers opens.

    Args:
        folder: of the export.
        push: where to.
        stays: the folder is there afterwards, so that it can be uploaded later.

    Raises:
        UserError: see `engine.hub.publish`.
    """
    try:
        resolve("engine.hub.publish:publish")(folder, push)
    except UserError as error:
        if not stays:
            raise
        sentence = f"{error} The export is in {folder}: `rankfold export {folder} --push {push}` uploads it later."
        raise type(error)(sentence) from error


def _check_branch(branch: str) -> None:
    if HubName("", branch).is_pinned:
        raise UserError(f"--revision {branch} is a commit, which cannot get another one: give a branch.")
    ends = (".", "/", ".lock")
    if _BRANCH.fullmatch(branch) is None or ".." in branch or "//" in branch or branch.endswith(ends):
        raise UserError(f"--revision is {as_written(branch)}, which is no name of a branch: give one such as main.")
