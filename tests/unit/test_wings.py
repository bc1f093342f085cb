"""The core imports no wing, wings import each other as their table says, and a text run loads none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from engine.config.objective import OBJECTIVES
from tests.house.sources import WINGS, Tree, circles
from tests.house.text_run import counted_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(ROOT)


def test_the_core_imports_no_wing(tree: Tree) -> None:
    assert tree.arrows_to_wings() == []


def test_no_import_circles(tree: Tree) -> None:
    assert circles(tree.graph) == []


def test_a_text_run_loads_no_wing(tree: Tree) -> None:
    counted = counted_run(ROOT)
    loaded = counted["run"]
    assert "engine.training.trainer" in loaded
    assert [module for module in loaded if tree.wing(tree.plain(module)) is not None] == []
    assert not counted["compiler"], "the run imported torch._dynamo, for seconds at its start"


def test_wings_import_those_of_their_table(tree: Tree) -> None:
    arrows = {
        (wing, other)
        for source in tree.sources.values()
        for one in source.imports
        if (wing := tree.wing(source.module)) is not None and (other := tree.wing(one.module)) not in (None, wing)
    }
    assert arrows == {(wing, other) for wing, others in WINGS.items() for other in others}


def test_the_table_of_wings_has_no_circle() -> None:
    assert circles({wing: {*others} for wing, others in WINGS.items()}) == []


@pytest.mark.parametrize(
    ("graph", "groups"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"f"}, "f": {"e"}}, [["a", "b", "c"], ["e", "f"]]),
    ],
)
def test_circles_are_found(graph: dict[str, set[str]], groups: list[list[str]]) -> None:
    assert circles(graph) == groups


def test_late_names_name_something(tree: Tree) -> None:
    """A wrong one would be an error only where it is first needed."""
    assert [one for one in tree.late_names() if not tree.defines(*one[1].split(":"))] == []


@pytest.mark.parametrize("seam", ["BatchPart", "Front", "LayerVariant", "Observer"])
def test_a_seam_has_two_implementations(tree: Tree, seam: str) -> None:
    """Classes that are made of it, those that are only a base of others left out."""
    classes = [
        node for source in tree.sources.values() for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)
    ]
    bases = {node.name: {base.id for base in node.bases if isinstance(base, ast.Name)} for node in classes}
    below = {seam}
    while more := {name for name, above in bases.items() if above & below} - below:
        below |= more
    made = {name for name in below if not any(name in above for above in bases.values())}
    assert len(made) > 1 and seam in bases


@pytest.mark.parametrize("field", ["loss", "data", "records", "rules"])
def test_a_part_of_objectives_has_two_implementations(field: str) -> None:
    assert len({getattr(kind, field) for kind in OBJECTIVES.values()} - {None}) > 1


@pytest.mark.parametrize(
    "statement",
    [
        "from engine.vision.towers import clip",
        "def f():\n    import engine.vision.towers.clip",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..vision.towers.clip import Tower",
    ],
)
def test_an_import_of_a_wing_is_found(tmp_path: Path, statement: str) -> None:
    for module, text in {"engine/models/decoder": statement, "engine/vision/towers/clip": "class Tower: pass"}.items():
        (tmp_path / module).parent.mkdir(parents=True)
        (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
    (tmp_path / "engine/vision/towers/__init__.py").touch()
    assert Tree(tmp_path).arrows_to_wings() == [("engine/models/decoder.py", "engine.vision.towers.clip")]
