"""What the server does by the clock: ends sessions that are silent, and deletes what has expired."""

from __future__ import annotations

import json
import threading
import time

from engine.telemetry.output import say
from rankfold.serving.journal import Damaged, NotWritten
from rankfold.serving.service import Service

PERIOD = 60.0
"""Seconds from one round to the next."""
KEPT = 86400.0
"""Seconds for which results are kept."""


class Housekeeping:
    """A thread of rounds.

    Args:
        service: of the server, whose dispatcher is there.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="housekeeping", daemon=True)

    def start(self) -> None:
        """Starts the rounds."""
        self._thread.start()

    def stop(self) -> None:
        """Ends them."""
        self._ends.set()
        self._thread.join()

    def round(self) -> None:
        """Does what is due. Files are deleted between commands, none of which can be writing them then.

        Raises:
            NotWritten: the disk does not take it.
            Damaged: the journal is damaged.
        """
        service = self._service
        assert service.dispatcher is not None
        now = time.monotonic()
        sessions = service.journal.open_sessions()
        # what was heard before a restart is not known: then silence begins with it
        silence = {session: now - service.heard.setdefault(session, now) for session in sessions}
        most = service.limits.session_seconds
        ending = json.dumps({"reason": {"type": "interrupted"}, "detail": f"nothing was heard for {most:.0f} s"})
        service.end_sessions({session: ending for session, seconds in silence.items() if seconds > most})
        for session in [*service.heard]:
            if session not in silence:
                service.heard.pop(session, None)
        before = time.time() - KEPT
        service.journal.forget_results(before)
        service.journal.prune(before)
        service.dispatcher.between(service.catalogue.delete_expired)
        service.dispatcher.between(lambda: service.catalogue.delete_losses(before))

    def _run(self) -> None:
        while not self._ends.wait(PERIOD):
            try:
                self.round()
            except (Damaged, NotWritten) as problem:
                say(f"housekeeping waits for the next round: {problem}")
