"""Runs work in a new process, with a fresh allocator, caches and imports. Does not import torch."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

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
