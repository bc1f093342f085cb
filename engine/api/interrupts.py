"""Ctrl-C in a function that a Python program calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def briefly_interrupted(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Lets Ctrl-C leave a function with the caller's part of the traceback alone."""

    @functools.wraps(call)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return call(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            raise interrupt.with_traceback(None) from None

    return wrapped
