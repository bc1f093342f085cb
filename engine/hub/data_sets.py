"""Data sets of the hub as records: found, downloaded and pinned to a commit before a run, and read as files are.

JSON, Parquet and CSV files are read by the engine's own readers, so that rows are those of the same records in a local
file. Other formats (Arrow, compressed files, WebDataset) are read by the `datasets` library.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from engine.data.record_files import Place, Record, first_byte, line_record, read_records
from engine.data.sources import RecordSource, without_nulls
from engine.data.tables import TABLES, rows_of
from engine.errors import UserError
from engine.hub.agreement import agreed
from engine.hub.cache import CachedRepo
from engine.hub.client import asking, endpoint
from engine.hub.data_files import CARDS, is_plain, note_listing, noted_listing, opened_split, require_library
from engine.hub.data_names import DataName, parse_data_name
from engine.hub.download import Downloads
from engine.hub.listing import Listing, list_files
from engine.telemetry.format import format_bytes
from engine.telemetry.log import Log

_KIND = "dataset"


def find_data(text: str, *, download: bool, before: Sequence[str] = ()) -> str:
    """Returns the name of a data set with the commit whose files are in the cache, or will be streamed.

    Args:
        text: hub:OWNER/NAME...
        download: whether the hub may be asked. It is not where a commit is given and all of the split is here.
        before: names that the run to resume has recorded; where one is the same data, its commit is taken.

    Raises:
        UserError: it is no name, there is no such split, it is not in the cache and the hub may not be asked, or the
            hub does not give it.
    """
    name = parse_data_name(text)
    cached, log = CachedRepo(name.repo.repo, _KIND), Log(int(os.environ.get("RANK", "0")))
    if not name.repo.is_pinned:
        known = [one for one in map(parse_data_name, before) if replace(one, repo=name.repo) == name]
        known = [one for one in known if _same(one, name)]
        if name.repo.revision is not None:  # the run's branch, which may have moved since, or another one
            noted = cached.noted_commit(name.repo.revision)
            known = [one for one in known if one.repo.revision == noted]
        name = next(iter(known), name)
    require_library()
    if name.stream and not download:
        raise UserError(f"{text} is read from the hub while training starts: add --download, or leave stream out.")
    if (name.repo.is_pinned and not name.stream) or not download:
        found = _complete(cached, name)
        if found is not None:
            log.info(f"{name.label}: commit {found[:12]} in {cached.cache}")
            return str(name.at(found))
        if not download:
            raise UserError(
                f"{text} is a data set on the Hugging Face hub whose files are not all in {cached.cache}: add "
                "--download, which fetches them."
            )
    commit = agreed(cached, log, str(name), lambda: _download(name, cached, log))
    return str(name.at(commit))


def _same(one: DataName, other: DataName) -> bool:
    return one.repo.repo == other.repo.repo and one.repo.is_pinned


def _complete(cached: CachedRepo, name: DataName) -> str | None:
    """Returns the commit of a name if all files of the split are in the cache."""
    snapshot = cached.snapshot(name.repo)
    listing = None if snapshot is None else noted_listing(cached, snapshot.name)
    if snapshot is None or listing is None:
        return None
    if not all((snapshot / card).is_file() for card in CARDS if card in listing.files):
        return None
    with opened_split(listing, cached, name) as (_, paths):
        return snapshot.name if all((snapshot / path).is_file() for path in paths) else None


def _download(name: DataName, cached: CachedRepo, log: Log) -> str:
    listing = list_files(name.repo.repo, name.repo.revision, _KIND)
    work, title = Downloads(listing, cached, log), f"downloading {name.label}"
    total = work.fetch([card for card in CARDS if card in listing.files], title)
    cached.snapshot_of(listing.commit).mkdir(parents=True, exist_ok=True)
    note_listing(cached, listing)
    with opened_split(listing, cached, name) as (_, paths):
        if not name.stream:
            total += work.fetch(paths, title)
    cached.note_revision(name.repo.revision, listing.commit)
    done = "read from the hub" if name.stream else f"{format_bytes(total)} downloaded" if total else "already there"
    log.info(f"{name.label}: commit {listing.commit[:12]} in {cached.cache}, {done}")
    return listing.commit


class HubRecords(RecordSource):
    """The records of a split.

    Args:
        text: as `find_data` returned it.
    """

    def __init__(self, text: str) -> None:
        self._wanted = parse_data_name(text)
        super().__init__(self._wanted.label)
        self._cached = CachedRepo(self._wanted.repo.repo, _KIND)

    def records(self) -> Iterator[tuple[Place, Record]]:
        commit = str(self._wanted.repo.revision)
        listing = noted_listing(self._cached, commit)
        if listing is None:
            raise UserError(f"the files of {self._wanted} have gone from {self._cached.cache}: start again.")
        with opened_split(listing, self._cached, self._wanted) as (builder, paths):
            if is_plain(builder, paths):
                rows = self._plain_rows(listing, paths)
            else:
                rows = self._library_rows(listing, builder, paths)
            for place, record in islice(rows, self._wanted.limit):
                yield place, self._named(place, record)

    def _named(self, place: Place, record: Record) -> Record:
        """Returns a record with the fields that `columns` gives it."""
        if not self._wanted.columns:
            return record
        named = {new: record[old] for old, new in self._wanted.columns if old in record}
        if not named:
            wanted, found = ", ".join(old for old, _ in self._wanted.columns), ", ".join(record) or "none"
            raise place.error(f"the record has none of the columns {wanted}, but {found}; correct columns.")
        return named

    def _plain_rows(self, listing: Listing, paths: list[str]) -> Iterator[tuple[Place, Record]]:
        number = 0
        for path in paths:
            suffix = Path(path).suffix.lower()
            with asking(listing.repo, listing.commit, kind=_KIND), self._opened(listing, path) as file:
                if suffix in TABLES:
                    for row in rows_of(file, suffix, f"{path} of {listing.repo}"):
                        place = self.place(number, "row")
                        yield place, without_nulls(self.plain(place, row))
                        number += 1
                    continue
                for place, record in self._json(listing, path, file, number):
                    yield place, record
                    number += 1

    def _json(self, listing: Listing, path: str, file: BinaryIO, number: int) -> Iterator[tuple[Place, Record]]:
        if first_byte(file) == b"[":
            if self._wanted.stream:
                raise UserError(f"{path} of {listing.repo} is one JSON array, which is not streamed: leave stream out.")
            for at, (_, record) in enumerate(read_records(self._cached.snapshot_of(listing.commit) / path)[1], number):
                yield self.place(at, "row"), record
            return
        for line in file:
            if line := line.strip(b" \t\r\n"):
                yield line_record(self.place(number, "row"), line)
                number += 1

    def _opened(self, listing: Listing, path: str) -> Any:
        if not self._wanted.stream:
            return (self._cached.snapshot_of(listing.commit) / path).open("rb")
        from huggingface_hub import HfFileSystem

        return HfFileSystem(endpoint=endpoint()).open(f"datasets/{listing.repo}@{listing.commit}/{path}", "rb")

    def _library_rows(self, listing: Listing, builder: Any, paths: list[str]) -> Iterator[tuple[Place, Record]]:
        from datasets.data_files import DataFilesDict, DataFilesList

        split = self._wanted.split
        if self._wanted.stream:
            places = [f"hf://datasets/{listing.repo}@{listing.commit}/{path}" for path in paths]
        else:
            places = [str(self._cached.snapshot_of(listing.commit) / path) for path in paths]
        builder.config.data_files = DataFilesDict({split: DataFilesList(places, [(place,) for place in places])})
        with asking(listing.repo, listing.commit, kind=_KIND):
            for number, row in enumerate(builder.as_streaming_dataset(split)):
                place = self.place(number, "row")
                values: Mapping[str, Any] = row
                yield place, without_nulls(self.plain(place, values))
