"""Reads shell scripts and command lines without running them.

Plain values and arrays are substituted where variables are used, and the command with the most flags is
parsed. Expressions that only the shell can expand ($1, $(nproc), a variable of the environment) stay as they are
written.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from engine.errors import UserError
from engine.sentences import on_one_line
from rankfold.migrating.given import PROGRAM, PROGRAM_CODE, PROGRAM_FILE, Given, Value

UNKNOWN = "$(...)"
"""Stands for the output of a command."""
_SHOWN = 100
UNSET = "(variable)"
"""Key of a variable among a command's words that the script does not set: it may hold options."""
BRANCHES = "(branches)"
"""Key of the variables that branches of a script set to different values."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?[-=]((?:[^{}]|\$\{[^{}]*\})*))?\}|(\w+))")
_REST = re.compile(r"\$\{?[@*](?::\d+)?\}?")
"""Stands for the arguments that the user adds to a script's command."""
_ARRAY = re.compile(r"^[ \t]*(?:(?:export|local|declare|readonly)[ \t]+(?:-\w+[ \t]+)*)?(\w+)(\+?)=\(", re.MULTILINE)
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_BEFORE = ("export", "exec", "eval", "nohup", "local", "readonly", "srun", "time", "then", "else", "do")
_BRANCH, _END = ("if", "elif", "else", "case"), ("fi", "esac")
_NO_COMMANDS = (
    "echo", "rsync", "set", "cd", "source", "mkdir", "printf", "for", "while", "done", "[", "[[", *_BRANCH, *_END,
)  # fmt: skip
_PROGRAMS = (
    "trl", "axolotl", "llamafactory-cli", "lmf", "swift", "megatron", "tune", "automodel", "litgpt", "xtuner",
    "colossalai",
    "nemo",
)  # fmt: skip
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:[./][\w@]+)+)=(.*)", re.DOTALL)
"""Hydra's way to give a key."""
_OPENED, _CLOSED = re.compile(r"(?:^|[;\n])[ \t]*(?:if|case)\b"), re.compile(r"(?:^|[;\n])[ \t]*(?:fi|esac)\b")
_CASE = re.compile(r"[^()$]*\)")
"""The pattern before a branch of case."""
_FLAG = re.compile(r"--?[A-Za-z]")
_REDIRECTION = re.compile(r"(?:\d|&)?>>?(&\d?)?(.*)|<", re.DOTALL)


@dataclass(slots=True)
class _Script:
    """The state of reading a script."""

    variables: dict[str, str] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    branches: dict[str, list[str]] = field(default_factory=dict)
    depth: int = 0

    def assign(self, name: str, value: str, *, append: bool = False) -> None:
        before = self.variables.get(name)
        earlier = before or ""
        value = f"{earlier} {value}".strip() if append else value
        value = re.sub(rf"\$(?:{name}\b|\{{{name}(?:\[[@*]\])?\}})", lambda _: earlier, value) if earlier else value
        if self.depth and not value.startswith("${" + name):
            added = f"+={value.removeprefix(earlier).strip()}" if append else value
            self.branches.setdefault(name, [] if before is None else [before]).append(added)
        self.variables[name] = value


def read_shell(text: str, source: str) -> list[Given]:
    """Reads the assignments of a script and the flags of its command.

    Raises:
        UserError: a quote is not closed.
    """
    script = _Script()
    commands = _commands(_without_arrays(_plain_text(text), script), source)
    best: list[str] = []
    trainings: list[list[str]] = []
    programs: list[str] = []
    for conditional, command in commands:
        script.depth += conditional
        words = _after_assignments(command, script)
        script.depth -= conditional
        if not words or words[0] in _NO_COMMANDS:
            continue
        joined = " ".join(map(_quoted, words))
        expanded = _words(_expand(joined, script.variables, script.used), source)
        inner = [word for word in expanded if " --" in word and ".py" in word]  # the argument of bash -c
        expanded = _words(inner[0], source) if inner else expanded
        if (started := _training(expanded)) is not None and expanded not in trainings:
            trainings.append(expanded)
            programs.append(started)
        if _flags(expanded) > _flags(best):
            best = expanded
    if len(trainings) > 1:
        raise UserError(
            f"{source} starts {len(trainings)} trainings ({', '.join(programs[:3])}), each with options of its own: "
            "give the command line of one of them with --flags."
        )
    if not best:  # nothing is started, or a variable holds all of the command
        held = max(script.variables.values(), key=lambda value: value.count("--"), default="")
        best = _words(_expand(held, script.variables, script.used), source)
    given: list[Given] = []
    while best and (match := _ASSIGNMENT.fullmatch(best[0])):
        given.append(Given(source=source, key=match[1], value=plain(match[3])))
        best = best[1:]
    for name, value in script.variables.items():
        free = name not in script.used and "--" not in value and UNKNOWN not in value
        if free and name != name.lower():
            found = plain(_expand(value, script.variables, set()))
            given.append(Given(source=source, key=name, value=found, idle=name not in script.exported))
    chosen = [
        f"{name}{_last(values[-1], script.variables[name])}"
        for name, values in script.branches.items()
        if name in script.used and len({*values, script.variables[name]}) > 1
    ]
    if chosen:
        given.append(Given(source=source, key=BRANCHES, value=chosen))
    return given + read_words(best, source)


_TRAININGS = ("sft", "pt", "rlhf", "train", "pretrain", "dpo", "kto", "orpo", "cpo", "grpo")
"""Subcommands of the trainers' programs that train."""


def _last(branch: str, value: str) -> str:
    """Returns the value that a variable has in the end, or a branch's addition to it, cut to a line."""
    text = branch if branch.startswith("+=") else f"={value or '(nothing)'}"
    return on_one_line(text, most=_SHOWN)


def _training(words: list[str]) -> str | None:
    """Returns the trainer's command among the words, such as "swift sft"; None where there is none."""
    pairs = pairwise(words)
    return next(
        (f"{Path(one).name} {two}" for one, two in pairs if Path(one).name in _PROGRAMS and two in _TRAININGS), None
    )


def _flags(words: list[str]) -> int:
    """Returns how many options a command has, in twos; a program or a file counts one, so that one without options is
    found too.
    """
    options = sum(word.startswith("--") or _OVERRIDE.fullmatch(word) is not None for word in words)
    return 2 * options + any(word.endswith(".py") or word == "-m" or Path(word).name in _PROGRAMS for word in words)


def read_command(text: str, source: str) -> list[Given]:
    """Reads a command line as it would be typed: launcher, program and flags, or flags alone.

    Raises:
        UserError: a quote is not closed.
    """
    words, given = _words(_plain_text(text), source), []
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        given.append(Given(source=source, key=match[1], value=plain(match[3])))
        words = words[1:]
    return given + read_words(words, source)


def read_words(words: list[str], source: str) -> list[Given]:
    """Reads --key value, --key=value and --key, and finds the program among the words."""
    given: list[Given] = []
    words, position = _without_redirections(words), 0
    while position < len(words):
        word = words[position]
        position += 1
        if word.endswith(".py"):
            given.append(Given(source=source, key=PROGRAM, value=_program(word)))
            if _program(word) == Path(word).name:  # a command's own script says nothing
                given.append(Given(source=source, key=PROGRAM_CODE, value=word))
        elif Path(word).name in _PROGRAMS and position < len(words) and words[position].isidentifier():
            given.append(Given(source=source, key=PROGRAM, value=f"{Path(word).name} {words[position]}"))
            position += 1
        elif word.endswith((".yaml", ".yml", ".json")) and not _FLAG.match(word) and not _OVERRIDE.fullmatch(word):
            given.append(Given(source=source, key=PROGRAM_FILE, value=word))
        elif override := _OVERRIDE.fullmatch(word) or (given and _configured(given) and _ASSIGNMENT.fullmatch(word)):
            given.append(Given(source=source, key=override[1], value=plain(override[override.re.groups])))
        elif _VARIABLE.fullmatch(word):
            given.append(Given(source=source, key=UNSET, value=word))
        if word == "-m" and position < len(words) and not words[position].startswith("-"):
            given.append(Given(source=source, key=PROGRAM, value=words[position]))
            position += 1
            continue
        if not _FLAG.match(word):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        values = [value] if equals else []
        # the word after a value is another value of a list; a script ends the launcher's flags
        while not equals and position < len(words) and not _FLAG.match(words[position]):
            if words[position].endswith(".py") and (values or not name.startswith("train_script")):
                break
            if values and _VARIABLE.fullmatch(words[position]):
                given.append(Given(source=source, key=UNSET, value=words[position]))
            else:
                values.append(words[position])
            position += 1
        found: Value = True if not values else plain(values[0]) if len(values) == 1 else [*map(plain, values)]
        given.append(Given(source=source, key=name.replace("-", "_"), value=found))
    return given


def _configured(given: list[Given]) -> bool:
    """Returns whether a file has the program's options; after it, LLaMA-Factory takes KEY=VALUE."""
    return any(one.key == PROGRAM_FILE for one in given)


def _program(path: str) -> str:
    """Returns the name of a script; ms-swift's own are called as its command is."""
    parts = Path(path).parts
    if parts[-3:-1] == ("swift", "cli"):
        return f"swift {Path(path).stem}"
    return f"megatron {Path(path).stem}" if parts[-4:-1] == ("swift", "cli", "_megatron") else Path(path).name


def _without_redirections(words: list[str]) -> list[str]:
    """Returns the words without `> log.txt`, `2>&1`, "$@" and the like."""
    kept, position = [], 0
    while position < len(words):
        match = _REDIRECTION.fullmatch(words[position])
        if match is None and not _REST.fullmatch(words[position]):
            kept.append(words[position])
        elif match is None:
            pass
        elif not match[1] and not match[2]:  # its file is the next word
            position += 1
        position += 1
    return kept


def plain(text: str) -> Value:
    """Returns a number or a truth value where it is one; YAML 1.1 does not read 4e-4 as a number."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _plain_text(text: str) -> str:
    """Returns the script with each command on one line and commands' outputs unknown."""
    text = re.sub(r"\\[ \t]*(\r?\n|\Z)", " ", text)
    text = "\n".join(re.sub(r"(^|\s)#.*$", "", line) for line in text.split("\n"))
    return _without_commands(text).replace("\\ ", " ")


def _without_commands(text: str) -> str:
    """Replaces $(command), `command` and >(command) by a placeholder; $(( 1 + 2 )) becomes one word."""
    text = re.sub(r"`expr ([^`()]*)`|\$\(expr ([^()]*)\)", lambda match: f"$(({match[1] or match[2]}))", text)
    text = re.sub(r"`[^`]*`", lambda _: UNKNOWN, text)
    result, position = "", 0
    while (opening := re.compile(r"[$<>]\(").search(text, position)) is not None:
        start = opening.start()
        depth, end = 0, start + 1
        while end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
            if depth == 0:
                break
        inside = text[start:end]
        arithmetic = inside.startswith("$((") and inside.endswith("))")
        result += text[position:start] + ("".join(inside.split()) if arithmetic else UNKNOWN)
        position = end
    return result + text[position:]


def _without_arrays(text: str, script: _Script) -> str:
    """Takes `NAME=( ... )` out of the text; the words become the variable's value."""
    while match := _ARRAY.search(text):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        # quotes around several words, which are used without quotes, or around another array
        inside = re.sub(r'"(--[^"]*|\$\{\w+\[[@*]\]\})"', r"\1", text[match.end() : end - 1])
        script.depth = len(_OPENED.findall(text[: match.start()])) - len(_CLOSED.findall(text[: match.start()]))
        script.assign(match[1], " ".join(inside.split()), append=bool(match[2]))
        script.depth = 0
        text = text[: match.start()] + text[end:]
    return text


def _commands(text: str, source: str) -> list[tuple[bool, list[str]]]:
    """Returns the commands, each with whether another one, before && or ||, decides whether it runs."""
    commands: list[tuple[bool, list[str]]] = [(False, [])]
    for word in _words(text, source, keep_newlines=True):
        if word and set(word) <= set(";&|\n"):  # several of them in a row are one word, as && at a line's end
            commands.append((word.strip("\n") in ("&&", "||"), []))
        else:
            commands[-1][1].append(word)
    return commands


def _after_assignments(command: list[str], script: _Script) -> list[str]:
    """Returns the words after `export A=1 B=2`, whose assignments are kept."""
    words, exported = list(command), False
    if script.depth and words and _CASE.fullmatch(words[0]):
        words.pop(0)
    while words and (words[0] in _BEFORE or words[0] in _BRANCH or words[0] in _END):
        word = words.pop(0)
        exported |= word == "export"
        script.depth += (word in ("if", "case")) - (word in _END)
        if word in ("if", "elif", "case"):
            return []
    while words and (match := _ASSIGNMENT.fullmatch(words[0])) and not words[0].startswith("-"):
        script.assign(match[1], match[3], append=bool(match[2]))
        if exported:
            script.exported.add(match[1])
        words.pop(0)
    return words


def _words(text: str, source: str, *, keep_newlines: bool = False) -> list[str]:
    """Returns the words as a shell would split them; where asked for, ends of commands are words of their own."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n" if keep_newlines else False)
    lexer.whitespace = " \t\r" if keep_newlines else " \t\r\n"
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return ["\n" if word and set(word) <= {"\n"} else word for word in lexer]
    except ValueError as error:
        raise UserError(f"{source} cannot be taken apart ({error}): close every quote.") from None


def _expand(text: str, variables: Mapping[str, str], used: set[str], inside: frozenset[str] = frozenset()) -> str:
    """Returns `text` with the values of variables, and of variables in these; `inside` are those that it is the
    value of.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in inside:
            return match[0] if match[2] is None else _expand(match[2], variables, used, inside)
        used.add(name)
        found = variables.get(name, match[2] if match[2] is not None else match[0])
        return found if found == match[0] else _expand(found, variables, used, inside | {name})

    return _ARITHMETIC.sub(_calculated, _VARIABLE.sub(value, text))


def _calculated(match: re.Match[str]) -> str:
    """Returns the value of $(( 8 * 2 )); unknown unless it is a plain sum or product of whole numbers."""
    operators: dict[type, Callable[[int, int], int]] = {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    }  # fmt: skip

    def evaluate(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in operators:
            return operators[type(node.op)](evaluate(node.left), evaluate(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError

    try:
        return str(evaluate(ast.parse(match[1].strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return UNKNOWN


def _quoted(word: str) -> str:
    """Quotes a word where it needs quotes, so that a variable in it is still expanded."""
    if _VARIABLE.fullmatch(word):
        return word  # it may hold several words
    return shlex.quote(word) if re.search(r"[\s'\"\\()*|;&]", word) else word
