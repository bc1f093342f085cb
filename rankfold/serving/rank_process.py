"""A rank of the model: executes what the front asks of rank 0, together with the other ranks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from engine.errors import LostRankError, UserError
from engine.telemetry.ending import end_at_once, end_with_parent
from rankfold.serving.exchange import ServedModel
from rankfold.serving.folder import ServerFolder

ANSWER, REFUSAL, LOSS = "answer", "refusal", "loss"
"""Kinds of messages to the front: a result; a sentence of a `UserError`; a clause of a rank that lost another."""
AFTER_ANOTHER = 76
"""Exit status of a rank that ended because another one had."""
_CLOSE = ("close", ())


def work(
    connection: Connection, parent: int, environment: Mapping[str, str], model: ServedModel, folder: ServerFolder
) -> None:
    """The main function of a rank that the front has started.

    Args:
        connection: to the front. Commands come to rank 0.
        parent: process of the front.
        environment: variables that make the process a rank.
        model: which one.
        folder: of the server.
    """
    end_with_parent(parent)
    os.environ.update(environment)
    from engine.telemetry.errors import run_command

    sys.stdout = sys.stderr  # the front's own lines are all that is on standard output
    run_command(partial(_work, connection, model, folder))


def _work(connection: Connection, model: ServedModel, folder: ServerFolder) -> None:
    from engine.distributed.failures import CommunicationError

    for one in (signal.SIGINT, signal.SIGTERM):  # which all processes of a service may get: the front ends this one
        signal.signal(one, signal.SIG_IGN)
    try:
        run_rank(connection, model, folder)
    except UserError as error:
        with suppress(OSError):  # the front is gone
            connection.send((REFUSAL, str(error)))
    except CommunicationError as error:
        with suppress(OSError):
            connection.send((LOSS, str(error)))
        end_at_once(AFTER_ANOTHER)


def follow(model: ServedModel, folder: ServerFolder) -> None:
    """Runs a rank that torchrun has started, beside that of the front; arguments and errors as of `run_rank`.

    Raises:
        LostRankError: another rank is gone.
    """
    from engine.distributed.failures import CommunicationError

    try:
        run_rank(None, model, folder)
    except CommunicationError as error:
        raise LostRankError(f"{error}: look at that rank's output, and start again.") from error


def run_rank(connection: Connection | None, model: ServedModel, folder: ServerFolder) -> None:
    """Executes commands until the front ends.

    Args:
        connection: to the front; None where another process than the front's has started this rank.
        model: which one.
        folder: of the server.

    Raises:
        UserError: the model or the layout cannot be used, or the disk does not take a step.
        CommunicationError: another rank is gone.
    """
    from engine.runtime.launch import start, stop
    from engine.telemetry.log import Log
    from rankfold.serving.tenant_backend import TenantBackend

    _check_devices()
    launch = start(600.0, deterministic=False)
    backend = TenantBackend(model, folder, launch, Log(launch.rank))
    backend.open_tokenizer()
    ranks = backend.ranks
    if ranks.is_first:
        assert connection is not None
        with suppress(ConnectionError):
            connection.send((ANSWER, backend.context))
    while True:
        found = ranks.told(_next(connection) if ranks.is_first else None)
        if found == _CLOSE:
            break
        if found is not None:
            name, args = found
            answer = getattr(backend, name)(*args)
            if ranks.is_first:
                assert connection is not None
                with suppress(ConnectionError):  # the next command says that the front is gone
                    connection.send((ANSWER, answer))
    stop()


def _next(connection: Connection | None) -> Any:
    """Returns the front's next command; None where there is none for a while, so that ranks hear of each other."""
    from rankfold.serving.ranks import BEAT_SECONDS

    assert connection is not None
    try:
        return connection.recv() if connection.poll(BEAT_SECONDS) else None
    except (EOFError, ConnectionError):  # the front is gone, perhaps before it has read an answer
        return _CLOSE


def _check_devices() -> None:
    """Checks that each rank of this machine has a device.

    Raises:
        UserError: there are fewer GPUs.
    """
    import torch

    from engine.runtime.launch import ranks_of_this_node

    ranks, devices = ranks_of_this_node(), torch.cuda.device_count()
    if torch.cuda.is_available() and devices < ranks:
        raise UserError(
            f"the layout has {ranks} ranks on this machine, which has {devices} GPU{'s' if devices != 1 else ''}: set "
            "--tensor, --pipeline, --context and --data to fewer ranks, or start several machines with torchrun."
        )
