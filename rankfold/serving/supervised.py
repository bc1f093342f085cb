"""A backend whose process is started again where it ends, and whose clients notice little of that.

After an end the process has what is on the disk: each model as of its last optimizer step. The gradients that were
added since are made again from the bodies in the journal, and then the commands that were being executed are tried
again, each on its own, so that it is seen at whose execution the process ends. A command with which it has ended
`attempts.MOST` times is answered with a sentence, and its model continues without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from engine.errors import UserError
from engine.telemetry.output import say
from rankfold.serving.attempts import MOST, Attempts
from rankfold.serving.exchange import Backend, BackendLost, Outcome, Restored, Task, failure
from rankfold.serving.journal import Journal

_LOSSES = 2 * MOST
"""Ends in a row, without a command executed in between, after which the backend is not started again."""


class Restartable(Backend, Protocol):
    """A backend that can be started again."""

    def restart(self) -> None:
        """Starts it again after it was lost, without models.

        Raises:
            BackendLost: it has ended again.
            UserError: it cannot be started.
        """
        ...


class Supervised:
    """A backend; see `rankfold.serving.exchange.Backend`.

    Args:
        backend: executes the commands.
        journal: of the server.
        attempts: at commands.
    """

    def __init__(self, backend: Restartable, journal: Journal, attempts: Attempts) -> None:
        self._backend, self._journal, self._attempts = backend, journal, attempts
        self._losses = 0
        self._loss = "and the server with it"
        self._ends = False
        self.context = backend.context
        attempts.keep({command.request for command in journal.waiting()})

    def stop(self) -> None:
        """Has the backend stay as it is where it is lost from now on."""
        self._ends = True

    def restore(self, model: str) -> Restored | None:
        """Makes a model again from its file, with the gradients that were added since; None where there is no file.

        Raises:
            UserError: its file is damaged, or a gradient cannot be made again.
        """
        restored = self._backend.restore(model)
        if restored is not None:
            for command in self._journal.since(model, restored.seq):
                if command.kind == "forward_backward" and command.status == "done" and command.body is not None:
                    task = Task(
                        request=command.request, kind=command.kind, target=model, seq=command.seq or 0,
                        body=command.body,
                    )  # fmt: skip
                    (outcome,) = self._backend.execute([task])
                    if not outcome.good:
                        reason = json.loads(outcome.body)["error"].rstrip(".")
                        raise UserError(
                            f"{command.request}, whose gradient model {model} has, cannot be executed again "
                            f"({reason}): start the server as it was started then."
                        )
        return restored

    def execute(self, tasks: Sequence[Task]) -> list[Outcome]:
        """See `rankfold.serving.exchange.Backend`."""
        suspects = [task for task in tasks if self._attempts.of(task.request)]
        groups = [[task for task in tasks if task not in suspects], *([task] for task in suspects)]
        found: dict[str, Outcome] = {}
        while groups:
            group = groups.pop(0)
            if not group:
                continue
            if len(group) == 1 and self._attempts.of(group[0].request) >= MOST:
                found[group[0].request] = self._given_up(group[0])
            elif (outcomes := self._attempt(group)) is not None:
                found |= {one.request: one for one in outcomes}
            else:
                restored = self._start_again()
                found |= {task.request: restored[task.request] for task in group if task.request in restored}
                # no gradient of these commands is in the journal yet, from which they would have been made again
                for task in [task for task in tasks if task.request in found and found[task.request].keeps]:
                    del found[task.request]
                    group = [task, *group]
                groups = [[task] for task in group if task.request not in found] + groups
        self._attempts.done([task.request for task in tasks])
        return [found[task.request] for task in tasks]

    def _attempt(self, tasks: Sequence[Task]) -> list[Outcome] | None:
        """Executes tasks; returns None where the backend was lost, which is to be started again.

        Raises:
            BackendLost: it is not to be started again.
        """
        self._attempts.begin([task.request for task in tasks])
        try:
            outcomes = self._backend.execute(tasks)
        except BackendLost as loss:
            self._attempts.ended()
            self._note_loss(loss)
            return None
        self._losses = 0
        return outcomes

    def _start_again(self) -> dict[str, Outcome]:
        """Starts the backend again, and makes its models.

        Returns:
            Outcome of the last command of each model, by name: it may be one whose execution was not heard of.

        Raises:
            BackendLost: it ends again and again, or does not start.
        """
        while True:
            try:
                self._backend.restart()
                found = [self.restore(model.id) for model in self._journal.models("live")]
            except BackendLost as loss:
                self._note_loss(loss)
                continue
            except UserError as error:
                raise BackendLost(str(error)) from None
            return {one.outcome.request: one.outcome for one in found if one is not None}

    def _note_loss(self, loss: BackendLost) -> None:
        self._losses += 1
        self._loss = str(loss)
        if self._ends or self._losses >= _LOSSES:
            raise loss
        say(f"{self._loss.rstrip('.')}; another one is started.")

    def _given_up(self, task: Task) -> Outcome:
        return failure(
            task.request,
            f"the process that has the model ended {MOST} times while it executed this {task.kind}, which is not tried "
            f"again: send less at a time if it was out of memory, and see the server's log ({self._loss.rstrip('.')}).",
        )
