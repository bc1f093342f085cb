"""Starts the ranks of a command on this machine by torch's elastic agent, as torchrun does.

What differs from torchrun: this process ends with the status of the ranks (2 after a mistake, 75 after a signal and a
save, 130 after Ctrl-C), their sentence is the last thing printed, a stop or a mistake is no reason to start again, and
no folder is left in the temporary one.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.rendezvous.api import RendezvousError

from engine.errors import LostRankError, UserError
from engine.telemetry.errors import EXIT_DEFECT, EXIT_LOST_RANK, EXIT_STOPPED, EXIT_USER_ERROR
from engine.telemetry.interrupts import EXIT_INTERRUPTED
from engine.telemetry.output import say
from engine.telemetry.processors import available_processors
from rankfold.starting.options import NPROC, StartOptions

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_FINAL = (EXIT_USER_ERROR, EXIT_STOPPED, EXIT_INTERRUPTED)
"""Statuses of ranks that would end in the same way once more."""
_JOIN_SECONDS = 900
"""How long one machine waits for the others: images are pulled, and queues are not equally long."""
_ROLE = "rankfold"


def ranks_of_this_machine(nproc: str) -> int:
    """Returns the number of ranks that --nproc means.

    Raises:
        UserError: it means GPUs, and there are none.
    """
    if nproc.isdecimal():
        return int(nproc)
    gpus = torch.cuda.device_count()
    if not gpus and nproc == "gpu":
        raise UserError(f"{NPROC} is gpu, but this machine shows no GPU: give a number of ranks, such as {NPROC} 2.")
    return gpus or available_processors()


def start_ranks(options: StartOptions, nproc: int, command: Sequence[str]) -> NoReturn:
    """Starts the ranks, watches them and ends this process as they ended.

    Args:
        options: of the start.
        nproc: ranks on this machine.
        command: words after `python -m rankfold`.

    Raises:
        SystemExit: with the ranks' status; 128 + N where signal N ended them.
        LostRankError: the other machines did not come, or their rendezvous is lost.
        UserError: ranks were killed because their save took longer than the grace.
    """
    _quieten()
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _SIGNALS
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_processors() // nproc)))
    with tempfile.TemporaryDirectory(prefix="rankfold-", ignore_cleanup_errors=True) as folder:
        _await_head(options)
        watched = _Watched()
        try:
            agent = _agent(options, nproc, command, folder, watched)
            result = agent.run()
            _ignore_signals()
        except SignalException as caught:
            _ignore_signals()
            status = _after_signal(caught.sigval, watched.statuses, options.grace)
        except (RendezvousError, torch.distributed.DistError) as error:
            raise LostRankError(_lost(options, have_met=watched.have_met)) from error
        else:
            if result is None:
                raise LostRankError(_lost(options, have_met=watched.have_met))
            status = _status_of_failures(result) if result.is_failed() else 0
    sys.exit(status)


def _ignore_signals() -> None:
    """Keeps signals from the status of ranks that have ended: a scheduler that sees the first machine's process end
    sends SIGTERM to the others', of which some are about to end with the same status."""
    for name in _SIGNALS.split(","):
        signal.signal(signal.Signals[name], signal.SIG_IGN)


@dataclass
class _Watched:
    """What the agent has seen of its ranks."""

    statuses: dict[int, int | None] = field(default_factory=dict)
    """Rank on this machine -> how it ended, as of subprocess, when the ranks were last stopped."""
    have_met: bool = False
    """Whether ranks have started, for which all machines have to be there."""


class _Agent(LocalElasticAgent):
    """torch's agent, which remembers how ranks ended and restarts only where that can help."""

    def __init__(self, *arguments: Any, grace: int, watched: _Watched, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._grace, self._watched = grace, watched

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # torch keeps the address of the first meeting and tells it once; a machine that was started again waits for it
        worker_group.spec.rdzv_handler._bootstrap_store_info = None
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._watched.have_met = True
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and _cause(result) in _FINAL:
            self._remaining_restarts = 0
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # torch 2.11 has a time limit of its own, which no option changes; a closed context is closed again below
        context = self._pcontext
        if context is not None:
            context.close(death_sig, self._grace)
        super()._shutdown(death_sig)
        if isinstance(context, SubprocessContext):
            ended = context.subprocess_handlers.items()
            self._watched.statuses = {rank: handler.proc.poll() for rank, handler in ended}


def _agent(
    options: StartOptions, nproc: int, command: Sequence[str], folder: str, watched: _Watched
) -> LocalElasticAgent:
    alone = options.nnodes == 1 and options.endpoint is None
    settings: dict[str, Any] = {"join_timeout": _JOIN_SECONDS, "timeout": _JOIN_SECONDS}
    if options.node_rank is not None:
        settings["is_host"] = options.node_rank == 0
    rendezvous = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0" if alone else options.endpoint or "",
        run_id=f"{os.getpid()}-{time.time_ns()}" if alone else options.job,
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        local_addr="localhost" if alone else options.address,
        **settings,
    )
    spec = WorkerSpec(
        role=_ROLE,
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=("-P", "-u", "-m", "rankfold", *command),
        rdzv_handler=rendezvous_registry.get_rendezvous_handler(rendezvous),
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        local_addr=rendezvous.local_addr,
    )
    _let_ranks_import_this()
    return _Agent(
        spec, logs_specs=DefaultLogsSpecs(log_dir=folder), start_method="spawn", grace=options.grace, watched=watched
    )


def _let_ranks_import_this() -> None:
    """Puts the folder of these packages on the ranks' path, where it is a checkout that is not installed."""
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))


def _quieten() -> None:
    """Silences torch's reports about ranks, which have said it themselves; LOGLEVEL brings them back."""
    if "LOGLEVEL" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _await_head(options: StartOptions) -> None:
    """Waits until the first machine answers, which may start much later than this one.

    Raises:
        LostRankError: it does not.
    """
    if not options.node_rank or options.endpoint is None:
        return
    host, _, port = options.endpoint.rpartition(":")
    deadline, told = time.monotonic() + _JOIN_SECONDS, False
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise LostRankError(_lost(options)) from None
            if not told:
                say(f"waiting for the first machine at {options.endpoint}")
                told = True
            time.sleep(0.5)


def _lost(options: StartOptions, *, have_met: bool = False) -> str:
    if options.endpoint is None:
        return "the ranks of this machine could not meet: start the same command again."
    if have_met:
        return (
            f"the {options.nnodes} machines have lost each other at {options.endpoint}: one of them has ended, perhaps "
            "the first, without which the others cannot meet again; start all of them again to resume."
        )
    return (
        f"the {options.nnodes} machines do not meet at {options.endpoint}: look whether each runs this command, "
        "whether this address is the first machine's and its port is open to the others, and start all of them again."
    )


def _cause(result: RunResult) -> int:
    """Returns the exit status of the rank that ended first, a lost rank's only where there is no other."""
    first = sorted(result.failures.values(), key=lambda one: one.timestamp)
    statuses: list[int] = [one.exitcode for one in first]
    others = [status for status in statuses if status not in (EXIT_LOST_RANK, -signal.SIGTERM)]
    return others[0] if others else statuses[0]


def _status_of_failures(result: RunResult) -> int:
    """Returns the exit status after ranks failed; names the signal where one killed a rank, which said nothing."""
    status = _cause(result)
    if status >= 0:
        return status
    rank = next(rank for rank, one in result.failures.items() if one.exitcode == status)
    memory = ", which the system sends where memory runs out" if status == -signal.SIGKILL else ""
    say(f"error: rank {rank} was ended by {_name(-status)}{memory}: start the same command again to resume.")
    return 128 - status


def _after_signal(number: signal.Signals, statuses: Mapping[int, int | None], grace: int) -> int:
    """Returns the exit status after a signal to this process, which the ranks were told of.

    Raises:
        UserError: ranks were killed because their save took too long.
    """
    ended = set(statuses.values())
    if {None, -signal.SIGKILL} & ended:
        raise UserError(
            f"the ranks did not end within {grace} seconds of {number.name} and were killed; the run resumes from its "
            "last complete checkpoint: give the save more time with --shutdown-timeout."
        )
    if ended and ended <= {0, EXIT_STOPPED, EXIT_INTERRUPTED}:
        return max(ended)  # type: ignore[type-var, return-value]
    said = [status for status in ended if status is not None and status > 0]
    if said:
        return min(said) if EXIT_DEFECT in said else max(said)
    if number != signal.SIGINT:
        say(f"ended by {_name(number)} before there was anything to save")
    return 128 + number


def _name(number: int) -> str:
    return signal.Signals(number).name
