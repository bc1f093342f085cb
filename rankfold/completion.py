"""Prints the script by which a shell completes commands, options, choices and files at TAB.

rankfold completion bash > ~/.local/share/bash-completion/completions/rankfold
rankfold completion zsh > ~/.zfunc/_rankfold
rankfold completion fish > ~/.config/fish/completions/rankfold.fish

It needs shtab: pip install 'rankfold[completion]'. Without the package bash-completion, add a line to ~/.bashrc that
sources the file. For zsh, ~/.zshrc needs fpath=(~/.zfunc $fpath) before compinit. The script holds everything that it
completes, so no Python starts at TAB; print it again after an update.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from engine.config.command_line import CommandLine
from engine.config.paths import PATH_OPTIONS, path, path_text
from engine.errors import UserError
from rankfold.__main__ import COMMANDS
from rankfold.starting.options import add_start_options

SHELLS = ("bash", "zsh", "fish")
RUN, LAUNCH = "train", "launch"
"""The commands that take the options of a run."""

_DIVIDED = """
# bash divides --option=VALUE at the "=": the function above sees --option VALUE.
_rankfold_completion() {
  local -a words=()
  local word last=
  for word in "${COMP_WORDS[@]:0:COMP_CWORD + 1}"; do
    [[ $word == "=" && $last == --* ]] || words+=("$word")
    last=$word
  done
  [[ ${COMP_WORDS[COMP_CWORD]} != "=" ]] || words+=("")
  local -a COMP_WORDS=("${words[@]}")
  local COMP_CWORD=$((${#words[@]} - 1))
  _shtab_rankfold
}
complete -o bashdefault -F _rankfold_completion rankfold
"""
_FISH_FILES = "(__fish_complete_path (string replace -r -- '^--[^=]*=' '' (commandline -ct)))"
"""Files, behind an option's "=" too."""


def build_parser() -> CommandLine:
    """Returns the parser with its one argument."""
    parser = CommandLine(description=__doc__)
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")
    return parser


def main() -> None:
    shell = build_parser().parse_args().shell
    if find_spec("shtab") is None:
        raise UserError(
            "rankfold completion needs shtab, which is not installed: pip install 'rankfold[completion]', or "
            "pip install shtab."
        )
    print(script(shell))


def script(shell: str) -> str:
    """Returns the script for a shell.

    Args:
        shell: one of SHELLS.
    """
    import shtab

    parser = described_parser()
    for action in _actions(parser):
        if action.type in (Path, path, path_text) or action.dest in PATH_OPTIONS:
            action.complete = {**shtab.FILE, "fish": _FISH_FILES}  # type: ignore[attr-defined]
        if shell == "zsh" and action.nargs is None:  # by this zsh knows that --option=VALUE is the same
            action.option_strings = [f"{name}=" if name.startswith("--") else name for name in action.option_strings]
    text: str = shtab.complete(parser, shell)
    return text + _DIVIDED if shell == "bash" else text


def described_parser() -> CommandLine:
    """Returns one parser of all commands, with the options of a run where a command takes them. It only describes:
    each command parses by its own."""
    parser = CommandLine(prog="rankfold")
    parser.add_argument("--version", action="version", version="", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, does in COMMANDS.items():
        module = import_module(f"rankfold.{name}")
        parents = [] if name == RUN else [module.build_parser()]
        command = commands.add_parser(name, help=does, parents=parents, add_help=False)
        if name == RUN:
            _add_short_options(command)
            add_start_options(command)
        if name in (RUN, LAUNCH):
            _add_run_options(command)
    return parser


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _actions(one)
        else:
            yield action


def _add_short_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `rankfold train` takes beside the options of a run."""
    from engine.config.option_names import sections

    parser.add_argument(
        "-h", "--help", nargs="?", choices=("all", *sections()), help="explain the options, a section, or one option"
    )
    parser.add_argument("--config", type=Path, help="YAML file with options")
    parser.add_argument("--print_config", action="store_true", help="print the configuration as YAML and exit")
    parser.add_argument("--profile", help="trace these steps, as --log.profile_steps")
    parser.add_argument("--download", action="store_true", help="download what is named on the hub")
    parser.add_argument("--reward", action="append", type=Path, help="a reward function, as FILE.py:NAME")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    from engine.config.option_names import option_types
    from engine.config.option_parser import explanations

    for name, kind in option_types().items():
        text = explanations()[name].partition(". ")[0].replace("%", "%%")
        parser.add_argument(f"--{name}", dest=name, choices=_words(kind) or None, help=text)


def _words(kind: Any) -> tuple[str, ...]:
    """Returns the words that a value of a type may be: names and switches, no numbers."""
    if kind is bool:
        return ("true", "false")
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    if get_origin(kind) in (None, tuple, list, dict) or NoneType is kind:
        return ()
    return tuple(dict.fromkeys(word for one in get_args(kind) for word in _words(one)))
