"""Runs one function on several processes that form a Gloo group, from plain pytest.

Processes are forked from a server that has imported torch already, so that a start costs tens of milliseconds instead
of torch's import. Each rank's return value comes back; a rank's exception becomes the failure of the calling test, with
that rank's traceback; a hang is ended at the timeout, and the report shows where each rank stood. No process outlives
the call, nor the test run itself when that is killed.

The function must be importable (defined at the top of a module), its arguments and results of kinds that torch.save can
write.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.runtime.launch import stop
from engine.telemetry.ending import end_at_once
from tests.support.warm_workers import warm_program, warm_workers

_GRACE_SECONDS = 3.0
"""How long the other ranks may take to end once one has failed."""

_PRELOAD = [
    "torch._dynamo", "torch.distributed.device_mesh", "torch.testing", "torch.utils.serialization", "attrs", "pytest",
    "transformers.tokenization_utils_tokenizers", "engine.hybrids.families", "engine.gemma4.family",
    "engine.planning.predict", "engine.distillation.rules", "engine.rollouts.rules", "engine.rollouts.run_data",
    "engine.rollouts.planned_judges", "engine.rollouts.planned_rollouts", "tests.distributed.sharded_runs",
    "tests.support.rollout_runs", "tests.support.frozen_objects",
]  # fmt: skip
"""The first because an optimizer, and a tensor on the meta device, import it, which takes each process two seconds; the
last, after all others, because a fork's collector would go through all that they made, and so copy its memory. Between
them what most ranks import."""


class RankFailure(AssertionError):
    """One or more ranks raised, died or hung; the message holds each one's traceback."""


def spawn(fn: Callable[..., Any], *, world: int, args: tuple[Any, ...] = (), timeout: float = 120) -> list[Any]:
    """Calls `fn(*args)` on `world` ranks of a Gloo group.

    Args:
        fn: importable; finds its rank with `torch.distributed.get_rank()`.
        world: number of processes.
        args: equal on all ranks.
        timeout: seconds until what still runs is killed.

    Returns:
        Each rank's return value, in rank order.

    Raises:
        RankFailure: a rank raised, died or hung.
    """
    context = fork_context()
    with tempfile.TemporaryDirectory(prefix="spawn-") as folder:
        processes, pipes = _start(context, fn, world, args, timeout, Path(folder))
        try:
            answers = _collect(processes, pipes, timeout)
            stacks = _stacks_of_running(processes, Path(folder)) if len(answers) < world else {}
        finally:
            _end(processes)
    _raise_failures(answers, processes, stacks, timeout)
    return [answers[rank][1] for rank in range(world)]


def fork_context() -> ForkServerContext:
    """Makes processes in which torch is imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _start(
    context: ForkServerContext, fn: Callable[..., Any], world: int, args: tuple[Any, ...], timeout: float, folder: Path
) -> tuple[list[BaseProcess], list[Connection]]:
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_rank, args=(fn, rank, world, args, timeout, str(folder), sender, warm_program()), daemon=True
        )
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    return processes, pipes


def _collect(processes: list[BaseProcess], pipes: list[Connection], timeout: float) -> dict[int, tuple[str, Any]]:
    """("ok", value) or ("error", text) of each rank that answered in time; a dead rank answers with its exit code."""
    answers: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(pipes):
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = open_pipes[pipe]
            try:
                kind, payload = pipe.recv()
            except EOFError:
                processes[rank].join(1.0)
                kind, payload = "error", f"died with exit code {processes[rank].exitcode} and no traceback"
            answers[rank] = (kind, torch.load(io.BytesIO(payload), weights_only=False) if kind == "ok" else payload)
            if kind == "error":
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return answers


def _stacks_of_running(processes: list[BaseProcess], folder: Path) -> dict[int, str]:
    """Where each rank that did not answer stands now."""
    waiting = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in waiting:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.5)
    files = {rank: folder / f"stack{rank}" for rank in waiting}
    return {rank: file.read_text() for rank, file in files.items() if file.exists()}


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()


def _raise_failures(
    answers: dict[int, tuple[str, Any]], processes: list[BaseProcess], stacks: dict[int, str], timeout: float
) -> None:
    parts = []
    for rank in range(len(processes)):
        kind, payload = answers.get(rank, ("none", None))
        if kind == "error":
            parts.append(f"rank {rank}: {payload}")
        elif kind == "none":
            place = stacks.get(rank, "no stack")
            parts.append(
                f"rank {rank} did not end (limit {timeout:g} s, or another rank's failure); it stood at\n{place}"
            )
    if parts:
        raise RankFailure("\n\n".join(parts))


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_rank(
    fn: Callable[..., Any],
    rank: int,
    world: int,
    args: tuple[Any, ...],
    timeout: float,
    folder: str,
    sender: Connection,
    warm: str | None,
) -> None:
    if warm is not None:
        warm_workers(warm)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with open(Path(folder) / f"stack{rank}", "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout),
            )
            result = io.BytesIO()
            torch.save(fn(*args), result)
            answer: tuple[str, Any] = ("ok", result.getvalue())
        except BaseException:
            answer = ("error", traceback.format_exc())
        # the parent is gone where this fails, and nobody is left to tell
        with suppress(BrokenPipeError):
            sender.send(answer)
        sender.close()
        if answer[0] != "ok":
            end_at_once(1)
        stop()
        faulthandler.unregister(signal.SIGUSR1)
