"""Executes commands: a model's in the order of their numbers, and of all that are ready those of whom has had least."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from engine.telemetry.output import say
from rankfold.serving.commands import read_path
from rankfold.serving.exchange import Backend, BackendLost, Outcome, Task, failure
from rankfold.serving.fair_queue import FairQueue, Waiting, tokens_of
from rankfold.serving.figures import Figures, Usage, Work
from rankfold.serving.folder import ServerFolder
from rankfold.serving.journal import Command, Damaged, Journal, NotWritten, Status
from rankfold.serving.standstill import Ended, Standstill

_SAVING = ("save_weights", "save_weights_for_sampler", "save_weights_external", "archive")
"""Kinds that a key's limit on its bytes refuses; steps write the file of a model anew, which stays as large."""
_WRITING = ("create_model", "optim_step", "load_weights", *_SAVING)
"""Kinds of commands that write a file."""

_USAGE_SECONDS = 1.0
"""How often the backend is asked what it holds, at most."""


class Dispatcher:
    """The queue of commands, and the thread that executes them.

    Args:
        journal: has the commands.
        backend: executes them.
        folder: of the server, on whose disk there has to be room.
        shortage: key -> a sentence where it has as much on the disk as it may, so that what saves weights fails.
        finished: called in the thread, with the name of each command that was executed.
        lost: called in the thread, with a sentence, where the backend is lost; the thread ends.
        figures: counts what is executed.
        usage: asks the backend what it holds, now and then; None where it is not wanted.
    """

    def __init__(
        self,
        journal: Journal,
        backend: Backend,
        folder: ServerFolder,
        *,
        shortage: Callable[[str], str | None] = lambda owner: None,
        finished: Callable[[str], None],
        lost: Callable[[str], None],
        figures: Figures | None = None,
        usage: Callable[[], Usage] | None = None,
    ) -> None:
        self._figures, self._usage, self._asked = figures or Figures(), usage, -math.inf
        self._is_stale = False
        """Whether something was executed since the backend was asked what it holds."""
        self._journal, self._backend, self._finished, self._lost = journal, backend, finished, lost
        self._folder, self._shortage = folder, shortage
        self._changed = threading.Condition()
        self._standstill = Standstill()
        self._queue = FairQueue(lambda model, seq: model in self._gone or self._next[model] == seq)
        self._gone: set[str] = set()
        """Models that were unloaded, or could not be made; what is asked of them fails, in any order."""
        self._between: list[Callable[[], None]] = []
        self._load: dict[str, tuple[int, int]] = {}
        """Of each key's commands that are not executed yet, how many, and their tokens."""
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
                self._write(known, restored.outcome)
        for command in self._journal.waiting():
            self._add(command)
        self._ask_usage()

    def start(self) -> None:
        """Starts to execute commands."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after what it is executing."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._standstill.end()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def standstill(self) -> str | None:
        """What all commands wait for, in a sentence; None where they do not."""
        return self._standstill.sentence

    def load(self, owner: str) -> tuple[int, int]:
        """Returns how many commands of a key are not executed yet, and how many tokens these have."""
        with self._changed:
            return self._load.get(owner, (0, 0))

    def add(self, request: str) -> None:
        """Takes a command of the journal."""
        command = self._journal.command(request)
        assert command is not None
        with self._changed:
            self._add(command)
            self._changed.notify()

    def is_next(self, model: str, seq: int) -> bool:
        """Returns whether a model waits for the command of a number."""
        with self._changed:
            return self._next.get(model, self._journal.last_executed(model) + 1) == seq

    def between(self, work: Callable[[], None]) -> None:
        """Has the thread do something while no command is being executed. Where the disk does not let it, that is said,
        and nothing else."""
        with self._changed:
            self._between.append(work)
            self._changed.notify()

    def cancel(self, request: str) -> None:
        """Takes a sample back, unless it is being executed or was."""
        with self._changed:
            waiting = self._queue.find(request)
            if waiting is None or waiting.command.kind != "asample":
                return
            self._queue.remove(request)
        try:
            self._write(waiting.command, failure(request, "the client cancelled the request."))
        except NotWritten:
            with self._changed:
                self._queue.add(waiting)
                self._changed.notify()
            raise
        with self._changed:
            self._count(waiting, -1)

    def _add(self, command: Command) -> None:
        assert command.body is not None
        if command.seq is not None and command.target not in self._next:
            self._next[command.target] = self._journal.last_executed(command.target) + 1
        if command.kind != "asample" and self._journal.model_state(command.target) in ("unloaded", "failed"):
            self._gone.add(command.target)
        tokens = tokens_of(command.kind, command.body, self._backend.context)
        waiting = Waiting(command=command, tokens=tokens, weights=self._weights(command))
        self._queue.add(waiting)
        self._count(waiting, 1)

    def _count(self, waiting: Waiting, one: int) -> None:
        """Counts a command that waits, or with -1 one that does not any more."""
        owner = waiting.command.owner
        commands, tokens = self._load.get(owner, (0, 0))
        self._load[owner] = commands + one, tokens + (0 if waiting.is_short else one * waiting.tokens)

    def _run(self) -> None:
        try:
            while (group := self._take()) is not None:
                self._execute(group)
        except (BackendLost, Damaged, NotWritten) as loss:
            self._lost(str(loss))
        except Ended:
            return

    def _take(self) -> list[Waiting] | None:
        """Waits for commands to execute, and does what is to be done between them; None where the thread is to end."""
        group: list[Waiting] = []
        with self._changed:
            while not self._ends and not self._between and not (group := self._queue.take()):
                if not self._changed.wait(_USAGE_SECONDS if self._is_stale else None):
                    break
            work, self._between = self._between, []
        for one in work:
            try:
                one()
            except (NotWritten, OSError) as problem:
                say(f"something that is done by the clock waits for another time: {problem}")
        if self._is_stale and not group:
            self._ask_usage()
        return None if self._ends else group

    def _execute(self, group: Sequence[Waiting]) -> None:
        kinds = ("asample", "unload_model")  # to unload a model again does no harm
        gone = [one for one in group if one.command.target in self._gone and one.command.kind not in kinds]
        for one in gone:
            self._note(one, failure(one.command.request, f"model {one.command.target} is not there any more."))
        group = [one for one in group if one not in gone]
        if not group:
            return
        first = group[0].command
        if first.kind in _SAVING and (sentence := self._shortage(first.owner)) is not None:
            self._note(group[0], failure(first.request, sentence))
            return
        if first.kind in _WRITING:
            self._wait_for_room(first.target)
        self._figures.begin(first.kind, len(group))
        outcomes = self._backend.execute([self._task(one.command) for one in group])
        self._figures.end()
        self._is_stale = self._usage is not None
        self._ask_usage()
        for one, outcome in zip(group, outcomes, strict=True):
            self._note(one, outcome)

    def _wait_for_room(self, model: str) -> None:
        """Waits until the disk has room for another file of a model."""
        while (sentence := self._folder.shortage(model)) is not None:
            self._standstill.wait(sentence)
        self._standstill.over()

    def _ask_usage(self) -> None:
        """Asks what the backend holds, unless that was a moment ago: who waits for commands asks again then."""
        if self._usage is not None and time.monotonic() - self._asked >= _USAGE_SECONDS:
            with suppress(BackendLost):  # who executes the next command finds out
                self._figures.usage = self._usage()
            self._asked, self._is_stale = time.monotonic(), False

    def _note_figures(self, one: Waiting, outcome: Outcome) -> None:
        command, model = one.command, one.command.target
        work: Work = "trained" if outcome.keeps else "scored"
        if command.kind == "asample":
            work, model = "sampled", read_path(one.weights).model if one.weights else ""
        self._figures.note(command.kind, good=outcome.good, model=model, work=work, tokens=outcome.tokens)

    def _weights(self, command: Command) -> str:
        """Returns what an asample reads: a path, or "" for the base."""
        found = self._journal.sampler(command.target) if command.kind == "asample" else None
        return "" if found is None else found[0] or ""

    def _task(self, command: Command) -> Task:
        assert command.body is not None
        target = self._weights(command) if command.kind == "asample" else command.target
        return Task(request=command.request, kind=command.kind, target=target, seq=command.seq or 0, body=command.body)

    def _note(self, waiting: Waiting, outcome: Outcome) -> None:
        """Writes a result down, and then says that it is there."""
        self._note_figures(waiting, outcome)
        with self._changed:
            self._count(waiting, -1)
        while True:
            try:
                self._write(waiting.command, outcome)
                break
            except NotWritten as problem:  # what was executed is known here alone
                self._standstill.wait(str(problem))
        self._standstill.over()

    def _write(self, command: Command, outcome: Outcome) -> None:
        journal, model = self._journal, command.target
        if outcome.adapter is not None:
            journal.set_model(model, "live", json.dumps(dataclasses.asdict(outcome.adapter)))
        elif command.seq == 0 and not outcome.good:
            journal.set_model(model, "failed")
            self._gone.add(model)
        elif command.kind == "unload_model" and outcome.good:
            journal.set_model(model, "unloaded")
            self._gone.add(model)
        if outcome.saved is not None:
            journal.add_checkpoint(command.owner, model, outcome.saved)
        status: Status = "done" if outcome.good else "failed"
        journal.set_result(command.request, status, outcome.type, outcome.body, keep_body=outcome.keeps)
        if command.kind in ("optim_step", "load_weights") and outcome.good:
            assert command.seq is not None
            journal.forget_bodies(model, command.seq)
        if command.seq is not None:
            with self._changed:
                self._next[model] = command.seq + 1
        self._finished(command.request)
