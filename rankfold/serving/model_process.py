"""The process that has the model, and the front's end of it. The front itself imports no torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from engine.errors import UserError
from engine.telemetry.ending import end_with_parent
from rankfold.serving.exchange import BackendLost, Outcome, Restored, ServedModel, Task
from rankfold.serving.folder import ServerFolder

_LOST = "the process that has the model has ended, and said why above: start the server again, which goes on from there"


class ModelProcess:
    """A backend in a process of its own; see `rankfold.serving.exchange.Backend`.

    Args:
        model: which one.
        folder: of the server.

    Raises:
        UserError: what the process refused.
        BackendLost: it has ended.
    """

    def __init__(self, model: ServedModel, folder: ServerFolder) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other, os.getpid(), model, folder), daemon=True)
        self._process.start()
        other.close()
        self.context: int = self._answer()

    def restore(self, model: str) -> Restored | None:
        """See `rankfold.serving.exchange.Backend`."""
        found: Restored | None = self._ask("restore", model)
        return found

    def execute(self, tasks: Sequence[Task]) -> list[Outcome]:
        """See `rankfold.serving.exchange.Backend`."""
        try:
            found: list[Outcome] = self._ask("execute", list(tasks))
        except UserError as error:  # what no client caused, such as a full disk
            raise BackendLost(str(error)) from None
        return found

    def close(self) -> None:
        """Ends the process, after what it is executing."""
        self._connection.close()
        self._process.join()

    def _ask(self, name: str, *args: object) -> Any:
        try:
            self._connection.send((name, args))
        except OSError:
            raise BackendLost(_LOST) from None
        return self._answer()

    def _answer(self) -> Any:
        try:
            good, found = self._connection.recv()
        except (EOFError, OSError):
            raise BackendLost(_LOST) from None
        if not good:
            raise UserError(found)
        return found


def _work(connection: Connection, parent: int, model: ServedModel, folder: ServerFolder) -> None:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front ends this process
    from engine.runtime.launch import start
    from engine.telemetry.log import Log
    from rankfold.serving.tenant_backend import TenantBackend

    sys.stdout = sys.stderr  # the front's own lines are all that is on standard output
    try:
        backend = TenantBackend(model, folder, start(600.0, deterministic=False), Log(0))
        backend.open_tokenizer()
        connection.send((True, backend.context))
        while True:
            name, args = connection.recv()
            connection.send((True, getattr(backend, name)(*args)))
    except EOFError:
        return
    except UserError as error:
        connection.send((False, str(error)))
