"""The command lines of the tools: argparse, with one sentence for each mistake and options by the tool's own names.

A tool whose flags are options of a run under shorter names says so with `stands_for` ({"parallel.tensor": "--tensor"}).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from engine.config.paths import path, path_text
from engine.config.suggestions import closest, closest_value, meant_options
from engine.errors import UserError

_KINDS = {"int": "a whole number", "float": "a number", "Path": "a path"}
_LARGEST = 2**63 - 1
"""The largest whole number of an option: the limit of numpy, torch and the system's calls."""


class CommandLine(argparse.ArgumentParser):
    """A parser that raises `UserError` where argparse would print its usage; --help is argparse's own.

    Args:
        stands_for: full name of an option of a run -> this command's flag for it. Parsed arguments have it too, for
            `named_as`.
    """

    def __init__(self, *, stands_for: Mapping[str, str] | None = None, **arguments: Any) -> None:
        arguments.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        arguments.setdefault("allow_abbrev", False)  # --base is no short form of --base-dtype
        arguments.setdefault("prog", Path(sys.argv[0]).name)
        super().__init__(**arguments)
        self.register("type", Path, path)
        self.register("type", float, _finite)
        self.register("type", int, _whole)
        self.stands_for = dict(stands_for or {})
        self.set_defaults(stands_for=self.stands_for)  # the subcommand's, where there is one

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but words that belong to no option are an error here, where the subcommand is known."""
        words = sys.argv[1:] if args is None else list(args)
        options = takewhile(lambda word: word.startswith("-"), words)  # later words are the subcommand's
        self._refuse_unknown(words if self._subparsers is None else list(options))
        found, extra = super().parse_known_args(words, namespace)
        if extra:
            self.error(f"unrecognized arguments: {' '.join(extra)}")
        return found, []

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """As argparse's, but only a path, whose name the system chose, may hold bytes that are not UTF-8. A
        subcommand's values are checked by its own parser."""
        if action.nargs != argparse.PARSER and action.type not in (Path, path, path_text) and not _is_utf8(arg_string):
            raise argparse.ArgumentError(action, "has bytes that are not UTF-8: write it in UTF-8.")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        """Raises the sentence for one of argparse's messages.

        Raises:
            UserError: always.
        """
        raise UserError(self._sentence(" ".join(message.split())))

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Refuses an unknown option before a missing one is reported: the one is often the other, misspelled."""
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in word and name not in self._option_string_actions:
                raise UserError(f"{name} is not an option of {self.prog}{self._hint(name)}")

    def _hint(self, name: str) -> str:
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        here = [self.stands_for[option] for option in meant_options(name[2:]) if option in self.stands_for]
        plain = {flag.replace("-", "_"): flag for flag in flags}
        same = plain.get(name.replace("-", "_")) or self.stands_for.get(name)
        close = same or (here[0] if here else closest(name, flags))
        if close:
            return f": did you mean {close}?"
        elsewhere = meant_options(name[2:])
        known = f"; rankfold train has --{elsewhere[0]}" if elsewhere else ""
        return f": {self.prog} --help lists its options{known}."

    def _sentence(self, message: str) -> str:
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            names = missing[1].split(", ")
            verb = "is" if len(names) == 1 else "are"
            return f"{' and '.join(names)} {verb} not given: {self.prog} --help explains it."
        if stray := re.fullmatch(r"unrecognized arguments: ?(.*)", message):
            return (
                f"{stray[1]!r} belongs to no option of {self.prog}: leave it out, or put a text with spaces in quotes."
            )
        if not (match := re.fullmatch(r"argument ([^:]+): (.*)", message)):
            return f"{message}: {self.prog} --help explains it."
        name, problem = match[1].split("/")[-1], match[2]
        if re.match(r"expected (one|at least one) argument", problem):
            return f"{name} has no value: write {name} followed by one, or {name}=VALUE where it begins with a dash."
        if choice := re.fullmatch(r"invalid choice: (.*?) \(choose from (.*)\)", problem):
            return self._wrong_choice(name, choice[1].strip("'"), [one.strip(" '") for one in choice[2].split(",")])
        if kind := re.fullmatch(r"invalid (\w+) value: '(.*)'", problem):
            return f"{name} is {kind[2]!r}, but {_KINDS.get(kind[1], kind[1])} is expected: change it."
        return f"{name} {problem}" if problem.endswith((".", "?")) else f"{name}: {problem}."

    def _wrong_choice(self, name: str, given: str, choices: list[str]) -> str:
        close = closest_value(given, choices)
        end = f"did you mean {close}?" if close else "choose one of them."
        if name.startswith("-"):
            return f"{name} is {given!r}, but it must be one of {', '.join(choices)}: {end}"
        return f"{self.prog} has no {name.lower()} {given!r}, but {', '.join(choices)}: {end}"


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _finite(text: str) -> float:
    """Parses an option that is a number: no time, size, rate or limit is infinite.

    Raises:
        ValueError: the text is not a number.
        argparse.ArgumentTypeError: it is not finite.
    """
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"is {value}, but a finite number is expected: change it.")
    return value


def _whole(text: str) -> int:
    """Parses an option that is a whole number.

    Raises:
        ValueError: the text is not a whole number.
        argparse.ArgumentTypeError: it is too large.
    """
    value = int(text)
    if abs(value) > _LARGEST:
        raise argparse.ArgumentTypeError(f"is a number of {len(text)} digits, too large for any option: change it.")
    return value


def json_mapping(text: str) -> dict[str, Any]:
    """Parses an option that is a JSON object.

    Raises:
        argparse.ArgumentTypeError: the text is not one.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'is {text!r}, but a JSON object is expected: write for example {{"a": 1}}.')
    return value


@contextmanager
def named_as(stands_for: Mapping[str, str]) -> Iterator[None]:
    """Errors raised inside name options of a run by the flags of the tool.

    Args:
        stands_for: the engine's name -> the tool's; see `CommandLine`.

    Raises:
        UserError: as raised inside, in the tool's words.
    """
    try:
        yield
    except UserError as error:
        error.args = (in_flags(str(error), stands_for),)  # the same error: its kind decides how a command ends
        raise


def in_flags(sentence: str, stands_for: Mapping[str, str]) -> str:
    """Returns `sentence` with each name of `stands_for`, where it stands as a word, replaced by its flag."""
    # a name without a dot, trainable, may be an ordinary word of a sentence
    words = [re.escape(name) for name in stands_for if "." in name or name.startswith("--")]
    return (
        sentence
        if not words
        else re.sub(rf"(?<![\w.-])({'|'.join(words)})(?![\w-]|\.\w)", lambda match: stands_for[match[1]], sentence)
    )
