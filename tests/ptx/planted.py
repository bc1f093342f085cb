"""Plants a mistake into the kernels under test: -p tests.ptx.plugin -p tests.ptx.planted --mistake NAME

Most of them interpreted tests pass.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.ptx.launching import Launches


def _fuse() -> None:
    """Compiles as if no launch forbade to fuse products and sums."""
    launch: Any = Launches._launch

    def fused(self: Launches, kernel: Any, grid: Any, arguments: Any, options: dict[str, object]) -> None:
        launch(self, kernel, grid, arguments, {**options, "enable_fp_fusion": True})

    Launches._launch = fused  # type: ignore[method-assign]


def _multiply_in_tf32() -> None:
    """Multiplies float32 as if tf32 were exact enough."""
    for module in [one for name, one in sys.modules.items() if name.startswith("engine.kernels.triton.")]:
        names: Any = vars(module)
        if "dot_options" in names:
            names["dot_options"] = _in_tf32(names["dot_options"])


def _in_tf32(choose: Any) -> Any:
    return lambda x: {**choose(x), "PRECISION": "tf32"}


def _shorten_tiles() -> None:
    """Plans tiles of few tokens for Hopper as for other GPUs."""
    names: Any = vars(sys.modules["engine.kernels.triton.output_gradients"])
    names["multiplies_in_shared_memory"] = lambda device: False


def _edit(module: str, name: str, old: str, new: str) -> Callable[[], None]:
    """Returns what changes the text of a kernel: `old`, which is in it, becomes `new`."""

    def change() -> None:
        kernel: Any = getattr(importlib.import_module(f"engine.kernels.triton.{module}"), name)
        assert old in kernel.src, f"{module}.{name} has no {old}"
        kernel._unsafe_update_src(kernel.src.replace(old, new))

    return change


MISTAKES: dict[str, Callable[[], None]] = {
    "fused": _fuse,
    "tf32": _multiply_in_tf32,
    "short tiles": _shorten_tiles,
    "32-bit rows": _edit("lora", "_project_kernel", "tl.program_id(0).to(tl.int64)", "tl.program_id(0)"),
    "aligned rows": _edit(
        "rmsnorm",
        "_forward_kernel",
        "tl.load(x_ptr + tokens_T[:, None] * x_stride +",
        "tl.load(tl.multiple_of(x_ptr + tokens_T[:, None] * x_stride, (1, 16)) +",
    ),
    "longer vectors": _edit(
        "rmsnorm",
        "_forward_kernel",
        "tl.max_contiguous(tl.arange(0, FEATURES), 128 // x_ptr.dtype.element_ty.primitive_bitwidth)",
        "tl.arange(0, FEATURES)",
    ),
    "atomic sums": _edit(
        "partial_sums", "_sum_kernel", "    tl.store(out, total_MN,", "    tl.atomic_add(out, total_MN,"
    ),
    "rounded sums": _edit(
        "lora",
        "_a_gradient_kernel",
        "dh_TR, da_IR, input_precision=PRECISION)",
        "dh_TR, da_IR, input_precision=PRECISION).to(tl.bfloat16).to(tl.float32)",
    ),
    "largest float": _edit(
        "quantize",
        "store_row_codes",
        "tl.max(magnitude_bits(x_TF), 1)",
        "tl.max(tl.abs(x_TF), 1).to(tl.int32, bitcast=True)",
    ),
    "unwritten sums": _edit(
        "state_space", "_inputs_kernel", "    tokens_L =", "    if start >= end:\n        return\n    tokens_L ="
    ),
    "one column more": _edit(
        "partial_sums",
        "_sum_kernel",
        "columns_N < num_columns)[None, :]\n    place",
        "columns_N <= num_columns)[None, :]\n    place",
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --mistake."""
    parser.addoption("--mistake", choices=MISTAKES, required=True)


@pytest.hookimpl(trylast=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Plants it, when the plugin has imported the kernels."""
    MISTAKES[early_config.known_args_namespace.mistake]()
