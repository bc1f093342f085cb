"""The messages of a conversation, and their files. Needs no torch."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from engine.errors import UserError
from engine.files.documents import parse_record, read_text
from engine.files.refusals import writing

Message = dict[str, Any]

_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_WORD = re.compile(r"'[^']*'|\"[^\"]*\"|(?:\\.|[^\s\\])+")
"""A word as a shell has it, which is how terminals write the path of a file that is dropped on them."""


@dataclass(slots=True)
class Conversation:
    """The messages so far, without one that has no answer.

    Args:
        system: the system message; None for none.
        messages: questions, answers, and calls and results of tools in a conversation that was loaded.
        images: paths that belong to the next question.
    """

    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    def asked(self, text: str) -> list[Message]:
        """Returns the messages with a question, which takes the images."""
        content: Any = text
        if self.images:
            content = [*({"type": "image", "image": path} for path in self.images), {"type": "text", "text": text}]
        return [*self.messages, {"role": "user", "content": content}]

    def whole(self, messages: Sequence[Message] | None = None) -> list[Message]:
        """Returns messages behind the system message; those so far by default."""
        begin = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*begin, *(self.messages if messages is None else messages)]

    def last_question(self) -> list[Message] | None:
        """Returns the messages up to the last question; None where there is none."""
        places = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        return self.messages[: places[-1] + 1] if places else None

    def undo(self) -> bool:
        """Forgets the last question and what followed it; returns whether there was one."""
        asked = self.last_question()
        if asked is not None:
            self.messages = asked[:-1]
        return asked is not None

    def save(self, path: Path) -> None:
        """Writes the conversation as a record of training: into a new file, or as one more line of a .jsonl file.

        Raises:
            UserError: there is nothing to write, the file exists, or cannot be written.
        """
        if not self.messages:
            raise UserError("there is no conversation yet, so nothing was saved.")
        appends = path.suffix == ".jsonl"
        if path.exists() and not appends:
            raise UserError(f"{path} exists: give a new file, or one that ends in .jsonl, which gets one more line.")
        record = {"messages": self.whole()}
        text = json.dumps(record, ensure_ascii=False, indent=None if appends else 2)
        with writing(path, "give another file"), path.open("a" if appends else "x", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def load(self, path: Path) -> None:
        """Takes the messages of a file that `save` wrote, or of the last line of a .jsonl file.

        Raises:
            UserError: there is no such file, or it holds something else. The conversation stays as it was.
        """
        advice = 'give a file with {"messages": [...]}'
        text = read_text(path, advice).strip()
        record = parse_record(text.splitlines()[-1] if path.suffix == ".jsonl" and text else text, str(path), advice)
        messages = record.get("messages")
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise UserError(f"{path} has no list of messages, each with a role and a content: {advice}.")
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        if system is not None and not isinstance(system, str):
            raise UserError(f"{path} has a system message that is no text: correct it.")
        rest = messages if system is None else messages[1:]
        while rest and rest[-1]["role"] != "assistant":  # a question without an answer
            rest = rest[:-1]
        self.system, self.messages, self.images = system, rest, []


def _is_message(message: object) -> bool:
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content", ""), str | list | None)
    )


def text_of(message: Message) -> str:
    """Returns a message as it is shown: its role, its text, <image> in the place of images, and calls of tools."""
    content = message.get("content") or ""
    if isinstance(content, list):
        parts = [part if isinstance(part, Mapping) else {"text": part} for part in content]
        content = " ".join(str(part.get("text", "<image>")) for part in parts)
    calls = "".join(f"\n<tool_call>{json.dumps(call, ensure_ascii=False)}" for call in message.get("tool_calls") or ())
    return f"{message['role']}: {content}{calls}"


def without_images(text: str) -> tuple[str, list[str]]:
    """Takes the paths of image files out of a text, as a terminal writes those that are dropped on it.

    Returns:
        The rest of the text, and the absolute paths in their order.
    """
    found: list[str] = []

    def take(word: re.Match[str]) -> str:
        path = _image(word[0])
        if path is None:
            return word[0]
        found.append(path)
        return ""

    rest = _WORD.sub(take, text)
    return (rest.strip() if found else text), found


def _image(word: str) -> str | None:
    try:
        (given,) = shlex.split(word)
    except ValueError:
        return None
    if given.startswith("file://"):
        given = unquote(urlparse(given).path)
    path = Path(given).expanduser()
    try:
        is_image = path.suffix.lower() in _IMAGES and path.is_file()
    except (OSError, RuntimeError):  # no name of a file, or of a home
        return None
    return str(path.resolve()) if is_image else None
