"""Reads what was given: accelerate and DeepSpeed files, command lines, shell scripts; every value becomes one `Given`.

Nothing is interpreted here. A shell script is read, not run: assignments of plain values are put in where they are
used, and the command that has the flags is taken apart.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from engine.errors import UserError
from engine.files.documents import read_text

Value = str | int | float | bool | None | list[Any]

PROGRAM = "(program)"
"""Key of the Python script that a command line starts."""

_FILE_KEYS = ("deepspeed", "deepspeed_config", "config_file", "deepspeed_config_file")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_SHELL_WORDS = ("export", "eval", "echo", "exec", "set", "cd", "source", "nohup", "if", "then", "fi", "else", "done")


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """One key and its value, as somebody wrote them.

    Args:
        source: name of the file, or "flags".
        key: with dots where it was nested; dashes of flags have become underscores.
        value: as YAML reads it; True of a flag without a value.
        file_read: it names a file, whose keys have been read.
    """

    source: str
    key: str
    value: Value
    file_read: bool = False


def read_file(path: Path) -> list[Given]:
    """All that a YAML or JSON file, or a shell script, says; files that it names beside itself are read too.

    Raises:
        UserError: it cannot be read, or is none of them.
    """
    text = read_text(path, "give an accelerate or DeepSpeed file, or a script")
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or text.startswith("#!"):
        return with_files(read_shell(text, path.name), path.parent)
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        place = f" in line {mark.line + 1}" if mark else ""
        raise UserError(f"{path} is not valid YAML or JSON{place}: mend that line, or name a script .sh.") from None
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path} has no keys, but an accelerate or DeepSpeed file is a mapping: give such a file.")
    return with_files(list(_flat(content, path.name)), path.parent)


def read_flags(text: str, source: str, folder: Path) -> list[Given]:
    """A command line as it would be typed: launcher, program and flags, or flags alone.

    Raises:
        UserError: a quote is not closed.
    """
    return with_files(_flags(_words(text, source), source), folder)


def with_files(given: list[Given], folder: Path) -> list[Given]:
    """The same, with the content of each file that it names and that is there."""
    result = []
    for one in given:
        leaf = one.key.rpartition(".")[2]
        if leaf in _FILE_KEYS and isinstance(one.value, str) and (folder / one.value).is_file():
            result += read_file(folder / one.value)
            one = replace(one, file_read=True)
        result.append(one)
    return result


def read_shell(text: str, source: str) -> list[Given]:
    """Assignments of a script and the flags of its commands."""
    variables: dict[str, str] = {}
    commands: list[list[str]] = []
    current: list[str] = []
    for word in _words(text, source, keep_newlines=True):
        if word in ("\n", ";", "&&", "|", "&"):
            commands.append(current)
            current = []
            continue
        current.append(word)
    commands.append(current)
    given: list[Given] = []
    used: set[str] = set()
    best: list[str] = []
    for command in commands:
        words = list(command)
        while words and words[0] in ("export", "exec", "eval", "nohup"):
            words.pop(0)
        while words and (match := _ASSIGNMENT.fullmatch(words[0])) and not words[0].startswith("-"):
            variables[match[1]] = _expand(match[2], variables, used)
            words.pop(0)
        if not words or words[0] in _SHELL_WORDS or words[0].startswith("#"):
            continue
        expanded = _words(_expand(" ".join(map(_quoted, words)), variables, used), source)
        if sum(word.startswith("--") for word in expanded) > sum(word.startswith("--") for word in best):
            best = expanded
    if not best:  # nothing is started, or a variable holds all of the command
        best = max((_words(value, source) for value in variables.values()), key=len, default=[])
    while best and (match := _ASSIGNMENT.fullmatch(best[0])):
        given.append(Given(source=source, key=match[1], value=_plain(match[2])))
        best = best[1:]
    flags = _flags(best, source)
    held = [name for name, value in variables.items() if name not in used and "--" not in value and "$(" not in value]
    given += [Given(source=source, key=name, value=_plain(variables[name])) for name in held]
    return given + flags


def _flags(words: list[str], source: str) -> list[Given]:
    """--key value, --key=value and --key; a Python script among the words is the program."""
    given: list[Given] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word.endswith(".py"):
            given.append(Given(source=source, key=PROGRAM, value=Path(word).name))
        if not re.match(r"--?[A-Za-z]", word):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        values = [value] if equals else []
        # `-m module` names a program, and what follows a value is another value of a list
        while not equals and position < len(words) and not re.match(r"--?[A-Za-z]", words[position]):
            if words[position].endswith(".py") and values:
                break
            if words[position].endswith(".py") and not name.startswith("train_script"):
                break
            values.append(words[position])
            position += 1
        found: Value = True if not values else _plain(values[0]) if len(values) == 1 else [*map(_plain, values)]
        given.append(Given(source=source, key=name.replace("-", "_"), value=found))
    return given


def _words(text: str, source: str, *, keep_newlines: bool = False) -> list[str]:
    """Words as a shell would split them; where asked for, ends of commands are words of their own."""
    text = re.sub(r"\\\s*\n", " ", text)
    if keep_newlines:
        text = "\n".join(_without_comment(line) for line in text.split("\n"))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n" if keep_newlines else False)
    lexer.whitespace = " \t\r" if keep_newlines else " \t\r\n"
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return ["\n" if word and set(word) <= {"\n"} else word for word in lexer]
    except ValueError as error:
        raise UserError(f"{source} cannot be taken apart ({error}): close every quote.") from None


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#.*$", "", line)


def _expand(text: str, variables: Mapping[str, str], used: set[str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        used.add(name)
        return variables.get(name, match[2] if match[2] is not None else match[0])

    return _VARIABLE.sub(value, text)


def _quoted(word: str) -> str:
    """In quotes where it needs them, so that a variable in it is still put in."""
    if _VARIABLE.fullmatch(word):
        return word  # it may hold several words
    return shlex.quote(word) if re.search(r"[\s'\"\\()*|;&]", word) else word


def _flat(content: Mapping[str, Any], source: str, prefix: str = "") -> Iterator[Given]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _flat(value, source, f"{name}.")
        else:
            yield Given(source=source, key=name, value=value)


def _plain(text: str) -> Value:
    """A number or a truth value where it is one; YAML 1.1 does not read 4e-4 as a number."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
