"""Asks the hub through huggingface_hub, and turns each of its refusals into one sentence.

Tokens are huggingface_hub's own: HF_TOKEN, or those of `hf auth login`. No sentence contains one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from engine.errors import UserError
from engine.files.refusals import Unfinished
from engine.sentences import on_one_line

RepoKind = Literal["model", "dataset"]
Doing = Literal["download", "upload"]
_FLAGS: dict[Doing, str] = {"download": "download", "upload": "push"}
SECONDS = 30.0
"""How long the hub may take to answer a question."""


def endpoint() -> str:
    """Returns the hub's address."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def api() -> Any:
    """Returns huggingface_hub's client."""
    from huggingface_hub import HfApi

    import engine

    return HfApi(endpoint=endpoint(), library_name="rankfold", library_version=engine.__version__)


@contextmanager
def asking(
    repo: str, revision: str | None = None, *, kind: RepoKind = "model", doing: Doing = "download"
) -> Iterator[None]:
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
            f"HF_HUB_OFFLINE is set, so that {repo} cannot be asked for: unset it, or leave --{_FLAGS[doing]} out."
        ) from error
    except HfHubHTTPError as error:
        raise (_upload_refusal if doing == "upload" else _refusal)(error, repo, revision, kind) from None
    except HFValidationError as error:
        raise UserError(f"{repo} is no name on the hub ({error}): correct it.") from None
    except library.HTTPError as error:
        more = "; without --download the cache alone is used" if doing == "download" else ""
        raise Unfinished(
            f"the hub at {endpoint()} cannot be reached for {repo} ({_reason(error)}): check the connection and start "
            f"again, which resumes{more}."
        ) from None


@contextmanager
def answered(repo: str) -> Iterator[None]:
    """Turns what huggingface_hub raises over an answer that is none of a hub into a sentence; around its calls alone.

    Raises:
        UserError: it did.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except (UserError, HfHubHTTPError, HFValidationError):
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{endpoint()} answers for {repo} what huggingface_hub cannot read ({type(error).__name__}: "
            f"{_reason(error)}): this is no Hugging Face hub, or a page to log in to a network is in front of it."
        ) from error


def _said(error: Any) -> str:
    """Returns the hub's own words in brackets, or nothing."""
    from huggingface_hub import get_token

    said = on_one_line(error.server_message or error.response.headers.get("X-Error-Message") or "").rstrip(".")
    if token := get_token():  # which a server may repeat
        said = said.replace(token, "***")
    return f" ({said})" if said else ""


def _upload_refusal(error: Any, repo: str, revision: str | None, kind: RepoKind) -> UserError:
    """Returns the sentence about a request of an upload."""
    from huggingface_hub.errors import GatedRepoError

    status, said, place = error.response.status_code, _said(error), endpoint()
    owner = repo.partition("/")[0]
    if isinstance(error, GatedRepoError):
        return _refusal(error, repo, revision, kind)
    if status == 401:
        return UserError(f"{place} does not accept the token{said}: correct HF_TOKEN, or run `hf auth login`.")
    if status in (402, 403):
        return UserError(
            f"{place} does not let this token write to {repo}{said}: use a token that may write to what {owner} has, "
            "or give another name with --push."
        )
    if status in (409, 412):
        return Unfinished(f"{repo} was changed while this upload was under way{said}: start again.")
    if status == 413:
        return UserError(
            f"{place} takes no files of this size for {repo}{said}: write smaller ones with --max-shard-gb, or ask for "
            "more room there."
        )
    if status == 400:
        return UserError(f"{place} refuses the upload to {repo}{said}: correct what it names, and start again.")
    return _refusal(error, repo, revision, kind)


def _refusal(error: Any, repo: str, revision: str | None, kind: RepoKind) -> UserError:
    from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RevisionNotFoundError

    status, reason, place = error.response.status_code, _said(error), endpoint()
    page = f"{place}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    if isinstance(error, GatedRepoError):
        return UserError(
            f"{repo} is gated{reason}: ask for access on {page}, then set HF_TOKEN or run `hf auth login`."
        )
    if isinstance(error, RevisionNotFoundError):
        return UserError(f"{repo} has no revision {revision or 'main'}: give a branch, a tag or a commit of {page}.")
    if isinstance(error, RemoteEntryNotFoundError):
        return UserError(f"{repo} lacks a file that it lists{reason}: report it on {page}.")
    if status == 401 and ("redentials" in reason or "token" in reason.lower()):
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
    return on_one_line(str(error), most=200) or type(error).__name__
