"""Plants a mistake that interpreted tests pass into the kernels under test: -p tests.ptx.plugin -p tests.ptx.planted"""

from __future__ import annotations

import sys
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


MISTAKES = {"fused": _fuse, "tf32": _multiply_in_tf32}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --mistake."""
    parser.addoption("--mistake", choices=MISTAKES, required=True)


@pytest.hookimpl(trylast=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Plants it, when the plugin has imported the kernels."""
    MISTAKES[early_config.known_args_namespace.mistake]()
