"""Downloads files of a repository into the cache: in part where a download was interrupted, and each compared with the
hub's checksum before it has its name.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.errors import UserError
from engine.files.refusals import Unfinished, writing
from engine.hub.cache import CachedRepo
from engine.hub.client import api, asking, endpoint
from engine.hub.listing import Listing, RemoteFile
from engine.telemetry.format import format_bytes
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress

_THREADS = 4
_MOST_BYTES = 50_000_000_000
"""The largest file that the hub gives over plain HTTP."""
_CHUNK = 1 << 22


class _Stopped(Exception):
    """Another file failed, or the user pressed Ctrl-C."""


class Downloads:
    """Downloads files of one listing.

    Args:
        listing: of the repository.
        cached: where they go.
        log: gets a line of progress.
    """

    def __init__(self, listing: Listing, cached: CachedRepo, log: Log) -> None:
        self._listing, self._cached, self._log = listing, cached, log
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def fetch(self, paths: Sequence[str], title: str) -> int:
        """Downloads those of the files that are not here, and enters all into the snapshot, in their order.

        Args:
            paths: in the repository.
            title: of the line of progress.

        Returns:
            The bytes that were downloaded.

        Raises:
            UserError: there is no room, the hub refuses, or a file is not what the hub lists.
            Unfinished: the connection broke; the next call continues.
        """
        files = [self._listing.files[path] for path in paths]
        absent = {file.digest: file for file in files if not self._cached.has(file)}
        missing = list(absent.values())
        if missing:
            with writing(self._cached.blobs):
                self._cached.blobs.mkdir(parents=True, exist_ok=True)
            self._check(missing)
            with Progress(self._log, title, sum(file.size for file in missing), "bytes") as progress:
                self._all(missing, progress)
        for file in files:
            self._cached.enter(self._listing.commit, file)
        return sum(file.size for file in missing)

    def _check(self, files: Sequence[RemoteFile]) -> None:
        """Raises UserError where the disk lacks room, or a file is too large for plain HTTP."""
        for file in files:
            if file.size > _MOST_BYTES:
                raise UserError(
                    f"{file.path} of {self._listing.repo} has {format_bytes(file.size)}, more than the hub gives over "
                    f"plain HTTP: download it with `hf download --repo-type {self._listing.kind} "
                    f"{self._listing.repo}`, which fills the same cache."
                )
        needed = sum(file.size - self._present(file) for file in files)
        free = shutil.disk_usage(self._cached.blobs).free
        if needed > free:
            raise UserError(
                f"{self._listing.repo} needs {format_bytes(needed)} more in {self._cached.cache}, where "
                f"{format_bytes(free)} are free: free some space, or set HF_HOME to a folder on another disk."
            )

    def _all(self, files: Sequence[RemoteFile], progress: Progress) -> None:
        def advance(amount: int) -> None:
            if self._stop.is_set():
                raise _Stopped
            with self._lock:
                progress.advance(amount)

        with ThreadPoolExecutor(min(_THREADS, len(files)), "download") as pool:
            work = [pool.submit(self._one, file, advance) for file in files]
            try:
                for done in as_completed(work):
                    done.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _present(self, file: RemoteFile) -> int:
        """Returns how many bytes of a file an interrupted download has left."""
        part = self._part(file)
        size = part.stat().st_size if part.is_file() else 0
        return size if size <= file.size else 0

    def _part(self, file: RemoteFile) -> Path:
        # of this machine: another one may write to the same disk, and its locks may not be seen here
        machine = re.sub(r"[^\w.-]", "_", platform.node())[:80]
        return self._cached.blobs / f"{file.digest}.{machine}.rankfold.incomplete"

    def _one(self, file: RemoteFile, advance: Callable[[int], None]) -> None:
        part, present = self._part(file), self._present(file)
        advance(present)
        with writing(part), asking(self._listing.repo, self._listing.commit, kind=self._listing.kind):
            with part.open("r+b" if present else "wb") as out:
                out.seek(present)
                if present < file.size:
                    self._receive(file, out, present, advance)
            found = _digest(part, file)
            if found == file.digest:
                part.replace(self._cached.blobs / file.digest)
                return
            part.unlink()
        kind = "SHA-256" if file.is_large else "git's SHA-1"
        raise UserError(
            f"{file.path} of {self._listing.repo} arrived with {kind} {found[:16]}..., but the hub lists "
            f"{file.digest[:16]}...: it was removed; start again, and report it on {endpoint()} if that repeats."
        )

    def _receive(self, file: RemoteFile, out: Any, present: int, advance: Callable[[int], None]) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get

        listing = self._listing
        url = hf_hub_url(listing.repo, file.path, repo_type=listing.kind, revision=listing.commit, endpoint=endpoint())
        try:
            http_get(
                url,
                out,
                resume_size=present,
                headers={**api()._build_hf_headers(), "Accept-Encoding": "identity"},
                expected_size=file.size,
                displayed_filename=file.path,
                tqdm_class=_meter(advance),
            )
        except OSError as error:
            if "Consistency check" not in str(error):
                raise
            size = out.tell()
            if size > file.size:
                out.truncate(0)
            raise Unfinished(
                f"{file.path} of {self._listing.repo} arrived with {format_bytes(size)}, but the hub lists "
                f"{format_bytes(file.size)}: start again, which resumes, and report it on {endpoint()} if that repeats."
            ) from None


def _digest(path: Path, file: RemoteFile) -> str:
    """Returns the checksum of a file's content, of the kind that the hub lists for it."""
    digest = hashlib.sha256()
    if not file.is_large:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _meter(advance: Callable[[int], None]) -> type:
    """Returns a class in place of tqdm's that hands progress on."""

    class Meter:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def update(self, amount: int = 1) -> None:
            advance(int(amount))

        def close(self) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(
            self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
        ) -> None:
            pass

    return Meter
