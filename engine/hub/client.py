"""Asks the hub through huggingface_hub, and turns each of its refusals into one sentence.

Tokens are huggingface_hub's own: HF_TOKEN, or those of `hf auth login`. No sentence contains one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import UserError
from engine.files.refusals import Unfinished

RepoKind = Literal["model", "dataset"]
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
SECONDS = 30.0
"""How long the hub may take to answer a question."""


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
    """

    repo: str
    commit: str
    files: Mapping[str, RemoteFile]
    kind: RepoKind = "model"


def endpoint() -> str:
    """Returns the hub's address."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def api() -> Any:
    """Returns huggingface_hub's client."""
    from huggingface_hub import HfApi

    import engine

    return HfApi(endpoint=endpoint(), library_name="rankfold", library_version=engine.__version__)


def list_files(repo: str, revision: str | None, kind: RepoKind = "model") -> Listing:
    """Returns what a repository has at a revision, None for its default branch.

    Raises:
        UserError: the hub does not answer, does not have it or does not give it, or lists what no repository can hold.
    """
    with asking(repo, revision, kind=kind):
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
    return Listing(repo, commit, files, kind)


def _is_safe(path: object) -> bool:
    """Returns whether a path stays in its folder on every system."""
    if not isinstance(path, str) or not path.isprintable() or "\\" in path or ":" in path:
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))


@contextmanager
def asking(repo: str, revision: str | None = None, *, kind: RepoKind = "model") -> Iterator[None]:
    """Turns the errors of huggingface_hub inside into sentences.

    Raises:
        UserError: the hub refuses, or HF_HUB_OFFLINE is set.
        Unfinished: it cannot be reached, or not now.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from huggingface_hub.utils import get_session

    library = sys.modules[type(get_session()).__module__.partition(".")[0]]  # httpx, by its name in this version
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError(
            f"HF_HUB_OFFLINE is set, so that {repo} cannot be asked for: unset it, or leave --download out."
        ) from error
    except HfHubHTTPError as error:
        raise _refusal(error, repo, revision, kind) from None
    except HFValidationError as error:
        raise UserError(f"{repo} is no name on the hub ({error}): correct it.") from None
    except library.HTTPError as error:
        raise Unfinished(
            f"the hub at {endpoint()} cannot be reached for {repo} ({_reason(error)}): check the connection and start "
            "again, which resumes; without --download the cache alone is used."
        ) from None


def _refusal(error: Any, repo: str, revision: str | None, kind: RepoKind) -> UserError:
    from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RevisionNotFoundError

    status, place = error.response.status_code, endpoint()
    page = f"{place}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    said = " ".join((error.server_message or error.response.headers.get("X-Error-Message") or "").split())[:300]
    reason = f" ({said.rstrip('.')})" if said else ""
    if isinstance(error, GatedRepoError):
        return UserError(
            f"{repo} is gated{reason}: ask for access on {page}, then set HF_TOKEN or run `hf auth login`."
        )
    if isinstance(error, RevisionNotFoundError):
        return UserError(f"{repo} has no revision {revision or 'main'}: give a branch, a tag or a commit of {page}.")
    if isinstance(error, RemoteEntryNotFoundError):
        return UserError(f"{repo} lacks a file that it lists{reason}: report it on {page}.")
    if (status == 401 and "redentials" in said) or (status == 401 and "token" in said.lower()):
        return UserError(f"{place} does not accept the token{reason}: correct HF_TOKEN, or run `hf auth login`.")
    if status in (401, 404):
        return UserError(
            f"{place} has no {kind} {repo}, or does not show it without a token: check the name; for a private one set "
            "HF_TOKEN or run `hf auth login`."
        )
    if status == 403:
        return UserError(f"{place} does not allow this with {repo}{reason}: check the rights of the token.")
    if status == 429:
        wait = error.response.headers.get("Retry-After")
        after = f"in {wait} s" if wait and wait.isdigit() else "later"
        return Unfinished(
            f"{place} has had too many requests from here (429){reason}: start again {after}, with HF_TOKEN set for a "
            "higher limit."
        )
    if status >= 500:
        return Unfinished(f"{place} answers {status} for {repo}{reason}: start again later, which resumes.")
    return UserError(f"{place} refuses {repo} with status {status}{reason}: check its page, {page}.")


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
