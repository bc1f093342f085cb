"""Lets the tests of Triton kernels run on the PTX of a GPU: pytest -p tests.ptx.plugin --ptx 80 tests/kernels

Triton decides at import, kernel by kernel, whether it interprets. So kernels are imported here, before any test, as
ones that are compiled, and tests are told afterwards that they are interpreted: these take tensors of the CPU.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.ptx.launching import Launches

ARCHITECTURES = (80, 89, 90)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --ptx."""
    parser.addoption("--ptx", type=int, choices=ARCHITECTURES, default=80, help="architecture to compile for")


class _Plugin:
    """Replaces launches for a run of pytest, and reports what was executed."""

    def __init__(self, arch: int) -> None:
        os.environ.pop("TRITON_INTERPRET", None)
        # what is kept here has no machine code, so that no other process may find it
        self._cache = tempfile.TemporaryDirectory()
        os.environ.setdefault("TRITON_CACHE_DIR", self._cache.name)
        self.launches = _replaced(arch)
        os.environ["TRITON_INTERPRET"] = "1"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints the opcodes that were executed, and how much of each kernel was not."""
        from tests.ptx.coverage import report

        for line in report(self.launches):
            terminalreporter.write_line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Imports the kernels, before a conftest does, and has them compiled where they are launched."""
    early_config.pluginmanager.register(_Plugin(early_config.known_args_namespace.ptx), "ptx")


def _replaced(arch: int) -> Launches:
    from tests.kernels.kernel_names import KERNELS

    for name in KERNELS:
        importlib.import_module(f"engine.kernels.triton.{name}")
    from tests.ptx.launching import Launches

    plan_for(arch)
    launches = Launches(arch)
    launches.replace()
    return launches


def plan_for(arch: int) -> None:
    """Lets launchers plan for tensors of the CPU as for those of a GPU of this architecture."""
    for module in [one for name, one in sys.modules.items() if name.startswith("engine.kernels.triton.")]:
        names: Any = vars(module)
        if "dot_options" in names:
            names["dot_options"] = _on_a_gpu(names["dot_options"])
        if "capability" in names:
            names["capability"] = lambda device: divmod(arch, 10)


def _on_a_gpu(choose: Any) -> Any:
    return lambda x: choose(SimpleNamespace(device=torch.device("cuda"), dtype=x.dtype))
