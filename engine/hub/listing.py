"""The files of a repository of the hub at one commit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import UserError
from engine.hub.client import SECONDS, Doing, RepoKind, answered, api, asking, endpoint

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository, as the hub lists it.

    Args:
        path: in the repository, with slashes.
        size: in bytes.
        digest: SHA-256 of a file in large-file storage; else the SHA-1 that git gives it, in hexadecimal.
    """

    path: str
    size: int
    digest: str

    @property
    def is_large(self) -> bool:
        """Whether it is in large-file storage."""
        return len(self.digest) == 64


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit.

    Args:
        repo: OWNER/NAME.
        commit: in hexadecimal.
        files: by path.
        kind: of the repository.
        is_private: whether others do not see it.
    """

    repo: str
    commit: str
    files: Mapping[str, RemoteFile]
    kind: RepoKind = "model"
    is_private: bool = False


def list_files(repo: str, revision: str | None, kind: RepoKind = "model", doing: Doing = "download") -> Listing:
    """Returns what a repository has at a revision, None for its default branch.

    Args:
        repo: OWNER/NAME.
        revision: a branch, a tag or a commit.
        kind: of the repository.
        doing: the work that this is part of.

    Raises:
        UserError: the hub does not answer, does not have it or does not give it, or lists what no repository can hold.
    """
    with asking(repo, revision, kind=kind, doing=doing), answered(repo):
        info = api().repo_info(repo, revision=revision, repo_type=kind, files_metadata=True, timeout=SECONDS)
    commit = info.sha
    if not isinstance(commit, str) or _SHA1.fullmatch(commit) is None:
        raise UserError(f"{endpoint()} gives {commit!r} as the commit of {repo}: this is no Hugging Face hub.")
    files = {}
    for sibling in info.siblings or ():
        path, lfs = sibling.rfilename, sibling.lfs
        digest = sibling.blob_id if lfs is None else lfs.sha256
        size = sibling.size if lfs is None else lfs.size
        if not _is_safe(path):
            raise UserError(f"{repo} lists a file {path!r}, which would be outside of its folder: it is not used.")
        shape = _SHA1 if lfs is None else _SHA256
        if not isinstance(digest, str) or shape.fullmatch(digest) is None or not isinstance(size, int) or size < 0:
            raise UserError(f"{endpoint()} lists {path} of {repo} without its size and checksum: it is not used.")
        files[path] = RemoteFile(path, size, digest)
    return Listing(repo, commit, files, kind, is_private=bool(info.private))


def _is_safe(path: object) -> bool:
    """Returns whether a path stays in its folder on every system."""
    if not isinstance(path, str) or not path.isprintable() or "\\" in path or ":" in path:
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))
