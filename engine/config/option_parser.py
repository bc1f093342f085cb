"""The argument parser of a run: an option for each field of the sections, explained by its class's docstring."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING
from functools import cache
from inspect import getdoc
from typing import TYPE_CHECKING, Any

from docstring_parser import parse as parse_docstring

from engine.config.option_names import option_fields, option_types, sections
from engine.config.run import RunConfig

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_DESCRIPTION = """
Every option below can stand in a YAML file given with --config, in its section, and on the command line, which wins:
--config run.yaml --parallel.tensor 4 --lora.targets q_proj,v_proj. `rankfold train` takes --profile for
--log.profile_steps, --download for --hub.download true, and --reward, once for each function, for --rollout.rewards.
"""


@cache
def explanations() -> dict[str, str]:
    """Returns the full name of every option -> its entry in the Args of its class's docstring."""
    found = _args(RunConfig)
    for name, kind in sections().items():
        found |= {f"{name}.{field}": text for field, text in _args(kind).items()}
    return {name: text for name, text in found.items() if name in option_types()}


def section_title(kind: type) -> str:
    """Returns the first line of a section's docstring."""
    return (getdoc(kind) or kind.__name__).partition("\n")[0].rstrip(".")


def build_parser(names: Collection[str] | None = None) -> ArgumentParser:
    """Returns a parser of a run's options.

    Args:
        names: full names of those that it has, "config" for --config; None for all, with a description.
    """
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        exit_on_error=False,
        allow_abbrev=False,
        add_help=names is None,
        usage="%(prog)s [--config FILE] [--SECTION.OPTION VALUE ...]",
        description=_DESCRIPTION.strip() if names is None else None,
    )
    if names is None or "config" in names:
        parser.add_argument("--config", action="config", help="YAML file with any of the options below.")
    wanted = option_types() if names is None else names
    groups = {"": parser, **{name: parser.add_argument_group(section_title(kind)) for name, kind in sections().items()}}
    for name, field in option_fields().items():
        if name in wanted:
            needed: dict[str, Any] = {"required": True} if field.default is MISSING else {"default": field.default}
            text = explanations()[name].replace("%", "%%")
            groups[name.rpartition(".")[0]].add_argument(f"--{name}", type=option_types()[name], help=text, **needed)
    return parser


def _args(kind: type) -> dict[str, str]:
    """Field -> its explanation in the Args section of the class's docstring."""
    params = parse_docstring(getdoc(kind) or "").params
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}
