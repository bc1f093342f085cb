"""The tests of Triton kernels in bfloat16, on what Triton compiles of them, in a process of their own.

A sample on the code for Hopper; with -m slow all of them for each architecture:
python -m pytest -s -m slow tests/ptx/test_kernels.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ptx.plugin import ARCHITECTURES
from tests.support.sweeps import sampled

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    "test_triton_rmsnorm.py::test_backward[True-(5, 123)-cpu-bfloat16]",
    "test_triton_rope.py::test_split_and_merge[(5, 3, 1, 10)-cpu-bfloat16]",
    "test_triton_cross_entropy.py::test_one_shard[(5, 123)-cpu-bfloat16]",
    "test_triton_quantize.py::test_e4m3_is_torchs_cast[cpu-bfloat16]",
    "test_triton_partial_sums.py::test_several_sums_in_one_launch[7-cpu-bfloat16]",
    "test_triton_quantize.py::test_codes_change_no_bit_of_a_norm[4096-cpu-bfloat16]",
    "test_triton_formats.py::test_merge[int4-cpu-bfloat16]",
    "test_triton_coded_rows.py::test_rows_of_experts[mxfp4-counts1-cpu-bfloat16]",
    "test_triton_lora.py::test_project[(150, 290, 270, 24)-None-cpu-bfloat16]",
)
"""Of some kernels the cheapest test; the last multiplies by wgmma."""


def run_tests(*arguments: str, arch: int, plugins: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs pytest on what is compiled for an architecture, in the folder of the kernels' tests."""
    known = [word for name in ("tests.ptx.plugin", *plugins) for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", *known, "--ptx", str(arch), "-q", "--tb=short", "-o", "timeout=1800"]
    command += ["-m", "slow or not slow"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    folder = ROOT / "tests" / "kernels"
    found = [str(folder / one) if one.startswith("test_") else one for one in arguments]
    return subprocess.run([*command, *found], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("arch", "every"), sampled([(90, False), *[(arch, True) for arch in ARCHITECTURES]], [(90, False)])
)
def test_compiled_kernels(arch: int, every: bool) -> None:
    done = run_tests(
        *(["-k", "cpu-bfloat16 or test_triton_sampling", str(ROOT / "tests" / "kernels")] if every else QUICK),
        arch=arch,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert "passed" in summary and (every or "skipped" not in summary), summary
    if not every:
        assert re.search(rf"{len(QUICK)} passed", summary), summary
    assert f"PTX of sm_{arch}: " in done.stdout
    product = "wgmma.mma_async" if arch == 90 else "mma.sync"
    assert f"{product}." in done.stdout, f"no {product} was executed"


PLANTED = {
    "fused": (80, "test_triton_quantize.py::test_decode[shape0-nf4-cpu-float32]", "AssertionError"),
    "tf32": (80, "test_triton_lora.py::test_project[(150, 290, 270, 24)-None-cpu-float32]", "AssertionError"),
    "short tiles": (
        90,
        "test_triton_aligned.py::test_output_gradients_of_three_adapters[cpu-bfloat16]",
        "a product reads",
    ),
    "32-bit rows": (
        90,
        "test_triton_row_distances.py::test_rows_are_read_like_dense_ones[cpu-bfloat16-far-project]",
        "accesses memory at byte",
    ),
    "aligned rows": (
        80,
        "test_triton_row_distances.py::test_rows_are_read_like_dense_ones[cpu-bfloat16-odd-norm]",
        "at no multiple of 16",
    ),
    "longer vectors": (
        90,
        "test_triton_quantize.py::test_codes_change_no_bit_of_a_norm[4096-cpu-bfloat16]",
        "AssertionError: rstd",
    ),
    "atomic sums": (80, "test_triton_partial_sums.py::test_several_sums_in_one_launch[7-cpu-bfloat16]", "Fault"),
    "rounded sums": (
        80,
        "test_triton_lora.py::test_a_gradient[(150, 290, 270, 24)-None-cpu-bfloat16]",
        "AssertionError",
    ),
    "largest float": (
        80,
        "test_triton_quantize.py::test_a_row_of_the_epilogue_that_is_not_finite[cpu-bfloat16]",
        "AssertionError|assert ",
    ),
    "unwritten sums": (
        80,
        "test_triton_hybrids.py::test_state_space[a program without a chunk-cpu-float32]",
        "AssertionError",
    ),
    "one column more": (
        80,
        "test_triton_partial_sums.py::test_several_sums_in_one_launch[7-cpu-bfloat16]",
        "Fault|AssertionError",
    ),
}
"""A mistake that is planted into all kernels or one (tests.ptx.planted) -> the architecture, a test that fails with it,
and what that says."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_seen(mistake: str) -> None:
    arch, test, said = PLANTED[mistake]
    right = run_tests(test, arch=arch)
    assert right.returncode == 0 and "1 passed" in right.stdout, right.stdout[-3000:] + right.stderr[-1000:]
    wrong = run_tests(test, "--mistake", mistake, arch=arch, plugins=("tests.ptx.planted",))
    assert wrong.returncode == 1 and "1 failed" in wrong.stdout, wrong.stdout[-3000:]
    assert re.search(said, wrong.stdout), wrong.stdout[-3000:]
