"""`rankfold recipe`: lists the recipes, shows one, or writes its run file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config.command_line import CommandLine
from engine.config.paths import path_text
from engine.config.units import read_length
from engine.errors import UserError
from engine.files.durable import write_named
from engine.files.refusals import shown, writing
from engine.telemetry.format import format_columns, format_parameters
from engine.telemetry.output import say
from rankfold.recipes import catalog
from rankfold.recipes.catalog import GPUS, METHODS, NODE, Plan, Recipe
from rankfold.recipes.memory_page import speed
from rankfold.recipes.run_file import LENGTHS, next_commands, text_of

_COMMANDS = ("list", "show", "write")
_MOST_GPUS = 1024


def recipe(words: Sequence[str], description: str | None = None) -> None:
    """Answers a command line.

    Raises:
        UserError: an option cannot be used, there is no such model, nothing fits, or the file is there already.
        FileError: the file cannot be written.
    """
    arguments = build_parser(description).parse_args(words)
    if arguments.command == "list":
        print("\n".join(_listed(arguments)), flush=True)
        return
    wanted = _wanted(arguments)
    if arguments.command == "write":
        _check_free(arguments.out)
    plan = _plan_of(wanted, arguments.seq_length)
    text = text_of(wanted, plan, data=arguments.data, seq_length=arguments.seq_length)
    path = Path("run.yaml")
    if arguments.command == "write":
        path = arguments.out
        with writing(path), write_named(path) as file:
            file.write(text)
        print(f"{path} is written: {plan.layout}; {plan.gib:.1f} of {wanted.gpu.memory:g} GiB predicted")
    else:
        print(text, end="", flush=True)
    for about, command in next_commands(wanted, str(path)):
        say(f"\n{about}:\n\n    {command}", sys.stdout if arguments.command == "write" else None)


class _RecipeLine(CommandLine):
    """Reads a model's name in the place of a command: with --out it is written, else shown."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(_with_command(words), namespace)


def build_parser(description: str | None) -> CommandLine:
    """Returns the parser with all options."""
    parser = _RecipeLine(description=description)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=CommandLine, help="list, show or write"
    )
    names = ", ".join(GPUS)
    lists = commands.add_parser("list", help="list the models, or the recipes of one model, GPU or number of GPUs")
    shows = commands.add_parser("show", help="print a run file")
    writes = commands.add_parser("write", help="write a run file")
    lists.add_argument("model", nargs="?", metavar="MODEL", help="a model (default: all)")
    for command in (shows, writes):
        command.add_argument("model", metavar="MODEL", help="a model of rankfold recipe list, or its name on the hub")
    for command in (lists, shows, writes):
        is_list = command is lists
        every = " (default: all)" if is_list else ""
        command.add_argument(
            "--gpu", metavar="NAME", default=None if is_list else "h100",
            help=f"kind of GPU: {names}{every or ' (default h100)'}",
        )  # fmt: skip
        command.add_argument(
            "--gpus", type=int, metavar="N", default=None if is_list else 1,
            help=f"number of GPUs{every or ' (default 1)'}",
        )  # fmt: skip
        command.add_argument(
            "--method", choices=METHODS, default=None if is_list else "sft",
            help=f"what is trained: {', '.join(METHODS)}{every or ' (default sft)'}",
        )  # fmt: skip
    for command in (shows, writes):
        command.add_argument("--data", type=path_text, metavar="FILE", help="the training data, as data.train")
        lengths = ", ".join(f"{length} for {method}" for method, length in LENGTHS.items())
        command.add_argument(
            "--seq-length", type=read_length, metavar="TOKENS", help=f"row length, as 8192 or 8k (default: {lengths})"
        )
    writes.add_argument("--out", type=Path, required=True, metavar="FILE", help="the run file")
    return parser


def _with_command(words: Sequence[str]) -> list[str]:
    """Returns the words with the command that a model's name alone stands for."""
    if not words or words[0].startswith("-") or words[0] in _COMMANDS:
        return list(words)
    writes = any(word == "--out" or word.startswith("--out=") for word in words)
    return ["write" if writes else "show", *words]


def _wanted(arguments: argparse.Namespace) -> Recipe:
    model, gpu, count = catalog.model_named(arguments.model), catalog.gpu_named(arguments.gpu), arguments.gpus
    _check_count(count)
    if arguments.seq_length is not None and arguments.seq_length < 2:
        raise UserError(f"--seq-length is {arguments.seq_length}: give at least 2 tokens.")
    return Recipe(model=model, gpu=gpu, count=count, method=arguments.method)


def _check_count(count: int) -> None:
    if not 1 <= count <= _MOST_GPUS or (count > NODE and count % NODE):
        raise UserError(
            f"--gpus is {count}, but 1 to {NODE}, or whole nodes of {NODE} up to {_MOST_GPUS}, are expected: change it."
        )


def _check_free(path: Path) -> None:
    """Refuses to replace a file, which may have been edited.

    Raises:
        UserError: there is such a file.
    """
    if path.exists():
        raise UserError(f"{shown(path)} exists: give another --out, or move it away.")


def _plan_of(wanted: Recipe, seq_length: int | None) -> Plan:
    """Returns the stored plan, or else what the planner says.

    Raises:
        UserError: nothing fits.
    """
    usual = seq_length in (None, LENGTHS[wanted.method])
    if usual and (stored := catalog.plans().get(wanted.name)) is not None:
        return stored
    if not usual or wanted.name not in {one.name for one in catalog.recipes()}:
        # imported where it is asked: the planner needs torch
        from rankfold.recipes.planning import planned

        say(f"{wanted.name} is not stored, so that it is planned now")
        if (found := planned(wanted, seq_length=seq_length)) is not None:
            return found
    raise UserError(_too_large(wanted, seq_length))


def _too_large(wanted: Recipe, seq_length: int | None) -> str:
    gpu, method = wanted.gpu, wanted.method
    what = f"{wanted.model.name} does not fit {wanted.count} x {gpu.title} with {method}, nor with a base in 4 bits"
    if seq_length is not None:
        return f"{what}: give more GPUs, or fewer tokens than --seq-length {seq_length}."
    stored = catalog.plans()
    holding = [one for one in catalog.recipes() if one.model is wanted.model and one.method == method]
    fitting = [one for one in holding if one.name in stored and one.count > wanted.count and one.gpu is gpu]
    fitting = fitting or [one for one in holding if one.name in stored]
    if not fitting:
        return f"{what}: give more or larger GPUs."
    least = min(fitting, key=lambda one: one.count)
    return f"{what}: {least.count} x {least.gpu.title} hold it (--gpu {least.gpu.name} --gpus {least.count})."


def _listed(arguments: argparse.Namespace) -> list[str]:
    if arguments.gpus is not None:
        _check_count(arguments.gpus)
    gpu = None if arguments.gpu is None else catalog.gpu_named(arguments.gpu)
    model = None if arguments.model is None else catalog.model_named(arguments.model)
    if (model, gpu, arguments.gpus, arguments.method) == (None, None, None, None):
        return _overview()
    stored = catalog.plans()
    rows: list[tuple[str, ...]] = [("recipe", "GiB", "tokens/s per GPU", "base", "layout")]
    for one in catalog.recipes():
        if (
            one.name in stored
            and model in (None, one.model)
            and gpu in (None, one.gpu)
            and arguments.gpus in (None, one.count)
            and arguments.method in (None, one.method)
        ):
            plan = stored[one.name]
            rows.append((one.name, f"{plan.gib:.1f}", speed(plan), plan.base_dtype or "bfloat16", plan.layout))
    if len(rows) == 1:
        raise UserError(
            "no stored recipe is so: rankfold recipe show plans others, rankfold recipe list has the models."
        )
    lines = format_columns([row[:4] for row in rows])
    return [f"{line}  {row[4]}" for line, row in zip(lines, rows, strict=True)]


def _overview() -> list[str]:
    stored = catalog.plans()
    rows: list[tuple[str, ...]] = [("model", "parameters", "methods", *GPUS)]
    for model in catalog.models().values():
        least = []
        for gpu in GPUS.values():
            sizes = (Recipe(model=model, gpu=gpu, count=count) for count in model.counts(gpu))
            first = next((one for one in sizes if one.name in stored), None)
            encoding = stored[first.name].base_dtype if first is not None else None
            least.append("-" if first is None else f"{first.count} {encoding}" if encoding else str(first.count))
        methods = " ".join(model.methods)
        rows.append((model.name, format_parameters(model.parameters), methods, *least))
    table = format_columns(rows)
    return [
        *table,
        "",
        "Under a GPU's name: how many of them sft takes at least, with the base in 4 bits where nf4 is said, "
        "and as its checkpoint has it where stored is.",
        "rankfold recipe list MODEL has all of a model; rankfold recipe MODEL --gpu NAME --gpus N shows a run file.",
    ]
