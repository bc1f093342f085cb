"""Prints the counts of the house as a table: python -m tests.house [TREE] [--moves FILE] [--json]

Beside each figure stands what the design of core and wings aims at. A row whose subject a tree does not have shows "-".
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.house.sources import WINGS, Source, Tree, circles
from tests.house.text_run import counted_run
from tests.house.walks import REPORTING, walk

ROOT = Path(__file__).resolve().parents[2]
Row = tuple[str, Any, str]
"""A figure's name, its value, and the aim."""

WALKS = {
    "file to rows": ("build_data", "config", "all branches"),
    "LoRA weight": ("build_training", "plan", "28 / 17 by hand; aim 20 / 13"),
    "import checkpoint": ("import_checkpoint", "source", "78 / 35 by hand; aim 40 / 20"),
}
"""Function and parameter that a walk follows, and what a reader who takes one branch counted before."""
REPORTING_PATHS = tuple(name.replace(".", "/") for name in REPORTING)
MENTIONS = {
    "cross attention": (r"cross[\s_-]?(attention|vision|image|picture)", "9"),
    "bidirectional": ("bidirectional", "7"),
    "DeepStack": (r"deep[\s_-]?stack", "3"),
}
FIELDS = {"DecoderConfig": "29", "Batch": "9", "TokenContext": "12"}
FAN_OUTS = {"training/build.py": "build_training", "training/prepare.py": "prepare", "training/data.py": "build_data"}
EXAMPLES = {
    "objective with its own data (kto)": (r"\bkto|_kto|Kto|KTO", "4"),
    "vision family (internvl)": (r"intern_?vl", "4"),
    "option (overlong_buffer)": (r"overlong_buffer", "2"),
    "kernel (head_norm)": (r"head_norm|HeadNorm", "3 + 1 test"),
}
"""Words that tell an addition of each kind: files with one are those that adding the like touches, tables of other
trainers' options aside."""


def text_run(tree: Tree) -> Iterator[Row]:
    """Counts the modules that a run of two steps and importing the trainer load, and functions that the run calls."""
    counted = counted_run(tree.root)
    lines = {source.path: source.num_lines for source in tree.sources.values()}
    for title, key, aim in (("text LoRA run", "run", "330 / 45k"), ("import of the trainer", "trainer", "-")):
        paths = counted[key].values()
        yield f"{title}: modules / lines", f"{len(paths)} / {sum(lines[path] for path in paths):,}", aim
    rooms: dict[str, list[int]] = {}
    for path in counted["run"].values():
        room = "/".join(path.split("/")[:2]) if path.count("/") > 1 else path.partition("/")[0]
        rooms.setdefault(room, []).append(lines[path])
    for room, each in sorted(rooms.items(), key=lambda item: -sum(item[1])):
        yield f"  {room}", f"{len(each)} / {sum(each):,}", ""
    own = {source.path: source.module for source in tree.sources.values()}
    wings = [wing for path in counted["run"].values() if (wing := tree.wing(own[path])) is not None]
    yield "modules of wings in a text run", len(wings), "0"
    yield from ((f"  {wing}", wings.count(wing), "") for wing in WINGS if wing in wings)
    yield "decoders constructed in a start", counted["decoders"], "4"
    executed = [name for name in counted["rows"] if not name.startswith(REPORTING_PATHS)]
    files = {name.partition(":")[0] for name in executed}
    yield "file to rows: functions executed / files", f"{len(executed)} / {len(files)}", "98 / 41 by hand; aim 35 / 16"


def arrows(tree: Tree) -> Iterator[Row]:
    """Counts imports of wings by the core, circles, and imports that go up."""
    found = tree.arrows_to_wings()
    yield "core to wing imports (files)", f"{len(found)} ({len({path for path, _ in found})})", "0"
    for wing in WINGS:
        if each := [path for path, module in found if tree.wing(module) == wing]:
            yield f"  {wing}", f"{len(each)} ({len(set(each))})", ""
    core = {source.path for source in tree.sources.values() if tree.is_core(source.module)}
    late = [name for path, name in tree.late_names() if path in core and tree.wing(name.partition(":")[0])]
    code = [
        call.args[0].value
        for source in tree.sources.values()
        for call in ast.walk(source.tree)
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "resolve"
        and isinstance(call.args[0], ast.Constant)
    ]
    yield "names of wings in the core, resolved late", len(late), "-"
    yield "  in code rather than in tables", sum(name in code for name in late), ""
    groups = circles(tree.graph)
    yield "import circles", len(groups), "0"
    for circle in groups:
        yield "  " + " ".join(name.rpartition(".")[2] for name in circle), "", circle[0]
    yield "imports that run up", _upward(tree), "0"


def _upward(tree: Tree) -> int | None:
    """Counts by the table of the tree's own test of layers; imports of wings are counted elsewhere."""
    file = tree.root / "tests/unit/test_layering.py"
    assigned = ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else []
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in assigned
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("LEVELS", "FOR_ALL")
    }
    if len(tables) < 2:
        return None
    levels: dict[str, int] = tables["LEVELS"]

    def unit(module: str) -> str:
        module = module.replace("triton_kernels", "engine.kernels.triton")
        return ".".join(module.split(".")[: 2 if module.startswith("engine.") else 1])

    pairs = (
        (unit(name), unit(target)) for name, found in tree.graph.items() for target in found if not tree.wing(target)
    )
    return sum(
        levels[above] > levels[below]
        or (levels[above] == levels[below] and above != below and above not in tables["FOR_ALL"])
        for below, above in pairs
    )


def walks(tree: Tree) -> Iterator[Row]:
    for title, (start, parameter, aim) in WALKS.items():
        found = walk(tree, start, parameter)
        yield f"walk {title}: functions / files", found and f"{len(found.visits)} / {found.rooms}", aim


def words(tree: Tree) -> Iterator[Row]:
    """Counts files by what they name."""
    for title, (word, aim) in MENTIONS.items():
        pattern = re.compile(word, re.IGNORECASE)
        yield f"files that mention {title}", sum(_names(source, pattern) for source in tree.sources.values()), aim
    for title, (word, aim) in EXAMPLES.items():
        pattern = re.compile(word)
        outside = [
            path for path in (tree.root / "csrc").glob("*.cpp") if pattern.search(path.read_text(encoding="utf-8"))
        ]
        own = [source for source in tree.sources.values() if tree.wing(source.module) != "rankfold.migrating"]
        count = sum(_names(source, pattern) for source in own) + len(outside)
        yield f"files that name one {title}", count, aim


def _names(source: Source, pattern: re.Pattern[str]) -> bool:
    return pattern.search(source.text) is not None or pattern.search(source.path) is not None


def sizes(tree: Tree) -> Iterator[Row]:
    """Counts fields, fan-outs and lines."""
    for name, aim in FIELDS.items():
        source = tree.find(name)
        node = source.definitions[name] if source is not None else ast.Module([], [])
        fields = sum(isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.dump(one.annotation) for one in node.body)
        yield f"fields of {name}", fields if source else None, aim
    for title, name in FAN_OUTS.items():
        source = tree.find(name, "engine.training") or tree.find(name)
        yield f"modules imported by {title}", source and len(tree.graph[source.module]), "22"
    sources = tree.sources.values()
    yield "product lines", f"{sum(source.num_lines for source in sources):,}", "92,000"
    engine = sum(source.num_lines for source in sources if source.path.startswith("engine/"))
    yield "engine lines", f"{engine:,}", "70,500"
    yield "core lines", f"{sum(source.num_lines for source in sources if tree.is_core(source.module)):,}", "-"
    page = tree.root / "ARCHITECTURE.md"
    yield "ARCHITECTURE lines", page.read_text(encoding="utf-8").count("\n") if page.exists() else None, "250"
    longest = max(sources, key=lambda source: source.num_lines)
    yield "longest file", longest.num_lines, f"600 ({longest.path})"
    lines, name = max(
        ((node.end_lineno or 0) - node.lineno + 1, f"{source.path}:{node.name}")
        for source in sources
        for node in source.functions()
    )
    yield "longest function", lines, f"80 ({name})"


SECTIONS: tuple[Callable[[Tree], Iterator[Row]], ...] = (text_run, arrows, walks, words, sizes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description="Counts of the house.")
    parser.add_argument("tree", nargs="?", type=Path, default=ROOT, help="checkout to count, this one by default")
    parser.add_argument(
        "--moves", type=Path, help='JSON {"old.module": "new.module"}, for a tree before wings had folders'
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--walk", choices=[start for start, _, _ in WALKS.values()], help="list a walk's functions instead"
    )
    given = parser.parse_args()
    moves = json.loads(given.moves.read_text(encoding="utf-8")) if given.moves else {}
    tree = Tree(given.tree.resolve(), moves)
    if given.walk is not None:
        parameter = next(name for start, name, _ in WALKS.values() if start == given.walk)
        found = walk(tree, given.walk, parameter)
        print("\n".join(found.visits if found else ["-"]))
        return
    rows = [row for section in SECTIONS for row in section(tree)]
    if given.json:
        print(json.dumps({title.strip(): value for title, value, _ in rows}, indent=1))
        return
    width = max(len(title) for title, _, _ in rows)
    for title, value, aim in rows:
        print(f"{title:{width}}  {'-' if value is None else value!s:>14}  {aim}".rstrip())


if __name__ == "__main__":
    main()
