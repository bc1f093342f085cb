"""One repository's part of huggingface_hub's cache, in that library's own layout.

blobs/DIGEST has a file's content, snapshots/COMMIT/PATH links to it, refs/REVISION has a commit, and .no_exist/COMMIT/
marks files that a commit is known to lack. What is here is found by transformers and every other program too.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.config.hub import HubName
from engine.files import platforms
from engine.files.durable import write_durably
from engine.files.refusals import writing
from engine.hub.client import RepoKind
from engine.hub.listing import RemoteFile
from engine.telemetry.log import Log

_DEFAULT_BRANCH = "main"
_LOOK_SECONDS = 0.2


class CachedRepo:
    """A repository in the cache, which may not have been downloaded yet.

    Args:
        repo: OWNER/NAME.
        kind: of it.
    """

    def __init__(self, repo: str, kind: RepoKind = "model") -> None:
        from huggingface_hub.constants import HF_HUB_CACHE

        self.repo, self.cache = repo, Path(HF_HUB_CACHE)
        self._name = f"{kind}s--{repo.replace('/', '--')}"
        self.folder = self.cache / self._name
        self.blobs = self.folder / "blobs"

    def snapshot(self, name: HubName) -> Path | None:
        """Returns the folder of a revision; None where no file of it is here."""
        commit = name.revision if name.is_pinned else self.noted_commit(name.revision)
        found = None if commit is None else self.snapshot_of(commit)
        return found if found is not None and found.is_dir() else None

    def noted_commit(self, revision: str | None) -> str | None:
        """Returns the commit that a branch or tag was at when the hub was last asked here; None where it never was."""
        ref = self.folder / "refs" / (revision or _DEFAULT_BRANCH)
        try:
            return ref.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None

    def snapshot_of(self, commit: str) -> Path:
        """Returns the folder of a commit, which may be absent."""
        return self.folder / "snapshots" / commit

    def lacks_for_good(self, commit: str, path: str) -> bool:
        """Returns whether a commit is known to have no such file."""
        return (self.folder / ".no_exist" / commit / path).exists()

    def note_absent(self, commit: str, path: str) -> None:
        """Notes that a commit has no such file."""
        with writing(self.folder):
            mark = self.folder / ".no_exist" / commit / path
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def has(self, file: RemoteFile) -> bool:
        """Returns whether a file's content is here, which enters only after its checksum was compared."""
        blob = self.blobs / file.digest
        return blob.is_file() and blob.stat().st_size == file.size

    def enter(self, commit: str, file: RemoteFile) -> None:
        """Gives a file whose content is here its name in the snapshot of a commit."""
        blob, path = self.blobs / file.digest, self.snapshot_of(commit) / file.path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                return
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.unlink(missing_ok=True)
            try:
                temporary.symlink_to(os.path.relpath(blob, path.parent))
            except OSError:  # a file system without links
                shutil.copyfile(blob, temporary)
            temporary.replace(path)

    def note_revision(self, revision: str | None, commit: str) -> None:
        """Notes which commit a revision is at."""
        if revision == commit:
            return
        ref = self.folder / "refs" / (revision or _DEFAULT_BRANCH)
        with writing(ref):
            ref.parent.mkdir(parents=True, exist_ok=True)
        write_durably(ref, commit)

    @contextmanager
    def alone(self, log: Log) -> Iterator[Path]:
        """Holds the repository's lock on this machine, so that one process downloads and the others wait.

        Yields:
            The lock's file, in which the holder may leave a note.
        """
        path = self.cache / ".locks" / self._name / "rankfold.lock"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
        with file:
            waits = False
            while platforms.lock(file.fileno()) is False:
                if not waits:
                    log.info(f"waiting for the process that downloads {self.repo}")
                waits = True
                time.sleep(_LOOK_SECONDS)
            yield path
