"""The pages about commands: one for each word after `rankfold`, from the parser that reads its arguments."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from unittest.mock import patch

from rankfold.__main__ import COMMANDS
from tools.docs_site.code_names import as_code

RUN = "train"
"""The command whose arguments are options of a run."""
_INDEX = """\
# Commands

`rankfold COMMAND --help` shows the same in a terminal. A mistake in a command line is answered by one sentence, with
status 2; a command that did what was asked ends with status 0.

| command | does |
|---|---|
{rows}
"""
_LINE = re.compile(r"^(\S+=\S+ )*(rankfold|torchrun|python|bash|source|eval) ")


def command_names() -> list[str]:
    """Returns the commands in the order of the command's own help."""
    return [*COMMANDS]


@cache
def parser_of(command: str) -> argparse.ArgumentParser:
    """Returns the parser of a command other than RUN, named as on its command line."""
    with patch.object(sys, "argv", [f"rankfold {command}"]):
        parser: argparse.ArgumentParser = import_module(f"rankfold.{command}").build_parser()
    return parser


def command_pages() -> dict[str, str]:
    """Returns path on the site -> Markdown."""
    rows = "\n".join(f"| [rankfold {name}]({name}.md) | {does} |" for name, does in COMMANDS.items())
    pages = {"commands/index.md": _INDEX.format(rows=rows)}
    for name in COMMANDS:
        text = _about_run() if name == RUN else "\n".join(_parts(parser_of(name)))
        pages[f"commands/{name}.md"] = f"# rankfold {name}\n\n{text}\n"
    return pages


def command_of(code: str) -> str | None:
    """Returns the page and anchor of a command line that stands in `code`, or None for anything else."""
    words = code.split()
    if words[:1] != ["rankfold"] or len(words) < 2 or words[1] not in COMMANDS:
        return None
    page = f"commands/{words[1]}.md"
    if words[1] == RUN or len(words) < 3:
        return page
    return f"{page}#{words[2]}" if words[2] in _subcommands(parser_of(words[1])) else page


def described(text: str) -> str:
    """Returns a help text of several paragraphs as Markdown: runs of command lines become blocks of code."""
    blocks: list[tuple[bool, list[str]]] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        for line in paragraph.splitlines():
            goes_on = bool(blocks) and blocks[-1][0] and line.startswith("   ")
            is_command = goes_on or bool(_LINE.match(line))
            if not blocks or blocks[-1][0] is not is_command or line == paragraph.splitlines()[0]:
                blocks.append((is_command, []))
            blocks[-1][1].append(line)
    return "\n\n".join(
        "\n".join(f"    {line}" for line in lines) if is_command else as_code(" ".join(map(str.strip, lines)))
        for is_command, lines in blocks
    )


def _about_run() -> str:
    module = import_module(f"rankfold.{RUN}")
    return (
        f"{described(module.__doc__ or '')}\n\nIts arguments are the [options of a run](../options/index.md), by their "
        "full names, and `--config FILE`, which reads them from a file. `--print_config` prints the configuration and "
        "ends.\n"
    )


def _parts(parser: argparse.ArgumentParser, depth: int = 2) -> Iterator[str]:
    yield f"{described(parser.description or '')}\n"
    subcommands = _subcommands(parser)
    for group in parser._action_groups:
        actions = [
            one for one in group._group_actions
            if not isinstance(one, argparse._SubParsersAction | argparse._HelpAction)
            and one.help is not argparse.SUPPRESS
        ]  # fmt: skip
        if not actions:
            continue
        if group.title not in ("options", "positional arguments"):
            yield f"**{(group.title or '').capitalize()}**\n"
        yield "\n".join(_entry(parser, one) for one in actions)
    for name, one in subcommands.items():
        yield f"{'#' * depth} {name} {{ #{name} }}\n"
        yield f"`{parser.prog} {name}`\n"
        yield from _parts(one, depth + 1)
    if parser.epilog:
        yield f"{described(parser.epilog)}\n"


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _entry(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """An item of a definition list: the option as it is written, and its help."""
    formatter = parser._get_formatter()
    value = formatter._format_args(action, action.metavar or (action.dest.upper() if action.option_strings else ""))
    if not action.option_strings:
        written = value or formatter._format_args(action, action.dest)
    else:
        written = ", ".join(action.option_strings) + (f" {value}" if action.nargs != 0 else "")
    if action.choices:
        written = written.replace(str(action.metavar or action.dest.upper()), "|".join(map(str, action.choices)))
    text = as_code((action.help or "") % {**vars(action), "prog": parser.prog}) if action.help else ""
    needed = " Must be given." if action.required and action.option_strings else ""
    text = f"{text[:1].upper()}{text[1:]}".rstrip(".") + "." if text else ""
    return f"`{written}`\n:   {text}{needed}\n"
