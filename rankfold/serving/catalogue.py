"""What clients have and had: sessions, training runs and saved weights, as lists show them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from engine.errors import UserError
from engine.files.durable import sync_folder
from rankfold.serving.commands import Saved, read_path
from rankfold.serving.folder import ServerFolder
from rankfold.serving.journal import Journal

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_COLUMNS = "path, owner, made, bytes, public, expires, metadata"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Saved weights.

    Args:
        path: tinker://MODEL/KIND/NAME.
        owner: whose model they are of.
        made: when they were saved, in seconds since 1970.
        bytes: of their files.
        public: whether other keys may read them.
        expires: when they are deleted; None for never.
        metadata: what the client keeps with them.
    """

    path: Saved
    owner: str
    made: float
    bytes: int
    public: bool
    expires: float | None
    metadata: Mapping[str, Any]

    @property
    def entry(self) -> dict[str, Any]:
        """How the protocol describes it."""
        return {
            "checkpoint_id": f"{self.path.kind}/{self.path.name}",
            "checkpoint_type": _TYPES[self.path.kind],
            "time": timestamp(self.made),
            "tinker_path": str(self.path),
            "size_bytes": self.bytes,
            "public": self.public,
            "user_metadata": self.metadata or None,
            "expires_at": None if self.expires is None else timestamp(self.expires),
        }


class Session(NamedTuple):
    """A session, as its row has it; `metadata` and `ending` are JSON."""

    id: str
    owner: str
    finished: int
    made: float
    title: str | None
    project: str | None
    metadata: str | None
    ending: str | None


class Run(NamedTuple):
    """A training run, as the row of its model has it; `adapter` and `metadata` are JSON."""

    id: str
    owner: str
    adapter: str
    state: str
    made: float
    metadata: str | None
    project: str | None


class Catalogue:
    """The lists, which are in the journal.

    Args:
        journal, folder: of the server.
    """

    def __init__(self, journal: Journal, folder: ServerFolder) -> None:
        self._journal, self._folder = journal, folder

    def readable(self, path: object, owner: str) -> Checkpoint | None:
        """Returns saved weights that an owner may read: its own, or public ones.

        Raises:
            UserError: `path` is no path.
        """
        found = self._checkpoints("path = ? AND (owner = ? OR public)", (str(read_path(path)), owner))
        return found[0] if found else None

    def own(self, owner: str, model: str, kind: str, name: str) -> Checkpoint | None:
        """Returns saved weights of an owner."""
        found = self._checkpoints("path = ? AND owner = ?", (f"tinker://{model}/{kind}/{name}", owner))
        return found[0] if found else None

    def of_model(self, model: str) -> list[Checkpoint]:
        """Returns the saved weights of a model, the newest first."""
        return self._checkpoints("model = ?", (model,))

    def of_owner(self, owner: str) -> list[Checkpoint]:
        """Returns the saved weights of an owner, the newest first."""
        return self._checkpoints("owner = ?", (owner,))

    def _checkpoints(self, where: str, values: Sequence[object]) -> list[Checkpoint]:
        rows = self._journal.rows(
            f"SELECT {_COLUMNS} FROM checkpoints WHERE {where} AND (expires IS NULL OR expires > ?) "
            "ORDER BY made DESC, rowid DESC",
            (*values, time.time()),
        )
        return [
            Checkpoint(
                path=read_path(path),
                owner=owner,
                made=made,
                bytes=size,
                public=bool(public),
                expires=expires,
                metadata=json.loads(metadata or "{}"),
            )
            for path, owner, made, size, public, expires, metadata in rows
        ]

    def set_public(self, checkpoint: Checkpoint, public: bool) -> None:
        """Lets other keys read saved weights, or ends that."""
        with self._journal.turn() as base:
            base.execute("UPDATE checkpoints SET public = ? WHERE path = ?", (public, str(checkpoint.path)))

    def set_expiry(self, checkpoint: Checkpoint, expires: float | None) -> None:
        """Says when saved weights are deleted; None for never."""
        with self._journal.turn() as base:
            base.execute("UPDATE checkpoints SET expires = ? WHERE path = ?", (expires, str(checkpoint.path)))

    def delete(self, path: Saved) -> None:
        """Deletes saved weights. Their entry goes last, so that no file is without one."""
        file = self._folder.saved(path)
        if file.is_dir():
            shutil.rmtree(file, ignore_errors=True)
        else:
            file.unlink(missing_ok=True)
        for archive in self._folder.archives(path).glob(f"{path.kind}-{path.name}-*.tar"):
            if archive.name.rpartition("-")[0] == f"{path.kind}-{path.name}":
                archive.unlink(missing_ok=True)
        with self._journal.turn() as base:
            base.execute("DELETE FROM checkpoints WHERE path = ?", (str(path),))

    def delete_expired(self) -> None:
        """Deletes saved weights that have expired."""
        for (path,) in self._journal.rows("SELECT path FROM checkpoints WHERE expires <= ?", (time.time(),)):
            self.delete(read_path(path))

    def used_bytes(self, owner: str) -> int:
        """Returns the bytes on the disk of an owner's models, saved weights and archives."""
        ((saved,),) = self._journal.rows("SELECT SUM(bytes) FROM checkpoints WHERE owner = ?", (owner,))
        models = self._journal.rows("SELECT id, state FROM models WHERE owner = ?", (owner,))
        live = sum(self._folder.model_bytes(model) for model, state in models if state == "live")
        return int(saved or 0) + live + self._folder.archive_bytes(model for model, _ in models)

    def delete_losses(self, before: float) -> None:
        """Deletes the losses of sessions that had ended before a time, in seconds since 1970."""
        query = "SELECT id FROM sessions WHERE finished > 0 AND finished < ?"
        ended = {session for (session,) in self._journal.rows(query, (before,))}
        for path, session in self._folder.losses().items():
            if session in ended:
                path.unlink(missing_ok=True)

    def copy(self, name: str, source: Checkpoint, owner: str, model: str, expires: float | None) -> Saved:
        """Copies saved weights, whose files share their bytes on the disk.

        Args:
            name: of the request, so that one that is sent again finds the copy.
            source: what is copied.
            owner: of the copy.
            model: that the copy belongs to, which cannot be trained.
            expires: when the copy is deleted.

        Raises:
            UserError: the model is another one's, or has weights of that name, or the disk does not take the copy.
        """
        if found := self._journal.rows("SELECT path FROM copies WHERE name = ?", (name,)):
            return read_path(found[0][0])
        copied = Saved(model=model, kind=source.path.kind, name=source.path.name)
        self._link(source.path, copied)
        session = model.partition(":train:")[0]
        with self._journal.turn() as base:
            base.execute(
                "INSERT INTO models (id, session, owner, adapter, state, made) "
                "SELECT ?, ?, ?, adapter, 'copy', ? FROM models WHERE id = ?",
                (model, session, owner, time.time(), source.path.model),
            )
            base.execute(
                "INSERT INTO checkpoints (path, owner, model, made, bytes, expires, metadata) "
                "SELECT ?, ?, ?, ?, bytes, ?, metadata FROM checkpoints WHERE path = ?",
                (str(copied), owner, model, time.time(), expires, str(source.path)),
            )
            base.execute("INSERT INTO copies (name, path) VALUES (?, ?)", (name, str(copied)))
        return copied

    def _link(self, source: Saved, copied: Saved) -> None:
        file, new = self._folder.saved(source), self._folder.saved(copied)
        try:
            new.parent.mkdir(parents=True, exist_ok=True)
            if file.is_dir():
                shutil.copytree(file, new, copy_function=os.link, dirs_exist_ok=True)
            elif not new.exists():
                os.link(file, new)
            sync_folder(new.parent)
        except FileNotFoundError:
            raise UserError(f"there are no weights at {source}: they were deleted.") from None

    def describe_model(self, model: str, metadata: str) -> None:
        """Writes down what a client keeps with a model, as JSON."""
        with self._journal.turn() as base:
            base.execute("UPDATE models SET metadata = ? WHERE id = ?", (metadata, model))

    def sessions(self, owner: str) -> list[Session]:
        """Returns the sessions of an owner, the newest first."""
        query = f"SELECT {', '.join(Session._fields)} FROM sessions WHERE owner = ? ORDER BY made DESC, id DESC"
        return [Session(*row) for row in self._journal.rows(query, (owner,))]

    def set_project(self, session: str, project: str) -> None:
        """Gives a session another project."""
        with self._journal.turn() as base:
            base.execute("UPDATE sessions SET project = ? WHERE id = ?", (project, session))

    def samplers(self, session: str) -> list[str]:
        """Returns the names of a session's samplers."""
        return [row[0] for row in self._journal.rows("SELECT id FROM samplers WHERE session = ?", (session,))]

    def runs(self, owner: str, *, session: str | None = None, project: str | None = None) -> list[Run]:
        """Returns the training runs of an owner, the newest first.

        Args:
            session, project: only theirs; None for all.
        """
        return self._runs(
            "models.owner = ? AND (? IS NULL OR models.session = ?) AND (? IS NULL OR project = ?)",
            (owner, session, session, project, project),
        )

    def run(self, model: str, owner: str) -> Run | None:
        """Returns a training run that an owner may see: its own, or one with public weights."""
        found = self._runs(
            "models.id = ? AND (models.owner = ? OR EXISTS (SELECT 1 FROM checkpoints WHERE model = ? AND public))",
            (model, owner, model),
        )
        return found[0] if found else None

    def _runs(self, where: str, values: Sequence[object]) -> list[Run]:
        query = (
            "SELECT models.id, models.owner, adapter, state, models.made, models.metadata, project FROM models "
            f"LEFT JOIN sessions ON sessions.id = models.session WHERE {where} ORDER BY models.rowid DESC"
        )
        return [Run(*row) for row in self._journal.rows(query, values)]

    def last_request(self, run: Run) -> float:
        """Returns when the last of a run's commands was executed, or when it was made."""
        ((done,),) = self._journal.rows("SELECT MAX(done) FROM commands WHERE target = ?", (run.id,))
        return max(done or 0.0, run.made)


def timestamp(seconds: float) -> str:
    """Returns a time as the protocol writes it.

    Args:
        seconds: since 1970.
    """
    return time_of(seconds).isoformat()


def time_of(seconds: float) -> datetime:
    """Returns a time to the microsecond, which is what the protocol writes.

    Args:
        seconds: since 1970.
    """
    return datetime.fromtimestamp(seconds, UTC)
