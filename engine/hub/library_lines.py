"""What huggingface_hub prints of its own during an upload, as lines of this log: retries, without addresses.

An address of the hub's storage is signed, so that who has it may write there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from engine.hub.client import endpoint
from engine.sentences import on_one_line
from engine.telemetry.log import Log

_LOGGERS = ("huggingface_hub.utils._http", "huggingface_hub.hf_api")
_REASON = re.compile(r"(?:HTTP Error (?P<status>\d+)|'(?P<error>.*)') thrown while requesting", re.DOTALL)
_WAIT = re.compile(r"(?P<seconds>[\d.]+)s.*\[Retry (?P<retry>\d+)/(?P<most>\d+)\]")


@contextmanager
def library_lines(log: Log) -> Iterator[None]:
    """Has huggingface_hub's lines go to the log inside, and its progress bars to a terminal alone."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    handler, loggers = _Lines(log), [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.propagate for logger in loggers]
    hides = not log.live and not are_progress_bars_disabled()
    if hides:
        disable_progress_bars()
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
        if hides:
            enable_progress_bars()


class _Lines(logging.Handler):
    """Says each retry with its reason in one line.

    Args:
        log: where lines go.
    """

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log, self._reason = log, ""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if (found := _REASON.search(text)) is not None:
            self._reason = f"answers {found['status']}" if found["status"] else f"({on_one_line(found['error'])})"
        elif (found := _WAIT.search(text)) is not None:
            self._log.info(
                f"{endpoint()} {self._reason}: trying again in {float(found['seconds']):.0f} s "
                f"({found['retry']} of {found['most']})"
            )
