"""Runs work in a new process, with a fresh allocator, caches and imports, once or on request. Does not import torch.

The effects of one side on its process (allocator settings, threads left behind, caches) do not reach the other: each
runs as its users run it. While one works the others wait for a message and use no processor.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def in_new_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a module-level function in a fresh interpreter."""
    return in_new_process_with({}, function, *args, **kwargs)


def in_new_process_with(
    environment: Mapping[str, str], function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Calls a module-level function in a fresh interpreter with additional environment variables."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        max_workers=1, mp_context=context, initializer=_set_environment, initargs=(dict(environment),)
    ) as pool:
        return pool.submit(function, *args, **kwargs).result()


def caches_in(folder: Path) -> dict[str, str]:
    """Returns the environment in which Triton and torch.compile keep their caches in `folder`."""
    return {name: str(folder / name.lower()) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.update(environment)


Offer = Mapping[str, Callable[..., Any]]
"""The functions that a process offers, by name."""


class Worker:
    """A process that builds its contestants once and then runs them on request.

    Args:
        build: module-level function that returns the functions on offer; called in the process.
        args: of `build`.
    """

    def __init__(self, build: Callable[..., Offer], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, build, args), daemon=True)
        self._process.start()
        other.close()

    def ask(self, name: str, *args: object) -> Any:
        """Calls the function offered as `name` and waits for its result.

        Raises:
            RuntimeError: it raised there, or the process ended; with its traceback where there is one.
        """
        try:
            self._connection.send((name, args))
            fine, result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"a contestant's process ended while it was asked for {name}") from error
        if not fine:
            raise RuntimeError(f"a contestant failed:\n{result}")
        return result

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, build: Callable[..., Offer], args: Sequence[object]) -> None:
    offer: Offer | None = None
    while True:
        try:
            name, given = connection.recv()
        except EOFError:
            return
        try:
            offer = build(*args) if offer is None else offer
            reply = True, offer[name](*given)
        except BaseException:  # any exception is raised in the parent
            reply = False, traceback.format_exc()
        connection.send(reply)
