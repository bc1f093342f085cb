"""What a launcher passes is what arrives at the driver, through Triton's own launcher. Needs no GPU, but a C compiler.

The newest Triton packs arguments in one function for all kernels, the oldest in C that it generates for each signature.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import pytest

from tests.kernels.resource_tables import Cold, kernels_defined, run_compiler, some_kernels

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or not (Path(sysconfig.get_path("include")) / "Python.h").exists(),
    reason="Triton builds its launcher with gcc and Python's headers",
)


def _launched(*names: str, cache: Path, packages: Path | None = None) -> dict[str, int]:
    (line,) = run_compiler("launching", *names, cache=cache, packages=packages)
    counts: dict[str, int] = json.loads(line)
    return counts


@some_kernels
@pytest.mark.timeout(1800)
def test_what_is_passed_arrives(cold: Cold) -> None:
    """Pointers, numbers, tuples of tuples, None, grid, block, shared memory and stream, of every kernel compiled."""
    cases, compiled, cache = cold
    assert set(_launched(cases, cache=cache)) == {row["kernel"] for row in compiled.rows[90]}


ROWS_ARE_SLOTS = {
    "coded_rows._coded_rows_kernel", "paged_attention._split_kernel", "paged_attention._merge_kernel",
}  # fmt: skip
"""Kernels of decoding, whose rows are the completions under way."""


def test_a_driver_takes_the_grids_of_tall_inputs() -> None:
    """And refuses them where rows lie along the second side, of which 65,535 blocks are allowed."""
    (line,) = run_compiler("tall_grids", cache=None, packages=None)
    found = json.loads(line)
    assert set(found["launched"]) == kernels_defined() - ROWS_ARE_SLOTS
    assert found["as they are"] == []
    exchanged = {one.partition(" | ")[0] for one in found["exchanged"]}
    assert exchanged > {"swiglu._forward_kernel", "rope._packed_kernel", "rows._combine_kernel", "dropout._drop_kernel"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", [("quick", "ones"), ("training",)], ids=" ".join)
def test_more_sizes(names: tuple[str, ...], cache: Path) -> None:
    assert _launched(*names, cache=cache)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_with_the_oldest_triton(oldest_triton: Path, cache: Path) -> None:
    assert _launched("quick", "ones", cache=cache, packages=oldest_triton)
