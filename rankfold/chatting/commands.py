"""The commands of a conversation. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engine.config.suggestions import closest
from engine.errors import UserError


class Kind(NamedTuple):
    """A command.

    Args:
        argument: its argument, as the help names it; in brackets where it may be left out, "" for none.
        does: its purpose.
    """

    argument: str
    does: str


COMMANDS = {
    "help": Kind("", "list the commands"),
    "reset": Kind("", "forget the conversation, but not the system message"),
    "undo": Kind("", "forget the last message and its answer"),
    "retry": Kind("", "answer the last message again, with other random numbers"),
    "system": Kind("[TEXT]", 'show or set the system message; "" removes it'),
    "image": Kind("PATH", "show an image with the next message; a path in a message does the same"),
    "save": Kind("FILE", "write the conversation as a record of training; a .jsonl file gets one more line"),
    "load": Kind("FILE", "continue a conversation that was saved"),
    "adapter": Kind("[DIR|on|off]", "show the adapter, open another one, or answer with or without it"),
    "temperature": Kind("[T]", "show or set the temperature; 0 takes the most likely token"),
    "top-p": Kind("[P]", "show or set --top-p"),
    "top-k": Kind("[K]", "show or set --top-k"),
    "min-p": Kind("[P]", "show or set --min-p"),
    "repetition-penalty": Kind("[X]", "show or set --repetition-penalty"),
    "seed": Kind("[N]", "show or set the seed"),
    "max-new-tokens": Kind("[N]", "show or set the most tokens of an answer"),
    "exit": Kind("", "end; so does Ctrl-D"),
}
"""Name -> the command."""

_ALIASES = {"quit": "exit", "bye": "exit", "clear": "reset", "?": "help"}

SETTINGS: dict[str, type[int] | type[float]] = {
    "temperature": float, "top-p": float, "top-k": int, "min-p": float, "repetition-penalty": float, "seed": int,
    "max-new-tokens": int,
}  # fmt: skip
"""Commands that show or set a number -> its type."""


class Command(NamedTuple):
    """A command that was given."""

    name: str
    value: str


def parsed(entry: str) -> Command | str:
    """Returns what an entry is: a command, or a message.

    Raises:
        UserError: it begins like a command and is none, or lacks its argument, or has one too many.
    """
    if not entry.startswith("/"):
        return entry
    word, _, value = entry[1:].partition(" ")
    name, value = _ALIASES.get(word, word), value.strip()
    if name not in COMMANDS:
        if "/" in word or Path(f"/{word}").exists():  # a path, such as one of an image that was dropped
            return entry
        close = closest(name, COMMANDS)
        hint = f"did you mean /{close}?" if close else "/help lists them."
        raise UserError(f"/{word} is not a command: {hint}")
    argument = COMMANDS[name].argument
    if value and not argument:
        raise UserError(f"/{name} takes nothing, but {value!r} was given: leave it out.")
    if argument and not value and not argument.startswith("["):
        raise UserError(f"/{name} needs {argument}: write /{name} {argument}.")
    return Command(name, value)
