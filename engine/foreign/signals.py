"""Names of signals, for sentences about processes that one of them ended."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as SIGKILL, or "signal 40": most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
