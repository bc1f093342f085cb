"""The model card of an upload, joined with the card that a repository has: what people have written stays."""

from __future__ import annotations

import re
from typing import Any

import yaml

from engine.conversion.model_card import BEGIN, CARD, END, TAG
from engine.errors import UserError
from engine.files.strict_yaml import YamlFlaw, parse_yaml

_FRONT = re.compile(r"\A---[ \t]*\r?\n(?P<front>.*?)^---[ \t]*\r?\n?(?P<body>.*)\Z", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
_JOINED = ("tags", "datasets")
"""Keys of which both cards' entries are kept."""


def is_ours(card: str | None, repo: str) -> bool:
    """Returns whether a repository's card is of an earlier upload.

    Raises:
        UserError: its front matter is no YAML.
    """
    tags = [] if card is None else _split(card, repo)[0].get("tags")
    return isinstance(tags, list) and TAG in tags


def own_card(card: str | None, base: str | None, repo: str) -> str:
    """Returns the card of a folder with the tag of an upload; a short one where the folder has none.

    Args:
        card: that of the folder.
        base: of an adapter, its base; None for a model.
        repo: the name that it gets.

    Raises:
        UserError: its front matter is no YAML.
    """
    if card is None:
        of_adapter = {"base_model": base, "library_name": "peft"}
        return _written({**(of_adapter if base else {"library_name": "transformers"}), "tags": [TAG]}, f"\n# {repo}\n")
    values, _, body = _split(card, repo)
    if is_ours(card, repo):
        return card
    return _written({**values, "tags": [*_entries(values.get("tags")), TAG]}, body)


def joined_card(ours: str, theirs: str | None, repo: str) -> str:
    """Returns the card for a commit.

    Args:
        ours: that of the export.
        theirs: that of the repository; None where it has none.
        repo: its name, for messages.

    Returns:
        The repository's card with the export's section and the export's keys of the front matter in place of those of
        an earlier upload. Other keys, such as the licence, and other text stay.

    Raises:
        UserError: the front matter of the repository's card is no YAML.
    """
    if theirs is None or not theirs.strip():
        return ours
    new, our_front, our_body = _split(ours, repo)
    old, front, body = _split(theirs, repo)
    both = old | new
    for key in _JOINED:
        entries = [one for card in (old, new) for one in _entries(card.get(key))]
        if entries:
            both[key] = list(dict.fromkeys(map(str, entries)))
    if not old:
        front = our_front
    elif both != old:
        front = _dumped(both)
    begin = body.find(BEGIN)
    end = body.find(END, begin)
    found = _SECTION.search(our_body)
    if not body.strip():
        body = our_body
    elif found is not None and 0 <= begin < end:
        body = body[:begin] + found[0] + body[end + len(END) :]
    elif found is not None:
        body = f"{body.rstrip()}\n\n{found[0]}\n"
    return f"---\n{front.rstrip()}\n---\n{body}"


def _split(card: str, repo: str) -> tuple[dict[str, Any], str, str]:
    """Returns a card's front matter, parsed and as it is written, and the rest.

    Raises:
        UserError: the front matter is no YAML.
    """
    found = _FRONT.match(card)
    if found is None:
        return {}, "", card
    try:
        value = parse_yaml(found["front"])
    except YamlFlaw as flaw:
        raise UserError(f"{CARD} of {repo} {flaw}.") from None
    return value if isinstance(value, dict) else {}, found["front"], found["body"]


def _written(values: dict[str, Any], body: str) -> str:
    return f"---\n{_dumped(values)}---\n{body}"


def _dumped(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)


def _entries(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]
