"""Imports go strictly downward: each folder has a level, and may import only lower ones and itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.sources import WINGS

ROOT = Path(__file__).resolve().parents[2]

LEVELS = {
    "engine": 0,
    "engine.errors": 0,
    "engine.kernels": 1,
    "engine.choices": 1,
    "engine.files": 1,
    "engine.foreign": 1,
    "engine.printable": 1,
    "engine.seams": 1,
    "engine.sentences": 1,
    "engine.size_limits": 1,
    "engine.zigzag": 1,
    "engine.branches": 1,
    "engine.spans": 1,
    "engine.config": 1,
    "engine.telemetry": 1,
    "engine.batch": 2,
    "engine.document_levels": 2,
    "engine.distributed": 2,
    "engine.quantization": 2,
    "engine.ops": 3,
    "engine.layers": 4,
    "engine.models": 5,
    "engine.pipeline": 5,
    "engine.optim": 5,
    "engine.data": 5,
    "engine.checkpoint": 6,
    "engine.objectives": 6,
    "engine.planning": 6,
    "engine.inference": 6,
    "engine.conversion": 7,
    "engine.runtime": 7,
    "engine.hub": 8,
    "engine.vision": 8,
    "engine.experts": 9,
    "engine.adopted": 9,
    "engine.hybrids": 10,
    "engine.gemma4": 10,
    "engine.training": 8,
    "engine.preferences": 10,
    "engine.judges": 11,
    "engine.distillation": 9,
    "engine.rollouts": 10,
    "engine.tenants": 10,
    "engine.api": 10,
    "rankfold": 12,
    "tools": 13,
    "examples": 14,
    "tests": 15,
}
FOR_ALL = (
    "engine.errors", "engine.batch", "engine.choices", "engine.files", "engine.foreign", "engine.printable",
    "engine.seams", "engine.sentences", "engine.zigzag", "engine.branches", "engine.spans",
    "engine.document_levels",
)  # fmt: skip
"""Records and helpers that every part of the engine may name, also on their own level."""

SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("engine", "triton_kernels", "rankfold", "tools", "examples")
    for path in (ROOT / folder).rglob("*.py")
)


def unit_of(module: str) -> str | None:
    """The folder or file with a level that holds `module`; None for what is not ours."""
    parts = module.split(".")
    if parts[0] == "engine":
        return ".".join(parts[:2])
    return parts[0] if parts[0] in LEVELS else None


def imported_modules(source: str, module: str, is_package: bool) -> list[str]:
    """Full names of all modules that `source` imports anywhere, relative imports resolved."""
    names: list[str] = []
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            # `from engine import config` names the folder in its list.
            names += [f"{name}.{alias.name}" for alias in node.names] if name in ("", "engine") else [name]
    return names


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of `module`."""
    unit = unit_of(module)
    if unit not in LEVELS and module != "engine":
        return [f"{unit} has no level: give it one"]
    found = []
    for name in imported_modules(source, module, is_package):
        target = unit_of(name)
        if target is None or target == unit or (target in WINGS and unit not in ("engine", *WINGS)):
            continue
        if target not in LEVELS:
            found.append(f"{module} imports {name}, which has no level")
        elif module == "engine":
            found.append(f"engine/__init__.py imports {name}, but it is loaded before everything")
        elif LEVELS[target] > LEVELS[unit]:
            found.append(f"{module} imports {name} from a higher level")
        elif LEVELS[target] == LEVELS[unit] and target not in FOR_ALL:
            found.append(f"{module} imports {name} from its own level")
    return found


@pytest.mark.parametrize("path", SOURCES)
def test_imports_go_downward(path: str) -> None:
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    module = module.replace("triton_kernels", "engine.kernels.triton")
    source = (ROOT / path).read_text(encoding="utf-8")
    assert not faults(source, module, path.endswith("__init__.py"))


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("engine.ops.norm", "from engine.layers.linear import Linear", "higher level"),
        ("engine.models.decoder", "import engine.data.loader", "its own level"),
        ("engine.models.decoder", "def f():\n    from ..optim import adamw", "its own level"),
        ("engine.config.load", "from engine import telemetry", "its own level"),
        ("engine.training.trainer", "from rankfold import convert", "higher level"),
        ("engine.data.loader", "from tests.helpers import spawn", "higher level"),
        ("engine.kernels.philox", "from engine.ops.norm import rms_norm", "higher level"),
        ("engine.errors", "import engine.config", "higher level"),
        ("engine.novelty.thing", "import os", "no level"),
        ("engine", "import engine.batch", "before everything"),
    ],
)
def test_an_upward_import_is_found(module: str, source: str, words: str) -> None:
    assert [words in fault for fault in faults(source, module)] == [True]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.training.trainer", "from engine.config import RunConfig\nimport torch, engine.optim.adamw"),
        ("engine.config.load", "from engine.errors import UserError\nfrom engine.config.run import RunConfig"),
        ("engine.layers.linear", "from engine.batch import Batch\nfrom .module import Module"),
        ("rankfold.convert", "from engine.checkpoint import store"),
    ],
)
def test_downward_imports_pass(module: str, source: str) -> None:
    assert faults(source, module) == []


KERNELS = {
    "triton_kernels": {"torch", "triton", "engine.kernels"},
    "engine/kernels/native": {"torch", "numpy", "engine.kernels", "engine.errors"},
    "engine/kernels": {"torch", "numpy", "engine.kernels"},
}


@pytest.mark.parametrize("path", [path for path in SOURCES if path.startswith(tuple(KERNELS))])
def test_kernels_need_torch_and_triton_only(path: str) -> None:
    allowed = next(names for folder, names in KERNELS.items() if path.startswith(folder))
    source = (ROOT / path).read_text(encoding="utf-8")
    names = imported_modules(source, path.replace("/", "."), False)
    tops = {unit_of(name) or name.partition(".")[0] for name in names}
    assert tops - set(sys.stdlib_module_names) <= {*allowed, ""}


@pytest.mark.parametrize(
    "package",
    [
        "engine.config.load", "engine.config.rules", "engine.telemetry.errors", "engine.telemetry.trackers",
        "engine.telemetry.progress", "engine.training.reports.run_metrics", "engine.errors", "engine.files.refusals",
        "engine.files.durable",
    ],
)  # fmt: skip
def test_quick_to_import(package: str) -> None:
    """A refusal and --help must not wait for torch."""
    code = f"import sys, {package}; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("words", [(), ("train",), ("convert",), ("generate",), ("plan",)], ids=" ".join)
def test_help_reads_no_more_than_it_shows(words: tuple[str, ...]) -> None:
    """The parser of a run's options and the tables of other trainers take longer to import than all of the help."""
    code = (
        "import atexit, runpy, sys; slow = ('torch', 'numpy', 'jsonargparse', 'rankfold.migrating')\n"
        "atexit.register(lambda: print([name for name in slow if name in sys.modules], file=sys.stderr))\n"
        f"sys.argv = ['rankfold', *{words!r}, '--help']; runpy.run_module('rankfold', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"


def test_no_path_of_one_machine() -> None:
    """Nothing in the tree may depend on where one person keeps it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"(?<![\w.:/])/(?:home|root|work|Users)/\w")
    found = [
        name
        for name in listed.stdout.split("\0")
        if (ROOT / name).suffix in (".py", ".sh", ".md", ".toml", ".txt", ".yaml", ".cpp", ".h")
        and (ROOT / name).is_file()
        and pattern.search((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert found == []
