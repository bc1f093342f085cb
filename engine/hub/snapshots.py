"""Finds the snapshot of a model or an adapter in the hub's cache, and downloads it where that is permitted."""

from __future__ import annotations

import os
from pathlib import Path

from engine.checkpoint.hf_tensors import INDEX
from engine.config.hub import HubName, Need
from engine.hub.agreement import agreed
from engine.hub.cache import CachedRepo
from engine.hub.download import Downloads
from engine.hub.listing import list_files
from engine.hub.selection import TOKENIZERS, lacking, small_files, weight_files
from engine.telemetry.format import format_bytes
from engine.telemetry.log import Log


def find_snapshot(name: HubName, *, download: bool, need: Need) -> Path | None:
    """Returns the folder of a model or an adapter on the hub.

    Args:
        name: with or without a revision; without one the default branch.
        download: whether the hub may be asked. It is not where a commit is given and all of it is here.
        need: the part that will be used.

    Returns:
        The folder; None where it is not in the cache in full, and the hub may not be asked.

    Raises:
        UserError: the hub does not have it, does not give it, or gives something else than it lists.
    """
    cached, log = CachedRepo(name.repo), Log(int(os.environ.get("RANK", "0")))
    if name.is_pinned or not download:
        found = _complete(cached, name, need)
        if found is not None:
            log.info(f"{name}: commit {found.name[:12]} in {cached.cache}")
            return found
        if not download:
            return None
    commit = agreed(cached, log, f"{name} {need}", lambda: _download(name, need, cached, log))
    return cached.snapshot_of(commit)


def noted_commit(name: HubName) -> str | None:
    """Returns the commit that a branch or tag was at when the hub was last asked from this machine."""
    return CachedRepo(name.repo).noted_commit(name.revision)


def state_in_cache(name: HubName) -> str:
    """Returns what the cache has of a name that cannot be used from there."""
    cached = CachedRepo(name.repo)
    snapshot = cached.snapshot(name)
    if snapshot is None:
        return f"which is not in {cached.cache}"
    missing = lacking(snapshot, "either", no_tokenizer=_has_no_tokenizer(cached, snapshot.name))
    if not missing:
        return f"which is of another kind than is expected here (it is in {snapshot})"
    return f"of which {cached.cache} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")


def _complete(cached: CachedRepo, name: HubName, need: Need) -> Path | None:
    snapshot = cached.snapshot(name)
    if snapshot is None or lacking(snapshot, need, no_tokenizer=_has_no_tokenizer(cached, snapshot.name)):
        return None
    return snapshot


def _has_no_tokenizer(cached: CachedRepo, commit: str) -> bool:
    return all(cached.lacks_for_good(commit, name) for name in TOKENIZERS)


def _download(name: HubName, need: Need, cached: CachedRepo, log: Log) -> str:
    listing = list_files(name.repo, name.revision)
    work, total = Downloads(listing, cached, log), 0
    title = f"downloading {name.repo}"
    total += work.fetch(small_files(listing, need), title)
    snapshot = cached.snapshot_of(listing.commit)

    weights = weight_files(listing, need, lambda: snapshot / INDEX)
    if weights:
        total += work.fetch(weights, title)
    for tokenizer in TOKENIZERS if need != "config" else ():
        if tokenizer not in listing.files:
            cached.note_absent(listing.commit, tokenizer)
    cached.note_revision(name.revision, listing.commit)
    done = f"{format_bytes(total)} downloaded" if total else "already there"
    log.info(f"{name}: commit {listing.commit[:12]} in {cached.cache}, {done}")
    return listing.commit
