"""Runs the core's tests in a copy of the tree that lacks a wing: python -m tests.without_wing [WING] [pytest arguments]

A wing that nothing of the core needs can be deleted with its rows. The copy has neither the wing's folder, nor the
wings that import it, nor rows of tables that name them, nor tests that import them. It trains on text, then runs a part
of the unit tests. Without an argument the day chooses the wing.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.house.sources import FOLDERS, LATE, WINGS, Tree
from tests.house.text_run import counted_run

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "checkpoint_files", "checkpoint_saver", "checkpoint_training", "config_load", "config_patterns", "config_rules",
    "data_dataset", "data_loader", "data_packing", "models_initialise", "models_transformers", "objectives",
    "ops_attention", "ops_head_loss", "ops_linear", "optim_adamw", "optim_publish", "pipeline_validate",
)  # fmt: skip
"""Parts of tests/unit that look at the core, in about a minute."""

WHOLE_TABLES = ("tests/unit/test_objectives.py::test_every_name_has_its_parts",)
"""Tests that a table has a row for every name."""


def copy_tree(copy: Path) -> None:
    """Copies the files that git knows, or would take, and the compiled kernels."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    )
    compiled = [path.relative_to(ROOT).as_posix() for path in (ROOT / "engine").rglob("*.so")]
    for name in [*listed.stdout.decode().split("\0"), *compiled]:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def with_dependents(wing: str) -> set[str]:
    """Returns a wing, and those that cannot do without it."""
    gone = {wing}
    while more := {name for name, others in WINGS.items() if gone & {*others}} - gone:
        gone |= more
    return gone


def without_rows(text: str, gone: set[str]) -> str:
    """Returns a module's text without the entries of tables that name something of a wing."""

    def names_it(node: ast.AST) -> bool:
        texts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))
        return any(LATE.fullmatch(one) and any(one.startswith(f"{wing}.") for wing in gone) for one in texts)

    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            if key is not None and names_it(value):
                for line in range(key.lineno - 1, value.end_lineno or key.lineno):
                    lines[line] = ""
    return "".join(lines)


def remove(copy: Path, gone: set[str]) -> list[str]:
    """Removes wings, their rows, and the tests that import them; returns the files of these tests."""
    tree = Tree(copy, folders=(*FOLDERS, "tests"))
    reached = {name for name in tree.sources if tree.wing(name) in gone}
    while (
        more := {
            name
            for name, imported in tree.graph.items()
            if name.partition(".")[0] in ("tests", "rankfold") and imported & reached and name != "tests.conftest"
        }
        - reached
    ):
        reached |= more
    for wing in gone:
        shutil.rmtree(copy / wing.replace(".", "/"))
    tests = [tree.sources[name].path for name in sorted(reached) if name.startswith("tests.")]
    for path in tests:
        (copy / path).unlink()
    for source in tree.sources.values():
        if tree.is_core(source.module) and (left := without_rows(source.text, gone)) != source.text:
            (copy / source.path).write_text(left, encoding="utf-8")
    return tests


def main() -> None:
    short = {wing.rpartition(".")[2]: wing for wing in WINGS}
    parser = argparse.ArgumentParser(prog="python -m tests.without_wing", description=__doc__)
    today = [*short][datetime.date.today().toordinal() % len(short)]
    parser.add_argument("wing", nargs="?", choices=short, default=today)
    given, arguments = parser.parse_known_args()
    gone = with_dependents(short[given.wing])
    with tempfile.TemporaryDirectory(prefix="without-wing-") as folder:
        copy = Path(folder)
        copy_tree(copy)
        tests = remove(copy, gone)
        print(f"without {', '.join(sorted(gone))}, and {len(tests)} files of tests that import them", flush=True)
        counted_run(copy)
        chosen = [f"tests/unit/test_{name}.py" for name in TESTS]
        left = [path for path in chosen if (copy / path).exists()]
        data = os.environ.get("ENGINE_TEST_DATA", str(ROOT.parent / "shared" / "data"))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *left,
            *(f"--deselect={name}" for name in WHOLE_TABLES),
            *arguments,
        ]
        environment = {**os.environ, "PYTHONPATH": str(copy), "ENGINE_TEST_DATA": data}
        sys.exit(subprocess.run(command, cwd=copy, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
