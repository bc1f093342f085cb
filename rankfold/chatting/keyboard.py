"""Reads what the user says: lines with history and completion at a terminal, else lines of a file or a pipe.

At a terminal Ctrl-C is a key and not a signal: it stops an answer, or clears a line, and no launcher of several ranks
gets it. While an answer comes, keys are not shown; what is typed stands in the next line.
"""

from __future__ import annotations

import glob
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engine.files import platforms
from engine.telemetry.terminal import is_terminal

_BLOCK = '"""'
_INTERRUPT = b"\x03"
_ENTRIES = 1000
"""Lines of history that are kept."""


class Keyboard:
    """The user's side of a conversation, on the rank that shows it.

    Args:
        commands: words that are completed.
        history: file of earlier lines; None keeps none.
    """

    def __init__(self, commands: Sequence[str], history: Path | None) -> None:
        self._commands, self._history = commands, history
        self.interactive = not platforms.IS_WINDOWS and sys.stdin.isatty() and is_terminal(sys.stdout)
        """Whether a person sees what is written."""
        self._typed = ""
        self._readline: Any = None
        self._modes: list[Any] | None = None

    def __enter__(self) -> Keyboard:
        if self.interactive:
            self._take_terminal()
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is not None and self._history is not None:
            with suppress(OSError):  # a history that cannot be kept is no reason to fail
                self._history.parent.mkdir(parents=True, exist_ok=True)
                self._history.touch(mode=0o600)
                self._readline.set_history_length(_ENTRIES)
                self._readline.write_history_file(self._history)
        if self._modes is not None:
            _set_modes(self._modes)

    def entry(self) -> str | None:
        """Returns what is said next, without the white space around it; a text between lines with three quotes, and
        lines that end in a backslash, are one. None at the end."""
        line = self._line("> ")
        if line is None:
            return None
        text = line.strip()
        if text.startswith(_BLOCK):
            return self._block(text.removeprefix(_BLOCK))
        while line is not None and line.endswith("\\"):
            line = self._line(". ")
            text = text.removesuffix("\\") + "\n" + (line or "")
        return text.strip()

    def _block(self, text: str) -> str:
        while not text.endswith(_BLOCK):
            line = self._line(". ")
            if line is None:
                return text.strip()
            text += "\n" + line.rstrip()
        return text.removesuffix(_BLOCK).strip()

    def _line(self, prompt: str) -> str | None:
        if not self.interactive:
            return line.rstrip("\n") if (line := sys.stdin.readline()) else None
        try:
            return input(prompt)
        except EOFError:
            sys.stdout.write("\n")
            return None

    @contextmanager
    def answering(self) -> Iterator[Callable[[], bool]]:
        """Yields a function that returns whether Ctrl-C was pressed; keys that are typed meanwhile are not shown."""
        if not self.interactive:
            yield lambda: False
            return
        import termios

        before = termios.tcgetattr(sys.stdin)
        quiet = termios.tcgetattr(sys.stdin)
        quiet[3] &= ~(termios.ICANON | termios.ECHO)
        _set_modes(quiet)
        pressed = False

        def interrupted() -> bool:
            nonlocal pressed
            while not pressed and select.select([sys.stdin.fileno()], [], [], 0)[0]:
                keys = os.read(sys.stdin.fileno(), 4096)
                pressed = not keys or _INTERRUPT in keys
                text = keys.decode("utf-8", "ignore")
                self._typed += "".join(key for key in text if key.isprintable())
            return pressed

        try:
            yield interrupted
        finally:
            _set_modes(before)

    def _take_terminal(self) -> None:
        import readline
        import termios

        self._readline = readline
        if self._history is not None:
            with suppress(OSError):
                readline.read_history_file(self._history)
        readline.set_completer(self._completion)
        readline.set_completer_delims(" \t\n")
        readline.set_startup_hook(self._insert_typed)
        if getattr(readline, "backend", "readline") != "readline":  # libedit, whose bindings are others
            readline.parse_and_bind("bind ^I rl_complete")
            return
        for binding in ("tab: complete", r'"\C-c": "\C-e\C-u\C-m"', "set enable-bracketed-paste on"):
            readline.parse_and_bind(binding)
        self._modes = termios.tcgetattr(sys.stdin)
        keys = termios.tcgetattr(sys.stdin)
        keys[6] = [*keys[6]]
        keys[6][termios.VINTR] = b"\x00"
        _set_modes(keys)

    def _insert_typed(self) -> None:
        self._readline.insert_text(self._typed)
        self._typed = ""

    def _completion(self, word: str, state: int) -> str | None:
        """Returns the next completion of a word: a command at the beginning of a line, else a path."""
        found = []
        if self._readline.get_begidx() == 0:
            found = [f"{command} " for command in self._commands if command.startswith(word)]
        if not found:
            paths = sorted(glob.glob(f"{glob.escape(os.path.expanduser(word))}*"))
            found = [f"{path}/" if os.path.isdir(path) else path for path in paths]
        return found[state] if state < len(found) else None


def _set_modes(modes: list[Any]) -> None:
    import termios

    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, modes)
