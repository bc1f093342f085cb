"""`rankfold convert config`: reads the input, writes the run's YAML, and reports how each key was converted."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from engine.config.rules import check_config
from engine.errors import UserError
from engine.files.durable import write_named
from engine.files.refusals import writing
from engine.files.strict_yaml import YamlFlaw, parse_yaml
from engine.printable import printable
from engine.sentences import listed
from rankfold.migrating import launcher_rules
from rankfold.migrating.conversion import Conversion, Rule, dropped, names, other_objective
from rankfold.migrating.finish import finish
from rankfold.migrating.given import PROGRAM, PROGRAM_FILE, Given
from rankfold.migrating.reading import read_file, read_flags
from rankfold.migrating.recognition import check_known, names_objective, recognise, sources
from rankfold.migrating.shell import BRANCHES, UNSET
from rankfold.migrating.table import Trainer
from rankfold.migrating.trainers.shared import OFF


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument(
        "file", type=Path, nargs="?", help="another trainer's file (YAML or JSON), or its script .sh or .py"
    )
    parser.add_argument("--flags", default="", help="a command line, in quotes: beside a file, or alone")
    parser.add_argument(
        "--from",
        choices=sorted(sources()),
        metavar="SOURCE",
        dest="trainer",
        help=f"the trainer whose keys these are, if that is not recognised: {', '.join(sorted(sources()))}",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        dest="values",
        help="an option of the run, such as data.train=train.jsonl; may be given several times, and wins",
    )
    parser.add_argument("--ranks", type=int, help="processes of the run (default: as in the file)")
    parser.add_argument("--out", type=Path, help="YAML file to write (required)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")


def run(arguments: argparse.Namespace) -> None:
    """Converts, writes and reports.

    Raises:
        UserError: something cannot be read, or the result is not a valid configuration.
    """
    from engine.config.load import from_yaml  # imports jsonargparse, which --help needs not

    if arguments.out is not None and arguments.out.exists() and not arguments.overwrite:
        raise UserError(f"{arguments.out} is there already: give another --out, or --overwrite to replace it.")
    if arguments.ranks is not None and arguments.ranks < 1:
        raise UserError(f"--ranks is {arguments.ranks}: give at least 1 process.")
    if arguments.file is None and not arguments.flags:
        raise UserError("nothing to convert was given: name a file, or give a command line with --flags.")
    folder = arguments.file.parent if arguments.file is not None else Path()
    given = read_file(arguments.file) if arguments.file is not None else []
    given += read_flags(arguments.flags, "flags", folder)
    conversion, ranks = convert(given, values=arguments.values, ranks=arguments.ranks, source=arguments.trainer)
    if arguments.out is None:  # after the refusal of an input that is not converted
        raise UserError("--out is not given: name the YAML file to write, such as --out run.yaml.")
    source = arguments.file.name if arguments.file is not None else "a command line"
    text = to_text(conversion.options, title=f"From {source}; {_launch(arguments.out, ranks)}")
    check_config(from_yaml(text))
    with writing(arguments.out, "give another --out"):
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with write_named(arguments.out) as file:
            file.write(text)
    print(printable(report(conversion, shutil.get_terminal_size((120, 24)).columns)))
    print(f"\nwrote {arguments.out}\nstart it with: {_launch(arguments.out, ranks)}")


def convert(
    given: list[Given], *, values: list[str], ranks: int | None, source: str | None = None
) -> tuple[Conversion, int]:
    """Converts keys to options.

    Args:
        given: all keys, files before flags.
        values: "option=value", which win.
        ranks: number of processes, if given.
        source: the trainer, one of SOURCES, if given; None recognises it by the keys.

    Returns:
        The conversion, and the run's number of processes.

    Raises:
        UserError: the source is not known, its kind of training is not available, or a key has a value that it cannot
            have.
    """
    trainer = recognise(given, source)
    conversion = Conversion(trainer=trainer.name)
    # DeepSpeed's and the launcher's keys come first: some flags depend on them
    last = {one.key: one for one in given if not one.open}
    order = {id(one): place for place, one in enumerate(given)}
    for one in sorted(given, key=lambda one: launcher_rules.rule_for(one.key) is None):
        given_later = one.key in last and order[id(last[one.key])] > order[id(one)]
        if given_later and one.open:
            conversion.drop(one, f"{last[one.key].source} gives its value")
        elif not (given_later and one.idle):  # a default of the script's
            _apply(conversion, trainer, one)
    if source is None:
        check_known(conversion)
    for pair in values:
        name, equals, value = pair.partition("=")
        if not equals or not conversion.has(name):
            raise UserError(f"--set {pair} is not an option of a run: write for example --set data.train=train.jsonl.")
        try:
            parsed = parse_yaml(value)
        except YamlFlaw as flaw:
            raise UserError(f"--set {name} has a value that {flaw}, or put text in quotes.") from None
        conversion.take(Given(source="--set", key=name, value=value), name, parsed)
    for name in [name for name in conversion.options if not conversion.has(name)]:
        conversion.remove(name, f"there is no {name}")
    processes = finish(conversion, trainer, ranks)
    return conversion, processes


def _apply(conversion: Conversion, trainer: Trainer, one: Given) -> None:
    if one.key == PROGRAM:
        conversion.drop(one, "rankfold train is started")
        return
    if one.key == PROGRAM_FILE or (one.key == "config" and str(one.value).endswith((".yaml", ".yml", ".json"))):
        _require_read(one)
        conversion.drop(one, "read, and converted key by key")
        return
    if one.key == UNSET:
        conversion.drop(one, "not set in the script")
        conversion.to_fill.append(
            f"{one.value}: {one.source} does not set it; add the options that it holds with --flags"
        )
        return
    if one.key == BRANCHES:
        conversion.drop(one, "the last of the values between which the script chooses: check them")
        conversion.notes.append(f"the script chooses between values, and the last was read: {', '.join(names(one))}")
        return
    rule = _rule(trainer, one)
    if rule is None and one.key.startswith("no_") and one.value is True:  # HfArgumentParser's spelling of false
        positive = replace(one, key=one.key.removeprefix("no_"), value=False)
        one, rule = (positive, found) if (found := _rule(trainer, positive)) is not None else (one, None)
    if rule is None and not one.idle:
        rule = _environment(one.key)
    if rule is None and not one.idle:
        if names_objective(one.key) and one.value not in OFF:
            raise other_objective(one, "a key that names the objective and is not known")
        conversion.unknown(one, "check whether it matters, and set the option that it means")
    elif rule is None:
        return
    elif one.open and "objective.name" in rule.options and not str(one.value).startswith("<computed"):
        raise UserError(
            f"{one.source} gives {one.key} as {one.value}, which is only known when the script runs, but decides what "
            f"is trained: add its value with --flags '--{one.key} VALUE'."
        )
    elif one.open and "objective.name" not in rule.options:
        conversion.unresolved(one, rule.options)
    else:
        rule.apply(conversion, one)


def _rule(trainer: Trainer, one: Given) -> Rule | None:
    """Returns the rule for a key, the trainer's own or the launchers'; one for this very key comes before those for
    all keys that begin as it does.
    """
    own, launchers = trainer.rule(one.key), launcher_rules.rule_for(one.key)
    if one.value == "auto" and launchers is not None:  # DeepSpeed's auto takes the value of the trainer's own key
        return launchers
    if one.key not in trainer.rules and launchers is not None and launcher_rules.names(one.key):
        return launchers
    return own or launchers or trainer.field_of_package(one.key)


def _require_read(one: Given) -> None:
    """Refuses a file that has all of a program's options, and is missing."""
    if not one.file_read:
        raise UserError(
            f"{one.source} starts a program with the options in {one.value}, which is no file there: convert that "
            f"file, or put it where {one.source} expects it."
        )


def _environment(key: str) -> Rule | None:
    """Returns the rule for variables that a script exports, or sets in front of its command."""
    return dropped("an environment variable: set it for torchrun as well") if key == key.upper() else None


def to_text(options: dict[str, Any], *, title: str) -> str:
    """Returns the run's YAML, a section a block, in the order of the engine's options."""
    nested: dict[str, Any] = {}
    for name in sorted(options, key=lambda name: ("." in name, name)):
        section, _, leaf = name.rpartition(".")
        if section:
            nested.setdefault(section, {})[leaf] = options[name]
        else:
            nested[name] = options[name]
    return f"# {title}\n" + yaml.safe_dump(nested, sort_keys=False, allow_unicode=True)


def report(conversion: Conversion, width: int) -> str:
    """Returns the report: one line for each key, and the remaining work."""
    rows = conversion.rows
    keys = [row.given.key for row in rows]
    values = [_short(row.given.value) for row in rows]
    first = min(max(map(len, keys), default=0), 44)
    second = min(max(map(len, values), default=0), 28)
    lines: list[str | None] = []
    source = None
    for row, key, value in zip(rows, keys, values, strict=True):
        if row.given.source != source:
            source = row.given.source
            lines += ["" if lines else None, f"{source}:"]
        lines.append(_line(key, value, row.became, first, second, width))
    kinds = [row.kind for row in rows]
    counts = f"{kinds.count('taken')} taken, {kinds.count('dropped')} dropped, {kinds.count('unknown')} not known"
    lines += ["", f"read as {conversion.trainer}; {len(rows)} keys: {counts}"]
    unknown = [row.given.key for row in rows if row.kind == "unknown"]
    if unknown:
        lines.append(f"warning: not known and skipped: {listed(unknown)}")
    lines += [f"note: {sentence}" for sentence in dict.fromkeys(conversion.notes)]
    lines += [f"still to set: {sentence}" for sentence in dict.fromkeys(conversion.to_fill)]
    return "\n".join(_visible(line) for line in lines if line is not None)


def _line(key: str, value: str, became: str, first: int, second: int, width: int) -> str:
    start = f"  {key:<{first}}  {value:<{second}}  "
    if len(start) > width - 30:
        return f"{start}{became}"
    return textwrap.fill(
        became, width, initial_indent=start, subsequent_indent=" " * (first + second + 6), break_long_words=False
    )


def _visible(line: str) -> str:
    """Escapes control characters, since a foreign file may hold some that move a terminal's cursor."""
    if line.isprintable():
        return line
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in line)


def _short(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) or value is None else " ".join(str(value).split())
    return text if len(text) <= 28 else text[:25] + "..."


def _launch(out: Path, ranks: int) -> str:
    if ranks == 1:
        return f"rankfold train --config {out}"
    return f"rankfold train --nproc {ranks} --config {out}"
