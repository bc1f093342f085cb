"""Renders conversations with a chat template, by transformers as a server would, within limits, and marks the targets.

The assistant's text is found in one of three ways, in this order: {% generation %} blocks that the template has; the
training form of a template that is well known (`engine.data.training_form`); and comparison (`engine.data.chat`).

A template is a program that comes with a model. Jinja's sandbox keeps it away from the system; what keeps it from
hanging or filling the machine is the process that it runs in (`engine.data.tokenizer_worker`), and a limit on what it
writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.data.chat import MARK, Message, Span, assistant_spans, turn_opening
from engine.data.named_templates import TEMPLATES
from engine.data.tokenizer_calls import LIMITS, Runaway
from engine.data.training_form import BEGIN, END, training_form
from engine.errors import UserError
from engine.sentences import on_one_line

FORMATS_WITHOUT_TEMPLATE = "text, completion or alpaca"

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_RESERVED = (BEGIN, END, MARK)
_ANSWER = "An answer"
_ALWAYS = 2**20
"""Maximum characters that a template may write for any conversation."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with its variables, ready to render conversations.

    Args:
        source: its text.
        where: its origin, for messages.
        tokens: the special tokens, by their names in templates (bos_token, ...).
        arguments: further variables.
        control: matches each control token of the tokenizer.
        limits: is entered around all that the template does for one conversation.
    """

    source: str
    where: str
    tokens: Mapping[str, Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    control: re.Pattern[str] = field(default_factory=lambda: re.compile("(?!)"))
    limits: Callable[[], AbstractContextManager[None]] = nullcontext

    def render(
        self,
        messages: Sequence[Message],
        *,
        prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the conversation as a server renders it.

        Args:
            messages: each with "role" and "content".
            prompt: end with the prompt for the assistant's next turn.
            tools: descriptions of the tools that the assistant may call, as JSON schemas; None for none.

        Raises:
            UserError: the template refuses these messages, or does not come to an end.
        """
        _check_characters(messages)
        with self._limited():
            return self._run(self.source, messages, prompt=prompt, tools=tools)[0]

    def render_with_targets(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Returns the conversation as it is trained on, and the character ranges that are targets.

        Raises:
            UserError: as for `render`, or the assistant's turns cannot be found.
        """
        _check_characters(messages)
        with self._limited():
            if _GENERATION.search(self.source):
                text, spans = self._run(self.source, messages, tracked=True)
                if any(end > len(text) for _, end in spans):
                    raise UserError(
                        f"the chat template of {self.where} marks text that it does not write as the assistant's; "
                        "write the text between generation and endgeneration where it stands."
                    )
            elif self._training_form is not None:
                text, spans = _unmarked(self._run(self._training_form, messages)[0])
            else:
                text = self._rendered(messages, False)
                return text, assistant_spans(
                    messages, text, self._rendered, opening=self._opening, control=self.control
                )
        if not any(start < end for start, end in spans):
            raise UserError(f"the chat template of {self.where} marks nothing of this conversation as the assistant's.")
        return text, spans

    def ending(self) -> str | None:
        """Returns what is trained on behind an answer at the end of a conversation; None where that cannot be found."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        try:
            text, spans = self.render_with_targets(chat)
        except UserError:  # reported where a conversation of the data is refused
            return None
        start, end = spans[-1] if spans else (0, 0)
        _, found, behind = text[start:end].rpartition(_ANSWER)
        return behind if found else None

    def _rendered(self, messages: Sequence[Message], prompt: bool) -> str:
        return self._run(self.source, messages, prompt=prompt)[0]

    @cached_property
    def _opening(self) -> str:
        return turn_opening(self._rendered)

    @cached_property
    def _training_form(self) -> str | None:
        return training_form(self.source)

    @cached_property
    def _takes_parts(self) -> bool:
        """Returns whether the template reads content as a list of parts only, and would silently drop plain text."""
        return not self._writes_content(parts=False) and self._writes_content(parts=True)

    def _writes_content(self, *, parts: bool) -> bool:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        try:
            return MARK in self._run(self.source, chat, parts=parts)[0]
        except UserError:
            return False

    def _run(
        self,
        source: str,
        messages: Sequence[Message],
        *,
        prompt: bool = False,
        tracked: bool = False,
        parts: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if self._takes_parts if parts is None else parts:
            chat = [_in_parts(message) for message in chat]
        try:
            texts, spans = render_jinja_template(
                conversations=[chat],
                tools=None if tools is None else [dict(one) for one in tools],
                chat_template=source,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=tracked,
                **{**self.tokens, **self.arguments},
            )
            text = str(texts[0])
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"the chat template of {self.where} writes half of a surrogate pair at character {error.start}; "
                "correct the template, or give another one with data.chat_template."
            ) from None
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # a template is a program, which may raise any
            raise UserError(
                f"the chat template of {self.where} refuses these messages ({on_one_line(str(error))}); change the "
                f"order of their roles or use a format that needs no template ({FORMATS_WITHOUT_TEMPLATE})."
            ) from error
        if len(text) > _ALWAYS and len(text) > (most := _ALWAYS + 16 * sum(map(_characters, chat))):
            raise self._endless(f"writes {len(text):,} characters, more than {most:,},")
        return text, spans[0] if tracked else []

    @contextmanager
    def _limited(self) -> Iterator[None]:
        try:
            with self.limits():
                yield
        except MemoryError:
            raise self._endless(f"asks for more than {LIMITS.template_bytes / 2**30:g} GiB of memory") from None
        except RecursionError:
            raise self._endless("calls itself without end") from None

    def _endless(self, does: str) -> Runaway:
        return Runaway(
            f"the chat template of {self.where} {does} for one conversation; correct the template, or give another one "
            "with data.chat_template."
        )


def no_template(path: Path) -> str:
    """Returns the sentence for a conversation where there is no template."""
    return (
        f"the tokenizer of {path} has no chat template, which conversations (messages, sharegpt) need; set "
        f"data.chat_template to one of {', '.join(TEMPLATES)}, or to a file, or write the data in the format "
        f"{FORMATS_WITHOUT_TEMPLATE}."
    )


def _check_characters(value: object) -> None:
    """Raises UserError where a message contains one of the marks around answers."""
    if isinstance(value, str):
        found = next((mark for mark in _RESERVED if mark in value), None)
        if found is not None:
            raise UserError(f"a message has U+{ord(found):04X}, which Unicode reserves as a noncharacter; remove it.")
    elif isinstance(value, Mapping):
        for item in value.values():
            _check_characters(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_characters(item)


def _unmarked(text: str) -> tuple[str, list[Span]]:
    """Returns a text without the marks of a training form, and the ranges between them."""
    spans: list[Span] = []
    kept: list[str] = []
    length = 0
    start: int | None = None
    for piece in re.split(f"([{BEGIN}{END}])", text):
        if piece == BEGIN:
            start = length
        elif piece == END:
            if start is not None:
                spans.append((start, length))
            start = None
        else:
            kept.append(piece)
            length += len(piece)
    return "".join(kept), spans


def _in_parts(message: Message) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


def _characters(value: object) -> int:
    if isinstance(value, Mapping):
        return sum(_characters(key) + _characters(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return len(str(value))
