"""Every kernel compiles for a Hopper GPU, without a warning, within its registers and shared memory. Needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = 227 * 1024
"""Bytes a block may have on a Hopper GPU."""
SPILLED = 16
"""Bytes of stack a thread may use: the assembler spills two registers of a small kernel to fit more of its threads."""


def _compiled(*names: str) -> list[dict[str, object]]:
    """What `tests.kernels.compiling` prints, from a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiling", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _kernels_defined() -> set[str]:
    """Names of all kernels that have a launcher: those called _..._kernel."""
    found = set()
    for path in (ROOT / "triton_kernels").glob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("def _") and "_kernel(" in line:
                found.add(f"triton_kernels.{path.stem}.{line[4 : line.index('(')]}")
    return found


@pytest.mark.timeout(600)
def test_bf16_kernels_compile_and_do_not_spill() -> None:
    compiled = _compiled("bfloat16")
    assert {line["kernel"] for line in compiled} == _kernels_defined()
    assert [line for line in compiled if line["stack"] > SPILLED] == []
    assert [line for line in compiled if line["shared"] > SHARED_MEMORY] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["float32", "float16", "all"])
def test_other_dtypes_and_sizes_compile(name: str) -> None:
    compiled = _compiled(name)
    assert compiled
    assert [line for line in compiled if line["shared"] > SHARED_MEMORY] == []
