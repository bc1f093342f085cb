"""Executes commands: a model's in the order of their numbers, the oldest that is ready first, and with it others that
can be executed in the same passes."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable

from rankfold.serving.exchange import Backend, BackendLost, Outcome, Task, failure
from rankfold.serving.journal import Command, Journal, Status

_TOGETHER = 64
"""Samples that are executed together, at most."""


class Dispatcher:
    """The queue of commands, and the thread that executes them.

    Args:
        journal: has the commands.
        backend: executes them.
        finished: called in the thread, with the name of each command that was executed.
        lost: called in the thread, with a sentence, where the backend is lost; the thread ends.
    """

    def __init__(
        self,
        journal: Journal,
        backend: Backend,
        *,
        finished: Callable[[str], None],
        lost: Callable[[str], None],
    ) -> None:
        self._journal, self._backend, self._finished, self._lost = journal, backend, finished, lost
        self._changed = threading.Condition()
        self._waiting: dict[str, Command] = {}
        self._next: dict[str, int] = {}
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="commands", daemon=True)

    def restore(self) -> None:
        """Brings the backend to where it was: each live model as of its last optimizer step, with the gradients that
        were added since, and the commands that were not executed.

        Raises:
            BackendLost: the backend is lost.
        """
        for model in self._journal.models("live"):
            restored = self._backend.restore(model.id)
            if restored is None:
                self._journal.set_model(model.id, "failed")
                continue
            known = self._journal.command(restored.outcome.request)
            if (
                known is not None and known.status == "waiting"
            ):  # it was executed, and the process ended before it said so
                self._note(known, restored.outcome)
            for command in self._journal.since(model.id, restored.seq):
                if command.kind == "forward_backward" and command.status == "done" and command.body is not None:
                    self._backend.execute([self._task(command)])
        for command in self._journal.waiting():
            self._add(command)

    def start(self) -> None:
        """Starts to execute commands."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after what it is executing."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def num_waiting(self) -> int:
        """The number of commands that are not executed yet."""
        return len(self._waiting)

    def add(self, request: str) -> None:
        """Takes a command of the journal."""
        command = self._journal.command(request)
        assert command is not None
        with self._changed:
            self._add(command)
            self._changed.notify()

    def cancel(self, request: str) -> None:
        """Takes a sample back, unless it is being executed or was."""
        with self._changed:
            command = self._waiting.get(request)
            if command is None or command.kind != "asample":
                return
            del self._waiting[request]
        self._note(command, failure(request, "the client cancelled the request."))

    def _add(self, command: Command) -> None:
        self._waiting[command.request] = command
        if command.seq is not None and command.target not in self._next:
            self._next[command.target] = self._journal.last_executed(command.target) + 1

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ends and not (group := self._group()):
                    self._changed.wait()
                if self._ends:
                    return
                for command in group:
                    del self._waiting[command.request]
            try:
                outcomes = self._backend.execute([self._task(command) for command in group])
            except BackendLost as loss:
                self._lost(str(loss))
                return
            for command, outcome in zip(group, outcomes, strict=True):
                self._note(command, outcome)

    def _group(self) -> list[Command]:
        """Returns the oldest command that is ready, and others that are executed with it."""
        ready = [command for command in self._waiting.values() if self._is_ready(command)]
        if not ready:
            return []
        first = min(ready, key=lambda command: command.number)
        if first.kind == "forward_backward":
            return [command for command in ready if command.kind == first.kind]
        if first.kind == "asample":
            same = [one for one in ready if one.kind == first.kind and self._weights(one) == self._weights(first)]
            return sorted(same, key=lambda one: one.number)[:_TOGETHER]
        return [first]

    def _is_ready(self, command: Command) -> bool:
        if command.seq is not None:
            return command.seq == self._next[command.target]
        if command.kind == "unload_model":  # after all that came before it
            return not any(
                one.target == command.target and one.number < command.number for one in self._waiting.values()
            )
        return True

    def _weights(self, command: Command) -> str | None:
        found = self._journal.sampler(command.target)
        return None if found is None else found[0]

    def _task(self, command: Command) -> Task:
        assert command.body is not None
        target = (self._weights(command) or "") if command.kind == "asample" else command.target
        return Task(request=command.request, kind=command.kind, target=target, seq=command.seq or 0, body=command.body)

    def _note(self, command: Command, outcome: Outcome) -> None:
        """Writes a result down, and then says that it is there."""
        journal, model = self._journal, command.target
        if outcome.adapter is not None:
            journal.set_model(model, "live", json.dumps(dataclasses.asdict(outcome.adapter)))
        elif command.seq == 0 and not outcome.good:
            journal.set_model(model, "failed")
        elif command.kind == "unload_model" and outcome.good:
            journal.set_model(model, "unloaded")
        status: Status = "done" if outcome.good else "failed"
        journal.set_result(command.request, status, outcome.type, outcome.body, keep_body=outcome.keeps)
        if command.kind in ("optim_step", "load_weights") and outcome.good:
            assert command.seq is not None
            journal.forget_bodies(model, command.seq)
        if command.seq is not None:
            with self._changed:
                self._next[model] = command.seq + 1
        self._finished(command.request)
