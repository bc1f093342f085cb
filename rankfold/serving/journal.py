"""What the server promised and did, in one SQLite file: sessions, models, commands, samplers.

A command is written before its request is answered, and its result before anybody reads it. The file outlives the
process, so that a request that is sent again finds its command, and a restart the commands that were not done.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from engine.errors import UserError
from rankfold.serving.exchange import SavedWeights

Status = Literal["waiting", "done", "failed"]

_VERSION = 2
_TABLES = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, finished REAL NOT NULL DEFAULT 0, made REAL NOT NULL DEFAULT 0,
    title TEXT, project TEXT, metadata TEXT, ending TEXT
);
CREATE TABLE models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, adapter TEXT NOT NULL DEFAULT '',
    state TEXT NOT NULL DEFAULT 'new', made REAL NOT NULL DEFAULT 0, metadata TEXT
);
CREATE TABLE commands (
    number INTEGER PRIMARY KEY AUTOINCREMENT, request TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, target TEXT NOT NULL,
    seq INTEGER, kind TEXT NOT NULL, digest BLOB NOT NULL, body BLOB, status TEXT NOT NULL DEFAULT 'waiting',
    type TEXT, result BLOB, done REAL, finish INTEGER
);
CREATE INDEX waiting ON commands (status, number);
CREATE INDEX of_target ON commands (target, seq);
CREATE INDEX bodies ON commands (target, seq) WHERE body IS NOT NULL;
CREATE INDEX finishes ON commands (finish);
CREATE INDEX finishes_of_target ON commands (target, finish);
CREATE TABLE samplers (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, path TEXT, clients INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE checkpoints (
    path TEXT PRIMARY KEY, owner TEXT NOT NULL, model TEXT NOT NULL, made REAL NOT NULL, bytes INTEGER NOT NULL,
    public INTEGER NOT NULL DEFAULT 0, expires REAL, metadata TEXT
);
CREATE INDEX of_model ON checkpoints (model);
CREATE TABLE copies (name TEXT PRIMARY KEY, path TEXT NOT NULL);
"""


FORGET_BODIES = (
    "UPDATE commands SET body = NULL WHERE target = ? AND seq <= ? AND body IS NOT NULL AND status != 'waiting'"
)
"""Drops the bodies of a model's executed commands up to one."""
_WAL_BYTES = 64 << 20
"""To which the file of pages that are not in their places yet is cut again."""
_TAKEN = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_NO_ROOM = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}


class AnotherRequest(UserError):
    """A number that a request bears was taken by another one."""


class Forgotten(UserError):
    """A request was executed, and nothing of it is left."""


class NotWritten(Exception):
    """The disk did not take what was to be written, such as where it is full; nothing has changed, and the same may be
    tried again. The message is a sentence."""


class Damaged(Exception):
    """The file is not what was written to it. The message is a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """Something that a client asks for.

    Args:
        number: in the order of arrival.
        request: its name, under which the result is asked for.
        owner: the key that asks.
        target: the model, or the sampler.
        seq: its place among the commands of a model; None where it has none.
        kind: what it is.
        body: as it came; None once it cannot be needed again.
        status: whether it was executed, and whether in vain.
        type, result: content type and bytes of the result, of an executed one.
    """

    number: int
    request: str
    owner: str
    target: str
    seq: int | None
    kind: str
    body: bytes | None
    status: Status
    type: str | None
    result: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model that a client trains.

    Args:
        id: its name.
        session: that it was made in.
        owner: the key that made it.
        adapter: its adapter, as JSON; "" until it was made.
        state: whether it is yet to be made, can be trained, was unloaded, could not be made, or holds copied weights.
    """

    id: str
    session: str
    owner: str
    adapter: str
    state: Literal["new", "live", "unloaded", "failed", "copy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """How many there are.

    Args:
        sessions, models: by state.
        waiting: commands that were not executed yet, by kind.
    """

    sessions: dict[str, int]
    models: dict[str, int]
    waiting: dict[str, int]


class Finished(NamedTuple):
    """An executed command.

    Args:
        request: its name.
        place: in the order in which commands were executed.
        status: whether in vain.
        size: bytes of its result; None where that was dropped.
    """

    request: str
    place: int
    status: Status
    size: int | None


class Journal:
    """The file. Threads take turns.

    Args:
        path: of it; created where there is none.

    Raises:
        UserError: another server has the file, it is that of another version, or no journal.
    """

    def __init__(self, path: Path) -> None:
        self._lock, self._path = threading.RLock(), path
        self._base = _open(path)

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._base.close()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Takes a turn.

        Raises:
            NotWritten: the disk does not take it.
            Damaged: what is read is no journal.
        """
        with self._lock:
            try:
                yield self._base
            except sqlite3.Error as error:
                if _code(error) in _NO_ROOM:
                    raise NotWritten(
                        f"{self._path} cannot be written ({error}): free some space; the server continues by itself."
                    ) from error
                raise Damaged(f"{self._path} is damaged ({error}): give another folder with --state.") from error

    @contextmanager
    def turn(self) -> Iterator[sqlite3.Connection]:
        """Takes a turn, in which all changes are made or none.

        Raises:
            NotWritten: the disk does not take it.
            Damaged: what is read is no journal.
        """
        with self._reading() as base:
            base.execute("BEGIN IMMEDIATE")
            try:
                yield base
                base.execute("COMMIT")
            except BaseException:
                if base.in_transaction:  # after some errors SQLite has taken it back already
                    base.execute("ROLLBACK")
                raise

    def rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """Returns the rows of a query."""
        with self._reading() as base:
            return base.execute(query, tuple(values)).fetchall()

    def add_session(
        self, session: str, owner: str, *, title: str | None = None, project: str | None = None, metadata: str = "{}"
    ) -> None:
        """Writes a session down.

        Args:
            title, project: labels that its client gives it.
            metadata: what its client keeps with it, as JSON.
        """
        with self.turn() as base:
            base.execute(
                "INSERT INTO sessions (id, owner, made, title, project, metadata) VALUES (?, ?, ?, ?, ?, ?)",
                (session, owner, time.time(), title, project, metadata),
            )

    def session_state(self, session: str, owner: str) -> Literal["open", "finished"] | None:
        """Returns whether a session is open; None where the owner has none of that name."""
        with self._reading() as base:
            row = base.execute("SELECT finished FROM sessions WHERE id = ? AND owner = ?", (session, owner)).fetchone()
        return None if row is None else "finished" if row[0] else "open"

    def finish_session(self, session: str, ending: str = "{}") -> None:
        """Ends a session, unless it has ended.

        Args:
            ending: what the client says of it, as JSON.
        """
        with self.turn() as base:
            base.execute(
                "UPDATE sessions SET finished = ?, ending = ? WHERE id = ? AND NOT finished",
                (time.time(), ending, session),
            )

    def open_sessions(self) -> list[str]:
        """Returns the sessions that are not finished."""
        with self._reading() as base:
            return [str(row[0]) for row in base.execute("SELECT id FROM sessions WHERE finished = 0")]

    def add_command(
        self, *, request: str, owner: str, target: str, seq: int | None, kind: str, body: bytes, session: str | None
    ) -> bool:
        """Writes a command down, unless it has been already.

        Args:
            session: in which the target is made by the command; None where it is there.

        Returns:
            Whether it is to be executed: it is new, or a sample whose result was dropped.

        Raises:
            AnotherRequest: a request of that name was another one.
            Forgotten: it was executed so long ago that nothing of it is left.
        """
        digest = hashlib.sha256(kind.encode() + b"\0" + body).digest()
        with self.turn() as base:
            row = base.execute(
                "SELECT digest, owner, kind, status != 'waiting' AND result IS NULL FROM commands WHERE request = ?",
                (request,),
            ).fetchone()
            if row is not None:
                if row[:2] != (digest, owner):
                    raise AnotherRequest(
                        f"{request} was another request: give each request of a model or a sampler a number of its own."
                    )
                if row[2] != "asample" or not row[3]:
                    return False
                base.execute("UPDATE commands SET status = 'waiting', body = ? WHERE request = ?", (body, request))
                return True
            if seq is not None and seq <= self.last_executed(target):
                raise Forgotten(f"{request} was executed long ago, and its result is not kept any more.")
            if session is not None:
                base.execute(
                    "INSERT INTO models (id, session, owner, made) VALUES (?, ?, ?, ?)",
                    (target, session, owner, time.time()),
                )
            base.execute(
                "INSERT INTO commands (request, owner, target, seq, kind, digest, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (request, owner, target, seq, kind, digest, body),
            )
        return True

    def command(self, request: str, owner: str | None = None) -> Command | None:
        """Returns a command; None where there is none of that name, or another owner's."""
        found = self._commands("request = ? AND (? IS NULL OR owner = ?)", (request, owner, owner))
        return found[0] if found else None

    def waiting(self) -> list[Command]:
        """Returns the commands that are to be executed, in the order of arrival."""
        return self._commands("status = 'waiting'", ())

    def since(self, model: str, seq: int) -> list[Command]:
        """Returns the commands of a model after one, in their order."""
        return sorted(self._commands("target = ? AND seq > ?", (model, seq)), key=lambda one: one.seq or 0)

    def last_executed(self, model: str) -> int:
        """Returns the number of the last of a model's commands that was executed; -1 for none."""
        with self._reading() as base:
            row = base.execute(
                "SELECT seq FROM commands WHERE target = ? AND seq NOT NULL AND status != 'waiting' "
                "ORDER BY seq DESC LIMIT 1",
                (model,),
            ).fetchone()
        return -1 if row is None else int(row[0])

    def _commands(self, where: str, values: Sequence[object]) -> list[Command]:
        columns = "number, request, owner, target, seq, kind, body, status, type, result"
        with self._reading() as base:
            rows = base.execute(
                f"SELECT {columns} FROM commands WHERE {where} ORDER BY number", tuple(values)
            ).fetchall()
        return [Command(**dict(zip(columns.split(", "), row, strict=True))) for row in rows]

    def set_result(self, request: str, status: Status, type_: str, result: bytes, *, keep_body: bool) -> None:
        """Writes a command's result down.

        Args:
            keep_body: whether a restart may have to execute the command again.
        """
        with self.turn() as base:
            base.execute(
                "UPDATE commands SET status = ?, type = ?, result = ?, done = ?, body = CASE WHEN ? THEN body END, "
                "finish = (SELECT COALESCE(MAX(finish), 0) + 1 FROM commands) WHERE request = ?",
                (status, type_, result, time.time(), keep_body, request),
            )

    def add_checkpoint(self, owner: str, model: str, saved: SavedWeights) -> None:
        """Writes saved weights down, in place of others at their path, which stay public where they are."""
        with self.turn() as base:
            base.execute(
                "INSERT INTO checkpoints (path, owner, model, made, bytes, expires, metadata) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (path) DO UPDATE SET made = excluded.made, "
                "bytes = excluded.bytes, expires = excluded.expires, metadata = excluded.metadata",
                (saved.path, owner, model, time.time(), saved.num_bytes, saved.expires, saved.metadata),
            )

    def forget_bodies(self, model: str, seq: int) -> None:
        """Drops the bodies of a model's executed commands up to one."""
        with self.turn() as base:
            base.execute(FORGET_BODIES, (model, seq))

    def forget_results(self, before: float) -> None:
        """Drops results that were written before a time, in seconds since 1970; their promises are lost."""
        with self.turn() as base:
            base.execute("UPDATE commands SET result = NULL WHERE done < ? AND result IS NOT NULL", (before,))

    def prune(self, before: float) -> None:
        """Forgets what was done before a time and is not needed any more, in seconds since 1970: executed
        commands, but the last one of each model and those whose bodies a restart needs; and samplers of sessions that
        had ended by then.
        """
        old = "done < ? AND status != 'waiting' AND body IS NULL AND target = ?"
        with self.turn() as base:
            for target, last in base.execute(
                "SELECT target, MAX(seq) FROM commands WHERE status != 'waiting' GROUP BY target"
            ).fetchall():
                base.execute(f"DELETE FROM commands WHERE {old} AND (seq IS NULL OR seq < ?)", (before, target, last))
            ended = "(SELECT id FROM sessions WHERE finished > 0 AND finished < ?)"
            waiting = "(SELECT target FROM commands WHERE status = 'waiting')"
            base.execute(f"DELETE FROM samplers WHERE session IN {ended} AND id NOT IN {waiting}", (before,))
        with self._reading() as base:
            base.executescript("PRAGMA incremental_vacuum;")  # all free pages go back; `execute` would free one

    def models(self, state: str) -> list[Model]:
        """Returns the models in a state, in the order in which they were made."""
        with self._reading() as base:
            rows = base.execute(
                "SELECT id, session, owner, adapter, state FROM models WHERE state = ? ORDER BY rowid", (state,)
            ).fetchall()
        return [_model(row) for row in rows]

    def models_of_ended(self) -> list[Model]:
        """Returns the models of finished sessions that are live or yet to be made."""
        with self._reading() as base:
            rows = base.execute(
                "SELECT id, session, owner, adapter, state FROM models WHERE state IN ('new', 'live') AND session IN "
                "(SELECT id FROM sessions WHERE finished != 0)"
            ).fetchall()
        return [_model(row) for row in rows]

    def model(self, model: str, owner: str) -> Model | None:
        """Returns a model; None where the owner has none of that name."""
        with self._reading() as base:
            row = base.execute(
                "SELECT id, session, owner, adapter, state FROM models WHERE id = ? AND owner = ?", (model, owner)
            ).fetchone()
        return None if row is None else _model(row)

    def model_state(self, model: str) -> str | None:
        """Returns the state of a model; None where there is none of that name."""
        with self._reading() as base:
            row = base.execute("SELECT state FROM models WHERE id = ?", (model,)).fetchone()
        return None if row is None else str(row[0])

    def count_models(self, owner: str) -> int:
        """Returns how many models of an owner are live or yet to be made."""
        with self._reading() as base:
            (count,) = base.execute(
                "SELECT COUNT(*) FROM models WHERE owner = ? AND state IN ('new', 'live')", (owner,)
            ).fetchone()
        return int(count)

    def counts(self) -> Counts:
        """Counts what all clients have together."""
        with self._lock:
            found = [
                {str(name): int(count) for name, count in self._base.execute(query).fetchall()}
                for query in (
                    "SELECT CASE finished WHEN 0 THEN 'open' ELSE 'finished' END, COUNT(*) FROM sessions GROUP BY 1",
                    "SELECT state, COUNT(*) FROM models GROUP BY state",
                    "SELECT kind, COUNT(*) FROM commands WHERE status = 'waiting' GROUP BY kind",
                )
            ]
        return Counts(sessions=found[0], models=found[1], waiting=found[2])

    def set_model(self, model: str, state: str, adapter: str | None = None) -> None:
        with self.turn() as base:
            base.execute(
                "UPDATE models SET state = ?, adapter = COALESCE(?, adapter) WHERE id = ?", (state, adapter, model)
            )

    def add_sampler(self, sampler: str, session: str, owner: str, path: str | None) -> None:
        """Writes a sampler down, unless it has been already.

        Raises:
            AnotherRequest: one of that name has other weights.
        """
        with self.turn() as base:
            row = base.execute("SELECT path FROM samplers WHERE id = ?", (sampler,)).fetchone()
            if row is not None and row[0] != path:
                raise AnotherRequest(
                    f"{sampler} has the weights {row[0] or 'of the base'}: give each sampler of a session a number of "
                    "its own."
                )
            base.execute(
                "INSERT OR IGNORE INTO samplers (id, session, owner, path) VALUES (?, ?, ?, ?)",
                (sampler, session, owner, path),
            )

    def sampler(self, sampler: str, owner: str | None = None) -> tuple[str | None] | None:
        """Returns the path of a sampler's weights, in a tuple; None where the owner has no such sampler."""
        with self._reading() as base:
            row: tuple[str | None] | None = base.execute(
                "SELECT path FROM samplers WHERE id = ? AND (? IS NULL OR owner = ?)", (sampler, owner, owner)
            ).fetchone()
        return row

    def join_sampler(self, sampler: str) -> int:
        """Returns a number for a further client of a sampler, whose first client has 0."""
        with self.turn() as base:
            base.execute("UPDATE samplers SET clients = clients + 1 WHERE id = ?", (sampler,))
            (number,) = base.execute("SELECT clients FROM samplers WHERE id = ?", (sampler,)).fetchone()
        return int(number)

    def finished(self, target: str, after: int, most: int) -> list[Finished]:
        """Returns executed commands of a model or a sampler, in the order in which they were executed.

        Args:
            after: the place of the last one that is known.
            most: how many.
        """
        query = (
            "SELECT request, finish, status, LENGTH(result) FROM commands WHERE target = ? AND finish > ? AND "
            "status != 'waiting' ORDER BY finish LIMIT ?"
        )
        return [Finished(*row) for row in self.rows(query, (target, after, most))]

    def drop_results(self, requests: Sequence[str], target: str) -> None:
        """Drops results of a model's or sampler's commands; their promises are lost."""
        with self.turn() as base:
            base.executemany(
                "UPDATE commands SET result = NULL WHERE request = ? AND target = ? AND status != 'waiting'",
                [(request, target) for request in requests],
            )


def _model(row: Sequence[Any]) -> Model:
    return Model(id=row[0], session=row[1], owner=row[2], adapter=row[3], state=row[4])


def _open(path: Path) -> sqlite3.Connection:
    """Returns a connection to a journal, which no other process has; a new one where there is none.

    Raises:
        UserError: another server has it, it is that of another version, damaged or no journal.
    """
    base: sqlite3.Connection | None = None
    try:
        base = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=2.0)
        base.execute("PRAGMA locking_mode=EXCLUSIVE")
        base.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of a new file
        base.execute("PRAGMA journal_mode=WAL")
        base.execute(f"PRAGMA journal_size_limit={_WAL_BYTES}")
        base.execute("PRAGMA synchronous=FULL")
        (version,) = base.execute("PRAGMA user_version").fetchone()
        if version == 0:
            base.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={_VERSION}; COMMIT;")
        base.executescript("BEGIN IMMEDIATE; COMMIT;")  # takes the lock, which ends with the process
        (flaw,) = base.execute("PRAGMA quick_check(1)").fetchone()
        if flaw != "ok":
            raise sqlite3.DatabaseError(" ".join(flaw.split()))
        if version in (0, _VERSION):
            return base
        refusal = f"{path} has version {version}, and this server reads {_VERSION}: give another folder with --state."
    except sqlite3.OperationalError as error:
        advice = "end the server that has it" if _code(error) in _TAKEN else "free some space if the disk is full"
        refusal = f"{path} is not opened ({error}): {advice}, or give another --state."
    except sqlite3.DatabaseError as error:
        refusal = f"{path} is no journal of a server, or is damaged ({error}): give another folder with --state."
    if base is not None:
        base.close()
    raise UserError(refusal)


def _code(error: sqlite3.Error) -> int:
    """Returns the primary code of an error of SQLite."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
