"""Uploads an export to a model's repository on the hub, in one commit, and looks at what arrived.

Large files go to the hub's storage first, and those that it has are not sent again. The commit comes last and holds all
files, so that a branch never has half of an export; an upload that was interrupted is started again as it was. A
repository that holds something else is not touched, nor is a card's text that people wrote.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import engine
from engine.checkpoint.folder import ADAPTER_CONFIG, CONFIG, MERGE_REPORT
from engine.checkpoint.tokenizer_files import is_tokenizer_file
from engine.config.hub_push import Push
from engine.conversion.model_card import CARD
from engine.errors import UserError
from engine.files.documents import read_text
from engine.files.refusals import Unfinished
from engine.hub.cache import CachedRepo
from engine.hub.cards import is_ours, joined_card, own_card
from engine.hub.client import answered, api, asking, endpoint
from engine.hub.download import Downloads
from engine.hub.library_lines import library_lines
from engine.hub.listing import Listing, list_files
from engine.hub.outgoing import Outgoing, outgoing
from engine.printable import printable
from engine.sentences import listed, on_one_line
from engine.telemetry.format import counted, format_bytes
from engine.telemetry.log import Log

_ATTEMPTS = 3
_WAIT_SECONDS = 5.0
_MAX_CARD = 1 << 20
_KINDS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_NAMES = (ADAPTER_CONFIG, CONFIG, MERGE_REPORT, "generation_config.json", "preprocessor_config.json",
          "processor_config.json", "video_preprocessor_config.json")  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Branch:
    """A branch before the upload.

    Args:
        listing: its files, those of the default branch where it is not there; None where there is no repository.
        is_new: whether it has to be made.
        card: its card; None where it has none.
    """

    listing: Listing | None
    is_new: bool = False
    card: str | None = None


def check(push: Push) -> None:
    """Refuses an upload that cannot succeed, before anything is exported.

    Raises:
        UserError: there is no token, the hub cannot be asked, or the repository holds something else.
    """
    _token(push)
    _look(push, Log())


def publish(folder: Path, push: Push) -> None:
    """Uploads a folder, and prints where it is.

    Args:
        folder: of a PEFT adapter, or of a model that transformers opens.
        push: the repository.

    Raises:
        UserError: the folder is of another kind or names what is private, the hub refuses, or the repository holds
            something else.
        Unfinished: the hub cannot be reached; the same call continues.
    """
    log, what = Log(), outgoing(folder, _token(push))
    for note in what.left_out:
        log.info(f"note: {note}")
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with library_lines(log):
                _upload(what, push, log)
            return
        except Unfinished as error:
            if attempt == _ATTEMPTS:
                raise
            wait = attempt * _WAIT_SECONDS
            log.info(f"note: {error} Trying again in {wait:.0f} s ({attempt + 1} of {_ATTEMPTS}).")
            time.sleep(wait)


def _token(push: Push) -> str:
    """Returns the person's token.

    Raises:
        UserError: there is none, or HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"HF_HUB_OFFLINE is set, so that nothing can be uploaded to {push.repo}: unset it, or leave --push out."
        )
    token = get_token()
    if not token:
        raise UserError(
            f"{endpoint()} takes uploads to {push.repo} with a token alone: set HF_TOKEN to one that may write, or run "
            "`hf auth login`."
        )
    return token


def _look(push: Push, log: Log) -> _Branch:
    """Returns what a branch has.

    Raises:
        UserError: it holds a model or an adapter that was not uploaded by rankfold, or is not private.
    """
    with asking(push.repo, doing="upload"), answered(push.repo):
        if not api().repo_exists(push.repo):
            return _Branch(None)
        is_new = push.branch is not None and not api().revision_exists(push.repo, push.branch)
    listing = list_files(push.repo, None if is_new else push.branch, doing="upload")
    if push.private and not listing.is_private:
        raise UserError(
            f"{push.repo} exists and is public, but --private asks for a private one: change that on "
            f"{endpoint()}/{push.repo}/settings, or give another name."
        )
    card = _card(listing, log)
    held = [name for name in listing.files if name.endswith(_KINDS) or name in (ADAPTER_CONFIG, CONFIG)]
    if held and not push.replace and not is_ours(card, push.repo):
        raise UserError(
            f"{push} exists and has {held[0]}, which was not uploaded by rankfold: give another name, or add "
            "--overwrite to replace what is there."
        )
    return _Branch(listing, is_new, card)


def _card(listing: Listing, log: Log) -> str | None:
    file = listing.files.get(CARD)
    if file is None:
        return None
    if file.size > _MAX_CARD:
        raise UserError(f"{CARD} of {listing.repo} has {format_bytes(file.size)}, which is no card: shorten it.")
    cached = CachedRepo(listing.repo)
    Downloads(listing, cached, log).fetch([CARD], f"downloading {CARD} of {listing.repo}")
    return read_text(cached.snapshot_of(listing.commit) / CARD)


def _upload(what: Outgoing, push: Push, log: Log) -> None:
    before = _look(push, log)
    with asking(push.repo, doing="upload"), answered(push.repo):
        if before.listing is None:
            api().create_repo(push.repo, private=push.private or None, exist_ok=True)
            if push.branch is not None and not api().revision_exists(push.repo, push.branch):
                api().create_branch(push.repo, branch=push.branch, exist_ok=True)
        elif before.is_new:
            api().create_branch(push.repo, branch=push.branch, exist_ok=True)
    if before.listing is None or before.is_new:
        before = _look(push, log)
        assert before.listing is not None
    listing = before.listing
    files = dict(what.files)
    ours = own_card(what.card, what.base, push.repo)
    files[CARD] = joined_card(ours, before.card, push.repo).encode()
    stale = [name for name in listing.files if name not in files and _is_exported(name)]
    if stale:
        log.info(f"removed from {push}, which the export does not have: {listed(stale)}")
    size = f"{counted(len(files), 'file')}, {format_bytes(what.num_bytes)}"
    log.info(f"uploading {size} to {push}")
    commit = _commit(files, stale, listing, push, kind="model" if what.base is None else "adapter")
    _compare(files, push, commit)
    changed = "as it was there already" if commit == listing.commit else size
    print(printable(f"pushed {push.repo}@{commit[:12]}, {changed}: {endpoint()}/{push.repo}/tree/{commit}"))


def _is_exported(name: str) -> bool:
    """Returns whether a file of a repository is of the kinds that an export consists of."""
    return "/" not in name and (name.endswith(_KINDS) or name in _NAMES or is_tokenizer_file(name))


def _commit(files: dict[str, Path | bytes], stale: list[str], before: Listing, push: Push, *, kind: str) -> str:
    """Commits files to a branch, and removes others; returns the commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    operations: list[Any] = [CommitOperationAdd(name, file) for name, file in files.items()]
    operations += [CommitOperationDelete(name) for name in stale]
    with asking(push.repo, push.branch, doing="upload"), answered(push.repo), _broken(push):
        info = api().create_commit(
            push.repo,
            operations,
            commit_message=push.message or f"Upload {kind} with rankfold {engine.__version__}",
            revision=push.branch,
            parent_commit=before.commit,
        )
    return str(info.oid)


@contextmanager
def _broken(push: Push) -> Iterator[None]:
    """Turns what huggingface_hub and its storage raise besides the hub's refusals into sentences.

    Raises:
        UserError: the hub does not take a file.
        Unfinished: a connection broke.
    """
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (HfHubHTTPError, JSONDecodeError):
        raise
    except (RuntimeError, ValueError) as error:
        cause = error.__cause__
        if isinstance(cause, OSError) or (cause is not None and isinstance(error, RuntimeError)):
            raise cause from None  # a thread's, which huggingface_hub wraps
        raise UserError(
            f"{endpoint()} does not take the upload to {push.repo} ({on_one_line(str(error))}): correct what it names, "
            "or try with HF_HUB_DISABLE_XET=1, which uses another way to its storage."
        ) from None
    except OSError as error:
        raise Unfinished(
            f"the upload to {push.repo} broke ({on_one_line(str(error))}): check the connection and start again, which "
            "resumes; HF_HUB_DISABLE_XET=1 uses another way to the hub's storage."
        ) from None


def _compare(files: dict[str, Path | bytes], push: Push, commit: str) -> None:
    """Compares what a commit lists with what was uploaded.

    Raises:
        UserError: a file is not there, or of another size.
    """
    found = list_files(push.repo, commit, doing="upload").files
    for name, file in files.items():
        size = len(file) if isinstance(file, bytes) else file.stat().st_size
        if name not in found or found[name].size != size:
            there = f"with {format_bytes(found[name].size)}" if name in found else "without it"
            raise UserError(
                f"{push.repo} lists {name} {there} at {commit[:12]}, but {format_bytes(size)} were uploaded: look for "
                "rules in its .gitignore, and start again."
            )
