"""Configuration files and option names, checked before their values are: unknown names get a suggestion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import yaml

from engine.config.checks import require
from engine.config.option_names import option_types, sections
from engine.config.suggestions import closest, meant_options
from engine.errors import UserError
from engine.files.documents import read_text
from engine.files.strict_yaml import YamlFlaw, compose_yaml

ADAPTERS, JOINED_TOKENS = "adapters", "joined_tokens"
"""Keys of a file that describes several runs over one base: the list of these, and how they share micro-batches."""


def check_argument_names(argv: Sequence[str], extra: Iterable[str]) -> set[str]:
    """Refuses options of the command line that do not exist.

    Args:
        argv: the arguments, without the program's name.
        extra: option names that are not fields of the configuration ("config").

    Returns:
        The names of those that are given.

    Raises:
        UserError: names the option and the closest one that exists.
    """
    known = {*option_types(), *extra}
    names = {argument[2:].partition("=")[0]: None for argument in argv if argument.startswith("--")}
    for name in names:
        if name not in known:
            raise UserError(f"--{name} is not an option{_suggest(name, [*option_types(), *extra], prefix='--')}")
    return {*names}


def check_file(path: str) -> set[str]:
    """As `check_text`, of a file, which may be unreadable too."""
    return check_text(read_text(path, "give the path of a YAML file after --config"), f"--config {path}")


def check_text(text: str, source: str) -> set[str]:
    """Refuses YAML text that is malformed or has keys that do not exist.

    Args:
        text: the YAML document.
        source: its name in the message, such as "--config run.yaml".

    Returns:
        The full names of the options that it sets.

    Raises:
        UserError: names the place and the fault.
    """
    try:
        node = compose_yaml(text)
    except YamlFlaw as flaw:
        raise UserError(f"{source} {flaw}.") from None
    if node is None:
        raise UserError(f"{source} is empty, but a mapping of sections is expected: write at least `model:`.")
    require(
        isinstance(node, yaml.MappingNode),
        f"{source} holds {_kind(node)}, but sections such as `model:` and `parallel:` are expected: "
        "write one section per concern.",
    )
    top = [*sections(), *(name for name in option_types() if "." not in name)]
    found = set()
    for name, value in _items(node, source):
        require(
            name not in (ADAPTERS, JOINED_TOKENS),
            f"{source} has {name}, which is for several runs over one base, and one run is expected here: only "
            "rankfold train takes such a file, as its one --config.",
        )
        if name not in top:
            raise UserError(f"{source} has the unknown key {name}{_suggest(name, [*top, *option_types()])}")
        found |= _check_section(name, value, source) if name in sections() else {name}
    return found


def _check_section(section: str, node: yaml.Node, source: str) -> set[str]:
    known = [name for name in option_types() if name.startswith(f"{section}.")]
    require(
        isinstance(node, yaml.MappingNode),
        f"{source} gives {section} {_kind(node)}, but {section} is a section: write its options below it, such as "
        f"`{known[0].partition('.')[2]}:`, or remove it.",
    )
    names = [f"{section}.{name}" for name, _ in _items(node, source)]
    for name in names:
        if name not in known:
            raise UserError(f"{source} has the unknown key {name}{_suggest(name, [*known, *option_types()])}")
    return {*names}


def _items(node: yaml.Node, source: str) -> list[tuple[str, yaml.Node]]:
    """Returns the keys and values of a mapping."""
    assert isinstance(node, yaml.MappingNode)
    items: list[tuple[str, yaml.Node]] = []
    for key, value in node.value:
        require(
            isinstance(key, yaml.ScalarNode),
            f"{source} has a key that is no name in line {key.start_mark.line + 1}: write one option a line.",
        )
        items.append((str(key.value), value))
    return items


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"the value {node.value}" if node.value else "no value"
    return "a list"


def _suggest(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Returns the end of a sentence: the name that was probably meant, or where to look."""
    section, _, leaf = name.rpartition(".")
    siblings = {option.rpartition(".")[2]: option for option in known if option.rpartition(".")[0] == section}
    same_leaf = [option for option in known if option.rpartition(".")[2] == leaf]
    if same_leaf:
        close = closest(name, same_leaf, cutoff=0.0)
    else:
        elsewhere = [option for option in meant_options(name) if option in known]
        sibling = closest(leaf, siblings, cutoff=0.6)
        close = elsewhere[0] if elsewhere else siblings[sibling] if sibling else closest(name, known, cutoff=0.8)
    return f": did you mean {prefix}{close}?" if close else ": see --help all for the options there are."
