"""Turns a YAML file and the command line into a checked `RunConfig`, and that back into YAML.

The command line wins over the file, and later options over earlier ones. Every mistake is reported in one sentence.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from argparse import ArgumentError, ArgumentTypeError
from dataclasses import MISSING, asdict
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace

from engine.config.keys import ADAPTERS, check_argument_names, check_file, check_text
from engine.config.option_help import answer_help
from engine.config.option_names import option_fields, option_types, sections
from engine.config.option_parser import build_parser
from engine.config.paths import PATH_OPTIONS, at_home
from engine.config.rules import check_config, check_files
from engine.config.run import RunConfig
from engine.config.snapshots import with_snapshots
from engine.config.suggestions import closest_value
from engine.errors import UserError
from engine.files.documents import read_text
from engine.files.strict_yaml import YamlFlaw, compose_yaml
from engine.sentences import as_written


def load_config(argv: list[str] | None = None) -> RunConfig:
    """Returns the configuration of a run, checked as far as it can be without knowing the number of ranks, and with
    local folders in place of names on the Hugging Face hub.

    Args:
        argv: command-line arguments without the program's name; None takes those of the process. `--config FILE` reads
            a YAML file, `--print_config` prints the resolved YAML and exits, `--help` explains the options that most
            runs set, `--help TOPIC` a section, an option, or all.

    Raises:
        UserError: an unknown or malformed option, values that clash, or a path that does not exist.
        SystemExit: after --help or --print_config.
    """
    config = parse_config(argv)
    check_config(config)
    config = with_snapshots(config)
    check_files(config)
    return config


def parse_config(argv: list[str] | None = None) -> RunConfig:
    """As `load_config`, without the rules between sections and without looking for files.

    Raises:
        UserError: an unknown or malformed option, or a value out of its range.
        SystemExit: after --help or --print_config.
    """
    arguments = sys.argv[1:] if argv is None else argv
    answer_help(arguments)
    arguments = _split_lists(arguments)
    names = check_argument_names(arguments, ("config", "print_config"))
    for path in config_files(arguments):
        names |= check_file(path)
    parser = _parser() if "print_config" in names else _parser_of(frozenset(names))
    try:
        return _build(parser.parse_args(arguments))
    except ArgumentError as error:
        raise UserError(_sentence(str(error))) from None


def load_text(text: str, source: str, arguments: list[str]) -> RunConfig:
    """As `load_config`, of a YAML document in place of a file.

    Args:
        text: the document.
        source: its name in messages.
        arguments: command-line arguments without --config, which win over the document.

    Raises:
        UserError: as `load_config`.
    """
    arguments = _split_lists(arguments)
    names = check_argument_names(arguments, ()) | check_text(text, source)
    try:
        config = _build(_parser_of(frozenset(names)).parse_args(["--config", text, *arguments]))
    except ArgumentError as error:
        raise UserError(_sentence(str(error))) from None
    check_config(config)
    config = with_snapshots(config)
    check_files(config)
    return config


def has_adapters(arguments: list[str]) -> bool:
    """Returns whether a --config file of a command line lists several runs; False where one cannot be read."""
    for path in config_files(arguments):
        try:
            node = compose_yaml(read_text(path))
        except (UserError, YamlFlaw):
            return False  # which reading it says better
        if isinstance(node, yaml.MappingNode) and any(key.value == ADAPTERS for key, _ in node.value):
            return True
    return False


def to_yaml(config: RunConfig) -> str:
    """Returns the configuration as YAML that `from_yaml` and `--config` read back."""
    return yaml.dump(asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def from_yaml(text: str) -> RunConfig:
    """Returns the configuration written in `text`; options that are not in it keep their defaults.

    Raises:
        UserError: an unknown key, or a value of the wrong type or out of its range.
    """
    names = check_text(text, "The configuration")
    try:
        return _build(_parser_of(frozenset(names)).parse_string(text))
    except ArgumentError as error:
        raise UserError(_sentence(str(error))) from None


class _Dumper(yaml.SafeDumper):
    """Writes text that looks like a number, such as a folder named 1e3, in quotes.

    PyYAML leaves 1e3 bare, because YAML 1.1 requires a point in a number; the parser reads it as one.
    """


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="'" if _NUMBER.fullmatch(value) else None)


_NUMBER = re.compile(r"[-+]?[\d_]*\.?[\d_]*([eE][-+]?\d+)?")
_Dumper.add_representer(str, _represent_text)


_parser = cache(build_parser)


@cache
def _parser_of(names: frozenset[str]) -> ArgumentParser:
    """Returns a parser of these options and the required ones; one of all takes ten times as long for each parse."""
    required = (name for name, field in option_fields().items() if field.default is MISSING)
    return build_parser({"config", *names, *required})


def _build(values: Namespace) -> RunConfig:
    """Returns the configuration of parsed options, with defaults in place of those that the parser does not have."""
    kinds = {name: kind for name, kind in option_types().items() if name in values}
    for name in PATH_OPTIONS:
        if name in kinds:
            values[name] = _at_home(name, values[name])
    # The parser takes null for an option that was not given, so that null where a value is needed gets through it.
    for name, kind in kinds.items():
        if values[name] is None and type(None) not in get_args(kind):
            raise UserError(_wrong_type(name, "is null"))
    built = {name: kind(**values[name].as_dict()) for name, kind in sections().items() if name in values}
    plain = {name: values[name] for name in kinds if "." not in name}
    return RunConfig(**built, **plain)


def _at_home(option: str, value: Any) -> Any:
    if isinstance(value, str):
        return at_home(option, value)
    return value if value is None else tuple(at_home(option, entry) for entry in value)


def _split_lists(arguments: list[str]) -> list[str]:
    """Returns the arguments, with lists written as `a,b` for options that take lists turned into JSON."""
    lists = {f"--{name}": kind for name, kind in option_types().items() if get_origin(kind) is tuple}
    for name in _TEXTS:
        lists[f"--{name}"] = None
    result: list[str] = []
    for position, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if equals and option in lists:
            result.append(f"{option}={_as_json_list(value, lists[option])}")
        elif position and arguments[position - 1] in lists and not argument.startswith("--"):
            result.append(_as_json_list(argument, lists[arguments[position - 1]]))
        else:
            result.append(argument)
    return result


_TEXTS = ("train.sample_prompts",)
"""Lists of texts, which may contain commas: a value without brackets is one text."""


def _as_json_list(value: str, kind: Any) -> str:
    """Returns the value of an option as a list; `kind` is the option's type, None of texts."""
    # An opening bracket is a YAML or JSON list; a regular expression that starts with one has to stand in such a list.
    if value.startswith("["):
        return value
    if kind is None:
        return json.dumps([value])
    items = [item.strip() for item in value.split(",") if item.strip()]
    return json.dumps(items) if get_args(kind)[0] is str else f"[{', '.join(items)}]"


def config_files(arguments: list[str]) -> list[str]:
    """Returns the files that a command line names with --config."""
    joined = [argument.partition("=")[2] for argument in arguments if argument.startswith("--config=")]
    apart = [value for option, value in pairwise(arguments) if option == "--config"]
    return [at_home("--config", path) for path in joined + apart]


def _sentence(message: str) -> str:
    """Returns one sentence for the user from a message of the argument parser."""
    if missing := re.search(r"arguments are required: (\S+)", message):
        return f"{missing[1]} is not set, but it is required: give --{missing[1]} or set it in the --config file."
    if stray := re.search(r"[Uu]nrecognized arguments: (.*)", message):
        return f"{stray[1]!r} belongs to no option: write options as --section.name value."
    if bare := re.search(r"argument (\S+): expected one argument", message):
        name = bare[1]
        return f"{name} has no value: write {name} followed by one, or {name}=VALUE where it begins with a dash."
    key = next((name for name in re.findall(r"[\"']([\w.]+)[\"']", message) if name in option_types()), None)
    if key is None:
        return f"The configuration cannot be read: {' '.join(message.split())}"
    given = re.findall(r"(?:Got|Given) value: (.*)", message)
    if not given:
        return _wrong_type(key, "has a value that cannot be used")
    value = given[-1].strip()
    return _wrong_type(key, f"is {_as_given(value)}", value)


def _as_given(text: str) -> str:
    """Returns a value as the user wrote it, from the Python notation in the parser's message."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return repr(text)
    return as_written(value) if value is None or isinstance(value, bool | list | dict) else repr(text)


_ITEMS = {
    "data.mix": "PATH=WEIGHT", "train.sample_prompts": "texts", "rollout.rewards": "functions",
    "rollout.tools": "functions",
}  # fmt: skip
"""Names for the items of a list where they are not names of modules."""
_EXAMPLES = {
    "data.mix": "b.jsonl=0.5", "train.sample_prompts": "Once upon a time", "rollout.rewards": "rewards.py:accuracy",
    "rollout.tools": "tools.py:multiply",
    "data.chat_arguments": "{enable_thinking: false}", "optim.lr_pattern": "{down_proj: 0.0001}",
}  # fmt: skip


def _wrong_type(option: str, what: str, value: str | None = None) -> str:
    kind = option_types()[option]
    choices = list(get_args(kind)) if get_origin(kind) in (Union, UnionType) else [kind]
    expected = " or ".join(_type_name(option, choice) for choice in choices)
    return f"{option} {what}, but {expected} is expected: {_advice(option, choices[0], value)}"


def _advice(option: str, kind: Any, value: str | None) -> str:
    """Returns advice: the choice or number that was probably meant, or one that would do."""
    if get_origin(kind) is Literal and value is not None:
        bare = {"True": "on", "False": "off"}.get(value)
        if bare in get_args(kind):
            return f"write '{bare}' with its quotes, because YAML reads a bare {bare} as {value.lower()}."
        meant = closest_value(value, get_args(kind))
        return f"did you mean {meant}?" if meant else "choose one of them."
    if kind is int and value is not None:
        from engine.config.units import read_count, read_length

        try:
            return f"did you mean {read_length(value) if option == 'data.seq_length' else read_count(value)}?"
        except ArgumentTypeError:
            pass
    return f"use for example {_example(option, kind)}."


def _type_name(option: str, kind: Any) -> str:
    """Returns the name for a value of this type of an option."""
    if get_origin(kind) is Literal:
        return f"{'one of ' if len(get_args(kind)) > 1 else ''}{', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        items = {int: "whole numbers", float: "numbers"}.get(get_args(kind)[0], _ITEMS.get(option, "names"))
        many = f"a list of {items}"
        return many if get_args(kind)[-1] is Ellipsis else "a list of two numbers"
    if get_origin(kind) is dict:
        items = {int: "whole numbers", float: "numbers"}.get(get_args(kind)[1], "values")
        return f"a mapping of names to {items}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names[kind]


def _example(option: str, kind: Any) -> str:
    """Returns a value that would do: the default where there is one."""
    default: Any = option_fields()[option].default
    if get_origin(kind) is tuple:
        other = ({int: 0, float: 0.5}.get(get_args(kind)[0], _EXAMPLES.get(option, "lm_head")),)
        return f"[{', '.join(str(item) for item in default or other)}]"
    if get_origin(kind) is dict:
        return _EXAMPLES.get(option, "{down_proj: 32}")
    if kind is bool:
        return "true" if default is None else str(default).lower()
    if default in (None, MISSING):
        if get_origin(kind) is Literal:
            return str(get_args(kind)[0])
        return {int: "100", float: "1"}.get(kind, "a path in quotes")
    return str(default)
