"""What is left to cut between the core and the wings: python -m tests.house --left writes it beside this file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.house.sources import Tree
from tests.house.text_run import counted_run

FILE = Path(__file__).with_name("left.json")


def imports(tree: Tree) -> list[str]:
    """Returns "file of the core: module of a wing" for each pair with an import."""
    return sorted({f"{path}: {module}" for path, module in tree.arrows_to_wings()})


def circles(tree: Tree) -> list[str]:
    return sorted(" ".join(circle) for circle in tree.circles())


def loaded(tree: Tree) -> list[str]:
    """Returns the modules of wings that a text LoRA run loads."""
    return sorted(name for name in counted_run(tree.root)["run"] if tree.wing(tree.plain(name)) is not None)


def write(tree: Tree) -> None:
    found = {"imports": imports(tree), "circles": circles(tree), "loaded": loaded(tree)}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
