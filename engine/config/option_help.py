"""The help of `rankfold train --help`: the options that most runs set; with a topic a section, an option, or all."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING
from pathlib import Path
from typing import Literal, get_args, get_origin

from engine.config.option_names import option_fields, option_types, sections
from engine.config.option_parser import build_parser, explanations, section_title
from engine.config.suggestions import closest, meant_options
from engine.errors import UserError

MOST_SET = (
    "model.path", "model.dtype", "model.base_dtype", "lora.rank", "lora.alpha", "lora.targets", "data.train",
    "data.validation", "data.seq_length", "optim.lr", "train.epochs", "train.steps", "train.micro_batch_size",
    "train.global_batch_size", "parallel.tensor", "memory.recompute", "checkpoint.dir",
)  # fmt: skip
"""Options that `--help` alone shows."""

_WIDTH = 110
_USAGE = """\
usage: {prog} [--config FILE] [--SECTION.OPTION VALUE ...]

Trains LoRA adapters, selected parameters, or everything. Each option can be set in the YAML file of --config,
under its section, or on the command line, which wins:

  {command} --config run.yaml --lora.rank 8 --lora.targets q_proj,v_proj
  rankfold train --nproc 2 --config run.yaml --parallel.tensor 2

The options that most runs set:
"""
_ENDING = """
--config FILE     reads options from a YAML file
--print_config    prints the resolved configuration as YAML and exits
--help SECTION    explains a section, or one option such as --help optim.lr
--help all        explains every option

sections:
"""


def help_topic(argv: Sequence[str]) -> str | None:
    """Returns the topic that a command line asks help about: "" for --help alone, None where it does not ask."""
    for position, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in ("-h", "--help"):
            following = value if equals else "".join(argv[position + 1 : position + 2])
            return "" if following.startswith("-") else following
    return None


def answer_help(argv: Sequence[str], more: Callable[[], str] | None = None) -> None:
    """Prints the help that a command line asks for and ends the program; returns where it asks for none.

    Args:
        argv: the command line.
        more: returns a further paragraph for --help alone, about options that are not a run's.

    Raises:
        SystemExit: after the help.
        UserError: there is no such topic.
    """
    if (topic := help_topic(argv)) is None:
        return
    text = help_text(topic)
    if topic == "" and more is not None:
        text += f"\n{more()}"
    with suppress(OSError):  # it need not be read to its end
        sys.stdout.write(text)
    raise SystemExit(0)


def help_text(topic: str) -> str:
    """Returns the help about a topic.

    Args:
        topic: "" for the options that most runs set, "all", a section, or the full name of an option.

    Raises:
        UserError: there is no such topic.
    """
    topic = topic.removeprefix("--")
    if topic == "":
        return _most_set()
    if topic == "all":
        return build_parser().format_help()
    names = [name for name in option_types() if topic in (name, name.rpartition(".")[0])]
    if not names:
        raise UserError(f"--help {topic} is neither a section nor an option{_hint(topic)}")
    return build_parser(names).format_help()


def _most_set() -> str:
    prog = Path(sys.argv[0]).name
    parts = [_USAGE.format(prog=prog, command=prog if " " in prog else "rankfold train")]
    for name in MOST_SET:
        sentence = re.split(r"(?<=[.;]) ", explanations()[name])[0].rstrip(".;")
        parts += [f"  --{name}{_value(name)}\n", textwrap.indent(textwrap.fill(sentence, _WIDTH - 8), "        "), "\n"]
    titles = [f"  {name:<14}{section_title(kind).partition(': ')[2]}\n" for name, kind in sections().items()]
    return "".join([*parts, _ENDING, *titles])


def _value(option: str) -> str:
    """Returns the choices for an option, and its default."""
    kind, default = option_types()[option], option_fields()[option].default
    literals = [one for one in (kind, *get_args(kind)) if get_origin(one) is Literal]
    choices = f" {'|'.join(get_args(literals[0]))}" if literals else ""
    if default is MISSING:
        return f"{choices}  (required)"
    if default is None:
        return choices
    return f"{choices}  (default {','.join(map(str, default)) if isinstance(default, tuple) else default})"


def _hint(topic: str) -> str:
    meant = [name for name in meant_options(topic) if name in option_types()]
    wide = ["all", *sections()]
    close = meant[0] if meant else closest(topic, option_types() if "." in topic else wide, cutoff=0.6)
    return f": did you mean --help {close}?" if close else f": give all, or one of {', '.join(sections())}."
