"""How often the process that has the model ended while it executed a command, in a small file.

The file is written before commands are executed, without waiting for the disk: it has to outlive processes, and not the
machine. Where it cannot be written or read, nothing is known, which does no harm.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

MOST = 3
"""Attempts at a command; one that was being executed at as many ends of the process is not executed again."""


class Attempts:
    """Ends of the process, by the command that was being executed.

    Args:
        path: of the file; what it has from before counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends: dict[str, int] = {}
        self._executing: tuple[str, ...] = ()
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(path.read_bytes())
            self._ends = {str(name): int(count) for name, count in found["ends"].items()}
            self._executing = tuple(str(name) for name in found["executing"])
        self.ended()

    def keep(self, requests: Collection[str]) -> None:
        """Forgets all other commands than some, which are yet to be executed."""
        self._ends = {name: count for name, count in self._ends.items() if name in requests}

    def begin(self, requests: Sequence[str]) -> None:
        """Notes which commands are about to be executed."""
        self._executing = tuple(requests)
        text = json.dumps({"ends": self._ends, "executing": self._executing})
        new = self._path.with_name(self._path.name + ".tmp")
        with suppress(OSError):
            new.write_text(text, encoding="utf-8")
            os.replace(new, self._path)

    def ended(self) -> None:
        """Notes that the process ended while it executed what was begun last."""
        for request in self._executing:
            self._ends[request] = self._ends.get(request, 0) + 1
        self._executing = ()

    def done(self, requests: Sequence[str]) -> None:
        """Notes that commands have results, in memory alone: a command that has one is not executed again."""
        self._executing = ()
        for request in requests:
            self._ends.pop(request, None)

    def of(self, request: str) -> int:
        """Returns at how many ends of the process a command was being executed."""
        return self._ends.get(request, 0)
