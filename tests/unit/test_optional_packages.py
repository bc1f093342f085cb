"""Benchmarks and the model's code need no package of training's command line: images with a GPU often lack them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("jsonargparse", "docstring_parser")
START = f"""
import importlib, sys
for name in {ABSENT!r}:
    sys.modules[name] = None
"""


def _modules(folder: Path, root: Path) -> list[str]:
    return sorted(
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for path in folder.rglob("*.py")
    )


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", START + code], cwd=ROOT, capture_output=True, text=True)


def test_everything_below_training_is_imported_without_them() -> None:
    names = ["rankfold.benchmark", *_modules(ROOT / "rankfold" / "benchmarking", ROOT)]
    names += [f"engine.kernels.triton.{path.stem}" for path in (ROOT / "triton_kernels").glob("[a-z]*.py")]
    for folder in ("batch.py", "ops", "layers", "models", "optim", "quantization", "distributed", "pipeline"):
        path = ROOT / "engine" / folder
        names += [f"engine.{path.stem}"] if path.suffix else _modules(path, ROOT)
    assert len(names) > 150
    done = _run(f"for name in {names!r}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", ABSENT)
def test_the_command_line_of_training_does_need_them(name: str) -> None:
    """Otherwise the test above proves nothing: the names would be those of packages that nobody uses."""
    done = _run(f"del sys.modules[{(set(ABSENT) - {name}).pop()!r}]\nimport engine.config.load")
    assert done.returncode != 0 and f"import of {name} halted" in done.stderr
