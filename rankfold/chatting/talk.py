"""A conversation at a terminal, or of lines from a file or a pipe."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from engine.config.command_line import named_as
from engine.errors import UserError
from engine.inference.options import Sampling
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.vision.data.files import image_size
from rankfold.chatting.answering import Answering, Ask, Sample, UseAdapter
from rankfold.chatting.commands import COMMANDS, SETTINGS, Command, parsed
from rankfold.chatting.conversation import Conversation, Message, text_of, without_images
from rankfold.chatting.display import Display, opens_thought
from rankfold.chatting.keyboard import Keyboard
from rankfold.generating.opened import Opened
from rankfold.generating.prompts import Prompt, Writer

_HISTORY = Path("~/.local/state/rankfold/chat_history")
_AS_COMMANDS = {f"--{name}": f"/{name}" for name in SETTINGS}
_TAIL = 16
"""Tokens at the end of a prompt in which the beginning of a thought is looked for."""


def talk(arguments: argparse.Namespace, launch: Launch, opened: Opened, sampling: Sampling) -> None:
    """Answers what is said on rank 0, until its end. Collective.

    Args:
        arguments: the command line.
        launch: this process.
        opened: the model.
        sampling: of the first answers.
    """
    answering = Answering(arguments, launch, opened, sampling)
    if launch.rank != 0:
        answering.follow()
        return
    history = _HISTORY.expanduser() if arguments.history else None
    with Keyboard([f"/{name}" for name in COMMANDS], history) as keyboard:
        _Talk(arguments, answering, keyboard).run()
    answering.end()


def check_images(arguments: argparse.Namespace) -> None:
    """Refuses images of the command line that cannot be read, before a model is.

    Raises:
        UserError: an image that cannot be read.
    """
    for path in arguments.image:
        image_size(Path(arguments.image_folder or ".") / path, "--image")


class _Talk:
    """The side of rank 0."""

    def __init__(self, arguments: argparse.Namespace, answering: Answering, keyboard: Keyboard) -> None:
        self._arguments, self._answering, self._keyboard = arguments, answering, keyboard
        self._log = Log(0)
        self._conversation = Conversation(system=arguments.system, images=[*arguments.image])
        self._max_new_tokens: int = arguments.max_new_tokens
        self._row = 0
        self._unanswered: list[Message] | None = None
        """The messages with a question that has no answer; for /retry."""

    def run(self) -> None:
        """Answers until the end of input."""
        self._log.info("type a message and press Enter; /help lists the commands, Ctrl-D ends")
        while (entry := self._keyboard.entry()) is not None:
            if not entry:
                continue
            try:
                with named_as(_AS_COMMANDS):
                    if not self._heard(entry):
                        return
            except UserError as error:  # reported, and the next line may fit
                self._log.info(f"error: {error}")

    def _heard(self, entry: str) -> bool:
        """Does what an entry asks for; returns whether the conversation continues."""
        said = parsed(entry)
        if isinstance(said, Command):
            return self._obeyed(said)
        text, images = said, list[str]()
        if self._answering.opened.reader is not None:
            text, images = without_images(said)
        for path in images:
            self._take_image(path)
        if text:
            self._ask(self._conversation.asked(text), text)
        return True

    def _obeyed(self, command: Command) -> bool:
        name, value, talk = command.name, command.value, self._conversation
        if name in ("reset", "undo", "load"):
            self._unanswered = None
        if name in SETTINGS:
            self._set(name, value)
            return True
        match name:
            case "help":
                self._show_help()
            case "exit":
                return False
            case "reset":
                self._conversation = Conversation(system=talk.system)
            case "undo":
                self._log.info("forgotten" if talk.undo() else "there is nothing to undo")
            case "retry":
                self._retry()
            case "system":
                self._set_system(value)
            case "image":
                self._take_image(value)
            case "save":
                talk.save(Path(value).expanduser())
                self._log.info(f"saved in {value}")
            case "load":
                talk.load(Path(value).expanduser())
                for message in talk.whole():
                    self._log.info(text_of(message), wraps=False)
            case "adapter":
                self._use_adapter(value)
        return True

    def _show_help(self) -> None:
        width = max(len(f"{name} {kind.argument}") for name, kind in COMMANDS.items())
        for name, kind in COMMANDS.items():
            self._log.info(f"  /{f'{name} {kind.argument}':<{width}}  {kind.does}", wraps=False)
        self._log.info(
            'a text between two """ may have several lines, as may one whose lines end in a backslash; Ctrl-C stops an '
            "answer and keeps what has come of it"
        )

    def _ask(self, asked: list[Message], text: str) -> None:
        """Answers the last of some messages."""
        prompt = self._prompt(asked, text)
        context, length = self._answering.opened.context, len(prompt.ids)
        if length >= context:
            raise UserError(
                f"the conversation has {length} tokens with this message, but the model's context is {context}: "
                "shorten the message, or /undo, /reset."
            )
        room = min(self._max_new_tokens, context - length)
        tail = self._answering.opened.tokenizer.show(prompt.ids[-_TAIL:])
        display = Display(sys.stdout, styled=self._keyboard.interactive, thinks=opens_thought(tail))
        ask = Ask(prompt, self._row, room)
        self._row += 1
        self._unanswered = asked
        with self._keyboard.answering() as interrupted:
            answer = self._answering.order(ask, display.add, interrupted)
        display.finish()
        if answer is None or not answer.text:
            self._log.info("no answer; /retry asks again")
            return
        if answer.ending == "length" and room == self._max_new_tokens and self._keyboard.interactive:
            self._log.info(f"(stopped after {room} tokens: /max-new-tokens changes that)")
        elif answer.ending == "length" and room < self._max_new_tokens:
            self._log.info(f"(stopped: the model's context of {context} tokens is full)")
        elif answer.ending == "interrupted":
            self._log.info("(stopped)")
        self._conversation.messages = [*asked, {"role": "assistant", "content": answer.text}]
        self._conversation.images, self._unanswered = [], None

    def _prompt(self, asked: list[Message], text: str) -> Prompt:
        opened, chat = self._answering.opened, self._arguments.chat
        write = Writer(
            tokenizer=opened.tokenizer,
            chat=chat,
            system=None,
            reader=opened.reader,
            images=() if chat else tuple(self._conversation.images),
        )
        number = self._row + 1
        return write.conversation(self._conversation.whole(asked), number) if chat else write.text(text, number)

    def _retry(self) -> None:
        asked = self._unanswered or self._conversation.last_question()
        if asked is None:
            raise UserError("there is no message to answer again.")
        if self._answering.sampling.greedy:
            self._log.info("temperature 0 gives the same answer again: /temperature 0.8 samples")
        text = asked[-1]["content"]
        self._ask(asked, text if isinstance(text, str) else "")

    def _set_system(self, value: str) -> None:
        if value:
            self._conversation.system = None if value in ('""', "''") else value
        shown = self._conversation.system
        self._log.info("no system message" if shown is None else f"system: {shown}", wraps=False)

    def _take_image(self, value: str) -> None:
        if self._answering.opened.reader is None:
            raise UserError("this model reads text alone: start with a vision-language model to talk about images.")
        path = Path(value).expanduser()
        width, height = image_size(path, "/image")
        self._conversation.images.append(str(path.resolve()))
        self._log.info(f"{path.name}, {width} x {height}: goes with your next message")

    def _use_adapter(self, value: str) -> None:
        answering = self._answering
        if value in ("on", "off"):
            if answering.adapter is None:
                raise UserError("there is no adapter: /adapter DIR opens one.")
            if value == "off" and answering.opened.model.full:
                raise UserError(
                    "the adapter has modules that were trained in full, so that the model without it is not the base: "
                    "start again with the base alone."
                )
            answering.order(UseAdapter(on=value == "on"))
        elif value:
            answering.order(UseAdapter(on=True, path=Path(value).expanduser()))
        shown = "none" if answering.adapter is None else str(answering.adapter)
        self._log.info(f"adapter: {shown}{'' if answering.adapters else ' (off)'}", wraps=False)

    def _set(self, name: str, value: str) -> None:
        """Shows or changes one of the settings of sampling, or the most tokens of an answer."""
        attribute, kind = name.replace("-", "_"), SETTINGS[name]
        if value:
            try:
                number = kind(value)
            except ValueError:
                kinds = {int: "a whole number", float: "a number"}
                raise UserError(f"/{name} is {value!r}, but {kinds[kind]} is expected: change it.") from None
            if name == "max-new-tokens":
                if number < 1:
                    raise UserError(f"/{name} is {value}, but at least 1 is expected: change it.")
                self._max_new_tokens = int(number)
            else:
                self._answering.order(Sample(_changed(self._answering.sampling, attribute, number)))
        if name == "max-new-tokens":
            self._log.info(f"{name}: {self._max_new_tokens}")
        else:
            self._log.info(f"{name}: {getattr(self._answering.sampling, attribute)}")


def _changed(sampling: Sampling, name: str, value: float) -> Sampling:
    """Returns the sampling with one field changed; a temperature of 0 leaves nothing of what chooses among tokens."""
    if name == "temperature" and value == 0:
        plain = {one.name: one.default for one in fields(Sampling) if one.name in ("top_k", "top_p", "min_p")}
        return replace(sampling, temperature=0.0, **plain)  # type: ignore[arg-type]
    change: dict[str, Any] = {name: value}
    return replace(sampling, **change)
