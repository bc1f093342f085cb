"""What all ranks do in a conversation: rank 0 says what, and the others follow."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.distributed.collectives import broadcast_object
from engine.errors import UserError
from engine.inference.options import Sampling
from engine.inference.rows import Answer, Request
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from rankfold.generating.opened import Opened
from rankfold.generating.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Ask:
    """An answer is asked for.

    Args:
        prompt: its tokens and images.
        row: its number, a coordinate of random numbers.
        max_new_tokens: of the answer.
    """

    prompt: Prompt
    row: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Later answers are sampled so."""

    sampling: Sampling


@dataclass(frozen=True, slots=True)
class UseAdapter:
    """Later answers are with the adapter, or without it.

    Args:
        path: of another adapter, with which the model is opened again; None for the one that is there.
    """

    on: bool
    path: Path | None = None


Order = Ask | Sample | UseAdapter


class Answering:
    """The model of a conversation, on this rank.

    Args:
        arguments: the command line, with which the model is opened again.
        launch: this process.
        opened: the model.
        sampling: of the first answers.
    """

    def __init__(self, arguments: argparse.Namespace, launch: Launch, opened: Opened, sampling: Sampling) -> None:
        self._arguments, self._launch = arguments, launch
        self.opened, self.sampling = opened, sampling
        self.adapters = True
        """Whether answers are with the adapter, where there is one."""

    @property
    def adapter(self) -> Path | None:
        """The folder of the adapter; None without one."""
        found: Path | None = self._arguments.adapter
        return found

    def follow(self) -> None:
        """Does what rank 0 says until it ends; on the other ranks. Collective."""
        while (order := broadcast_object(None)) is not None:
            try:
                self._do(order)  # type: ignore[arg-type]
            except UserError:  # rank 0 has the same, and reports it
                continue

    def order(
        self,
        order: Order,
        on_text: Callable[[str], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Answer | None:
        """Has all ranks do something; on rank 0. Collective.

        Args:
            on_text: called with an answer's text as it comes.
            interrupted: whether the answer ends now, asked before each of its tokens.

        Returns:
            The answer that was asked for; None where it was interrupted before it began.

        Raises:
            UserError: it is impossible; things are as they were.
        """
        broadcast_object(order)
        return self._do(order, on_text, interrupted)

    def end(self) -> None:
        """Lets the other ranks end; on rank 0. Collective."""
        broadcast_object(None)

    def _do(
        self,
        order: Order,
        on_text: Callable[[str], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Answer | None:
        match order:
            case Sample(sampling):
                self.sampling = sampling
                self.opened.forget()
            case UseAdapter(on, path):
                if path is not None:
                    self._open_with(path)
                self._use_adapters(on)
                self.adapters = on
                self.opened.forget()
            case Ask():
                return self._answer(order, on_text, interrupted)
        return None

    def _answer(
        self, ask: Ask, on_text: Callable[[str], None] | None, interrupted: Callable[[], bool] | None
    ) -> Answer | None:
        request = Request(row=ask.row, ids=ask.prompt.ids, images=ask.prompt.images)
        limits = replace(self.opened.limits, slots=1, max_new_tokens=ask.max_new_tokens)
        try:
            generator = self.opened.generator([request], limits, self.sampling, grows=True)
            generator.stage.adapters = self.adapters
            answers = generator.run(
                [request],
                on_text=None if on_text is None else (lambda _, text: on_text(text)),
                interrupted=lambda: bool(broadcast_object(interrupted is not None and interrupted())),
            )
        except BaseException:  # the row is half computed
            self.opened.forget()
            raise
        return answers[0] if answers else None

    def _use_adapters(self, on: bool) -> None:
        """Prepares answers with the adapter or without it; opens the model again where the base cannot be read."""
        try:
            self.opened.model.use_adapters(on)
        except UserError:  # some codes may be the base's already, among others that have the adapter
            self._open(self._arguments, self.opened.chat)
            raise

    def _open_with(self, adapter: Path) -> None:
        """Opens the model with another adapter; with the one before where that is impossible."""
        before = self._arguments
        wanted = argparse.Namespace(**{**vars(before), "adapter": adapter, "step": None})
        if before.model is None:  # the run that was given names the base, and the other adapter may not
            wanted.model = self.opened.model.folder
        chat, sees_images = self.opened.chat, self.opened.reader is not None
        try:
            self._open(wanted, chat)
            self._arguments = wanted
        except UserError:
            self._open(before, chat)
            raise
        assert (self.opened.reader is not None) == sees_images

    def _open(self, arguments: argparse.Namespace, chat: bool) -> None:
        """Opens a model in place of the one that is here, if any."""
        self.__dict__.pop("opened", None)  # two models may not fit
        gc.collect()
        self.opened = Opened(arguments, self._launch, Log(self._launch.rank), image=None, chat=chat)
