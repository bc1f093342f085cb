"""The processes that have the model, one a rank, and the front's end of them. The front itself imports no torch."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from engine.errors import UserError
from rankfold.serving.exchange import BackendLost, Outcome, Restored, ServedModel, Task
from rankfold.serving.figures import Usage
from rankfold.serving.folder import ServerFolder
from rankfold.serving.rank_process import AFTER_ANOTHER, ANSWER, REFUSAL, work

_CAUSE_SECONDS = 5.0
"""How long a rank that ends as another is gone waits for that one to be found."""


class ModelProcess:
    """A backend in processes of its own; see `rankfold.serving.exchange.Backend`.

    Starts all ranks on this machine, or under torchrun the one that is this process's.

    Args:
        model: which one.
        folder: of the server.

    Raises:
        UserError: what a rank refused.
        BackendLost: one has ended.
    """

    def __init__(self, model: ServedModel, folder: ServerFolder) -> None:
        self._model, self._folder = model, folder
        self._num_ranks = model.ranks
        self._under_torchrun = "WORLD_SIZE" in os.environ
        self._asking = threading.Lock()
        self._closing = False
        self.context: int = self._start()

    def _start(self) -> int:
        context, model = multiprocessing.get_context("spawn"), self._model
        self._loss: str | None = None
        self._connections: list[Connection] = []
        self._processes = []
        port = None if self._under_torchrun or model.ranks == 1 else _free_port()
        for rank in range(1 if self._under_torchrun else model.ranks):
            connection, other = context.Pipe()
            environment = {} if port is None else _environment(rank, model.ranks, port)
            process = context.Process(
                target=work,
                args=(other, os.getpid(), environment, model, self._folder),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            other.close()
            self._connections.append(connection)
            self._processes.append(process)
        with self._asking:
            return int(self._answer())

    def restart(self) -> None:
        """Starts the ranks again after one was lost, without models.

        Raises:
            BackendLost: one has ended again.
            UserError: a rank refused something, or torchrun has started them.
        """
        if self._under_torchrun:
            raise UserError(self._loss or "a rank of the model has ended")
        self._end_ranks()
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            process.join()
        self._start()

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

    def usage(self) -> Usage:
        """Returns what the processes hold."""
        found: Usage = self._ask("usage")
        return found

    def watch(self, lost: Callable[[str], None]) -> None:
        """Under torchrun, calls `lost` with a sentence, in a thread, when a rank ends by itself. Elsewhere
        the next command finds out, and the ranks are started again."""
        if not self._under_torchrun:
            return

        def look() -> None:
            wait([process.sentinel for process in self._processes])
            with self._asking:  # else who asked finds out, and may be told more
                if not self._closing:
                    lost(self._find_loss())

        threading.Thread(target=look, name="ranks", daemon=True).start()

    def close(self) -> None:
        """Ends the ranks, after what they are executing."""
        self._closing = True
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()

    def _ask(self, name: str, *args: object) -> Any:
        with self._asking:
            try:
                self._connections[0].send((name, args))
            except OSError:
                raise BackendLost(self._find_loss()) from None
            return self._answer()

    def _answer(self) -> Any:
        heard = list(self._connections)
        while True:
            sentinels = [process.sentinel for process in self._processes]
            ready = wait([*heard, *sentinels])
            for connection in [one for one in heard if one in ready]:
                try:
                    kind, found = connection.recv()
                except (EOFError, OSError):  # it is ending
                    heard.remove(connection)
                    continue
                if kind == ANSWER:
                    return found
                if kind == REFUSAL:
                    self._loss = self._loss or found
                    self._end_ranks()
                    raise UserError(found)
                raise BackendLost(self._find_loss(found))
            if any(one in ready for one in sentinels):
                raise BackendLost(self._find_loss())

    def _find_loss(self, otherwise: str | None = None) -> str:
        """Ends what is left of the ranks; returns the sentence about the one that ended first.

        Args:
            otherwise: the sentence of a rank that lost another, where none is found to have ended.
        """
        if self._loss is None:
            first = self._first_ended()
            self._loss = otherwise or "the ranks of the model do not answer"
            if first is not None:
                rank, status = first
                who = "the process that has the model" if self._num_ranks == 1 else f"rank {rank} of the model"
                how = f"was killed by signal {-status}" if status < 0 else "has ended, and said why above"
                self._loss = f"{who} {how}"
            self._end_ranks()
        return self._loss

    def _end_ranks(self) -> None:
        for process in self._processes:
            process.kill()

    def _first_ended(self) -> tuple[int, int] | None:
        """Returns a rank that ended of itself, and its exit status; None where none is found."""
        ends = time.monotonic() + _CAUSE_SECONDS
        while True:
            for rank, process in enumerate(self._processes):
                if (status := process.exitcode) not in (None, AFTER_ANOTHER):
                    return rank, int(status or 0)
            left = [process.sentinel for process in self._processes if process.exitcode is None]
            if not left or time.monotonic() > ends:
                return None
            wait(left, timeout=0.2)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Returns the variables that make a process of this machine a rank; see `engine.runtime.launch`."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
        return port
