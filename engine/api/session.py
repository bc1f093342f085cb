"""A run that a Python program takes step by step, such as in the cells of a notebook."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal, Self

import torch

from engine.api.configuration import AnyPath
from engine.api.exporting import export
from engine.api.given import Data, Environment, Given, Reward, Tool, names_of
from engine.api.interrupts import briefly_interrupted
from engine.api.process import training_alone
from engine.api.prompts import Prompt, PromptWriter
from engine.config.rules import check_config, check_files, check_world
from engine.config.run import RunConfig
from engine.config.snapshots import with_snapshots
from engine.distributed.collectives import barrier
from engine.distributed.failures import CommunicationError
from engine.errors import LostRankError, UserError
from engine.inference.generate import context_limit
from engine.runtime.launch import start, stop, world_size_from_environment
from engine.runtime.supervision import Preempted, Unwatched
from engine.seams import resolve
from engine.telemetry.listener import EvaluationEvent, RunListener, StepEvent
from engine.telemetry.log import Log
from engine.telemetry.output import say
from engine.training.prepare import begin, complete
from engine.training.reports.summary import RunSummary
from engine.training.resuming import RunComplete
from engine.training.samples import SamplePrompt, TextSamples
from engine.training.trainer import Trainer, lost_rank, say_end

_CLOSED = "Session.close()"
"""What stopped a run whose session was closed before its last step."""


class Session:
    """A run that is trained step by step; also a context manager, which closes it.

        with Session(config, data=records) as run:
            run.step(10)
            print(run.evaluate().loss, run.generate(["Once upon a time"]))
            run.step()
            run.export("adapter")

    It takes the steps of `train` with the same arguments, bit for bit, with its evaluations and saves when they are
    due. A UserError about an argument leaves it usable; any other error in a step closes it, and a new session resumes
    from the last checkpoint. Ctrl-C in a step finishes that step and raises KeyboardInterrupt, and the session stays
    usable; pressed again, it closes it at once. Under torchrun each rank makes the same calls.
    """

    def __init__(
        self,
        config: RunConfig,
        listener: RunListener | None = None,
        *,
        data: Data | None = None,
        mix: Sequence[tuple[Data, float]] | None = None,
        validation: Data | None = None,
        rewards: Sequence[Reward | tuple[Reward, float]] | None = None,
        tools: Sequence[Tool] | None = None,
        environment_factory: Environment | None = None,
    ) -> None:
        """Prepares the run for its first step, or for the one after its last checkpoint.

        Args:
            config: as for `train`.
            listener: as for `train`.
            data: as for `train`.
            mix: as for `train`.
            validation: as for `train`.
            rewards: as for `train`.
            tools: as for `train`.
            environment_factory: as for `train`.

        Raises:
            UserError: as `train`, or no step is left.
        """
        given = Given(
            data=data,
            mix=mix,
            validation=validation,
            rewards=rewards,
            tools=tools,
            environment_factory=environment_factory,
        )
        self._listener = listener or RunListener()
        self._opened, self._closed_by, self._is_paused = ExitStack(), "", False
        self._trainer: Trainer | None = None
        self._summary: RunSummary | None = None
        with training_alone(), self._released_on_error("as it was opened"):
            config, supplied = given.put_into(config, self._opened)
            config = with_snapshots(config)  # for data that is named here
            check_config(config)
            check_files(config, names_of(supplied))
            check_world(config, world_size_from_environment())
            launch = start(config.train.collective_timeout, deterministic=config.train.deterministic)
            self._config, self._log = config, Log(launch.rank)
            try:
                begun = begin(config, launch, self._log, self._opened, supplied)
            except RunComplete as found:
                self._opened.__exit__(RunComplete, found, None)
                raise UserError(str(found)) from None
            unwatched = Unwatched(config.train, launch, begun.folder.path)
            self._run = complete(begun, self._listener, supervision=unwatched)
            self._trainer = Trainer(self._run)
            self._turns = self._trainer.turns(pauses=True)
            self._opened.callback(self._turns.close)
            self._idle_since = self._run.clock.now()
            self._advance()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._closed_by:
            self.close()

    @property
    def steps(self) -> int:
        """Steps taken so far, with those before the run was resumed."""
        return 0 if self._trainer is None else self._trainer.step

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self._run.step_plan.steps

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self._run.folder.path

    @property
    def summary(self) -> RunSummary | None:
        """The results, once the run has ended or the session is closed."""
        return self._summary

    @briefly_interrupted
    def step(self, count: int = 1) -> StepEvent:
        """Takes optimizer steps, with the evaluations and saves that are due after them.

        Args:
            count: of the steps; fewer are taken where the run ends before, by its last step, its target, early stopping
                or the listener's `stop`.

        Returns:
            The last step's figures.

        Raises:
            UserError: the run has ended, or cannot continue.
            KeyboardInterrupt: Ctrl-C, after the step that was under way.
        """
        if not isinstance(count, int) or count < 1:
            raise UserError(f"count is {count!r}, but a number of steps of at least 1 is expected.")
        with self._working() as pressed:
            self._require_steps()
            for _ in range(count):
                self._advance()
                if self._summary is not None or self.steps == self.total_steps or pressed():
                    break
            if self._summary is None:
                self._run.reporter.catch_up(last=True)
        self._raise_if(pressed)
        newest = self._run.reporter.newest
        if newest is None:
            raise UserError("the run was stopped before its first step: close the session.")
        return newest

    @briefly_interrupted
    def evaluate(self) -> EvaluationEvent:
        """Evaluates the validation data with the weights as they are, beside the evaluations that are due.

        Raises:
            UserError: there is no validation data.
        """
        if self._run.data.validation is None:
            raise UserError("there is no validation data to evaluate: open the session with validation=[...].")

        def leave_if_pressed() -> None:
            if pressed():
                raise _Left

        with self._working() as pressed:
            found = self._present.evaluate_now(leave_if_pressed)
        self._raise_if(pressed)
        return found

    @briefly_interrupted
    def generate(self, prompts: Sequence[Prompt], *, max_new_tokens: int = 64) -> list[str]:
        """Continues texts and conversations with the weights as they are, always with the most likely token.

        It takes a pass over the whole text for each token; `load_model` is faster for many.

        Args:
            prompts: see `engine.api.Model.generate`.
            max_new_tokens: of an answer, which ends before at an end token of the model.

        Raises:
            UserError: a prompt is empty, does not fit the context or has what the model cannot read.
        """
        if isinstance(prompts, (str, Mapping)):
            raise UserError("prompts is one prompt, but a list of them is expected: write [prompt].")
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {max_new_tokens!r}, but at least 1 is expected: change it.")
        run, tokenizer = self._run, self._run.data.tokenizer
        decoder, family = run.training.source.model.decoder, run.data.train.family
        reader = None
        if family is not None:
            reader = resolve("engine.vision.data.reader:ImageReader")(family, self._config.data.image_folder)
        writer = PromptWriter(tokenizer, reader)
        try:
            written = [writer.write(prompt, number) for number, prompt in enumerate(prompts, 1)]
            limit = context_limit(decoder)
            for number, (ids, images) in enumerate(written, 1):
                if not ids or max(ids) >= decoder.vocab_size or len(ids) + max_new_tokens > limit:
                    raise UserError(
                        f"prompt {number} has {len(ids)} tokens and max_new_tokens is {max_new_tokens}, but a prompt "
                        f"has at least one token, of the model's {decoder.vocab_size}, and its context is {limit}: "
                        "change one of them."
                    )
                if decoder.needs_images and not images:
                    raise UserError(f"prompt {number} has no image, but this model answers about images alone.")
            with self._working() as pressed:
                samples = TextSamples(self._config, run.training, tokenizer, [], family)
                asked = [SamplePrompt(list(ids), images) for ids, images in written]
                found = samples.continued(asked, max_new_tokens) if asked else []
            self._raise_if(pressed)
            return found
        finally:
            writer.close()

    @briefly_interrupted
    def save(self) -> Path:
        """Saves a checkpoint, unless the newest has all steps; returns its folder.

        Raises:
            UserError: it cannot be written; the session stays usable.
        """
        with self._working() as pressed:
            folder = self._present.save_now()
        self._raise_if(pressed)
        return folder

    @briefly_interrupted
    def export(
        self,
        out: AnyPath,
        *,
        format: Literal["peft", "hf"] = "peft",
        base_name: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Saves a checkpoint and exports it; see `engine.api.export`.

        Args:
            out: folder to make.
            format: as for `engine.api.export`.
            base_name: as for `engine.api.export`.
            overwrite: as for `engine.api.export`.

        Returns:
            `out`.

        Raises:
            UserError: the checkpoint or the folder cannot be written, or `out` exists; the session stays usable.
        """
        self.save()
        if self._run.launch.rank == 0:
            export(self.run_dir, out, format=format, step=self.steps, base_name=base_name, overwrite=overwrite)
        barrier()
        return Path(out)

    @briefly_interrupted
    def close(self) -> RunSummary:
        """Ends the run, saves it unless the newest checkpoint has all steps, and frees the model's memory.

        Returns:
            The results; `stopped` is None where the run had come to its end.

        Raises:
            UserError: an error has closed the session before, or the run cannot be saved.
        """
        if self._closed_by and self._summary is not None:
            return self._summary
        with self._working():
            if self._summary is None:
                ends = self.steps >= self.total_steps
                self._advance() if ends else self._advance(Preempted(_CLOSED))
        assert self._summary is not None
        self._closed_by = "close()"
        self._opened.close()
        self._listener.wants_stop = False
        stop()
        say_end(self._summary, self._config, self._log)
        return self._summary

    @property
    def _present(self) -> Trainer:
        assert self._trainer is not None
        return self._trainer

    def _require_steps(self) -> None:
        if self._summary is not None or self.steps >= self.total_steps:
            why = "" if self._summary is None or self._summary.stopped is None else f", {self._summary.stopped}"
            raise UserError(
                f"the run has ended after step {self.steps} of {self.total_steps}{why}: close the session, and open "
                "one with more train.steps or train.epochs to go on."
            )

    def _advance(self, thrown: Preempted | None = None) -> None:
        """Comes to the next pause of the run, which is after its next step, or to its end."""
        self._is_paused = False
        try:
            wanted = next(self._turns) if thrown is None else self._turns.throw(thrown)
            while wanted is not None:
                wanted = self._turns.send(self._present.take(wanted))
        except StopIteration as end:
            self._summary = end.value
        self._is_paused = True

    def _raise_if(self, pressed: Callable[[], bool]) -> None:
        """Raises KeyboardInterrupt where Ctrl-C was pressed."""
        if pressed():
            raise KeyboardInterrupt(f"after step {self.steps} of {self.total_steps}; the session is still open")

    @contextmanager
    def _working(self) -> Iterator[Callable[[], bool]]:
        """Holds the process and Ctrl-C while the run works; the time between two calls counts in no figure of the run.

        Yields:
            A function that returns whether Ctrl-C was pressed.
        """
        if self._closed_by:
            raise UserError(
                f"this session was closed by {self._closed_by}: open a new one, which resumes from the last checkpoint "
                "if checkpoint.dir is set."
            )
        with training_alone():
            if self._config.train.deterministic:
                torch.use_deterministic_algorithms(True)
            clock = self._run.clock
            clock.leave_out(clock.now() - self._idle_since)
            try:
                with _interrupts_held() as pressed, self._released_on_error(f"after step {self.steps}"):
                    yield pressed
            finally:
                self._idle_since = clock.now()

    @contextmanager
    def _released_on_error(self, when: str) -> Iterator[None]:
        """Closes the session where an error comes within a step, or is not a refusal."""
        try:
            yield
        except _Left:
            return
        except BaseException as error:
            if self._is_paused and isinstance(error, UserError):
                raise
            self._closed_by = f"an error {when} ({type(error).__name__}: {error})"
            self._opened.__exit__(type(error), error, error.__traceback__)
            if isinstance(error, CommunicationError):
                step = None if self._trainer is None else self._trainer.step
                raise LostRankError(lost_rank(error, step, self._config)) from error
            raise


class _Left(Exception):
    """Raised where an evaluation is left because of Ctrl-C."""


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], bool]]:
    """Has the first Ctrl-C be asked for, and a second raise KeyboardInterrupt at once; in the main thread alone.

    Yields:
        A function that returns whether it was pressed.
    """
    pressed: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt("the step under way is lost")
        # in a thread: the main thread may hold what a line needs
        line = "Ctrl-C: the session finishes the step under way; press it again to end it at once"
        threading.Thread(target=say, args=(line,), daemon=True).start()

    def was_pressed() -> bool:
        return bool(pressed)

    if threading.current_thread() is not threading.main_thread():
        yield was_pressed
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield was_pressed
    finally:
        signal.signal(signal.SIGINT, before)
