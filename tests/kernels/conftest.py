"""Kernel tests run on the GPU where there is one, and through Triton's interpreter on a CPU otherwise.

Triton decides at import, kernel by kernel, whether it interprets. So the kernels are imported here with the interpreter
switched on, and it is switched on again while a test of this folder runs; the tests of other folders see the
environment as it was.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.kernels.native import loader
from tests.kernels.comparing import INTERPRETED
from tests.kernels.kernel_names import KERNELS
from tests.kernels.launches import refuse_none_in_tuples
from tests.kernels.native_support import INSTRUCTION_SETS
from tests.kernels.resource_tables import ROOT, Cold, compile_rows


def _import_interpreted() -> None:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in KERNELS:
            importlib.import_module(f"engine.kernels.triton.{name}")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


if INTERPRETED:  # finds them imported where tests.ptx.plugin has
    _import_interpreted()


@pytest.fixture(autouse=True)
def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for the tests of Triton kernels: the folder has others. Under `tests.ptx` they are compiled."""
    if not INTERPRETED or "triton" not in request.node.nodeid:
        return
    request.getfixturevalue("new_memory_is_nan")
    if not request.config.pluginmanager.has_plugin("ptx"):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        _check_launches(monkeypatch)
        if _in_sixteen_bits(request):
            from tests.kernels.sixteen_bits import compute_as_on_a_gpu

            compute_as_on_a_gpu(monkeypatch)


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """Lets torch.empty give NaN, and the largest integer, so that what a kernel leaves unwritten is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-each", action="store_true", help="of the tests of kernels, one case of each in bfloat16, the first"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps one case of each function on each device with --one-each: what a new GPU is asked first."""
    if not config.getoption("--one-each", default=False):
        return
    seen: set[tuple[str, str]] = set()
    for item in list(items):
        name, _, case = item.nodeid.partition("[")
        device = next((one for one in ("cuda", "cpu") if f"{one}-bfloat16" in case), "")
        if not device or (name, device) in seen:
            items.remove(item)
        seen.add((name, device))


def _in_sixteen_bits(request: pytest.FixtureRequest) -> bool:
    """Tests say where they run by a parameter `place`, of device and dtype."""
    place = request.node.callspec.params.get("place") if hasattr(request.node, "callspec") else None
    return place is not None and place[1].itemsize == 2


def _check_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch of an interpreted kernel is also one that the oldest supported Triton compiles, and that a GPU's
    memory checkers would let pass."""
    from triton.runtime.interpreter import GridExecutor

    from tests.kernels.memory_checks import MemoryChecks

    launch, checks = GridExecutor.__call__, MemoryChecks(monkeypatch)

    def checked(self: GridExecutor, *arguments: object, **options: object) -> None:
        refuse_none_in_tuples(self.fn.__name__, arguments)
        checks.watch(self.fn.__name__, arguments, lambda: launch(self, *arguments, **options))

    monkeypatch.setattr(GridExecutor, "__call__", checked)


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels for one of the processor's instruction sets, each in turn."""
    monkeypatch.setattr(loader, "best_instruction_set", lambda: request.param)


@pytest.fixture(scope="session")
def cold(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cold:
    """The kernels of some cases, and the cache that they were compiled into; it was empty before."""
    cache = tmp_path_factory.mktemp("cache")
    return Cold(request.param, compile_rows(request.param, cache=cache), cache)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the slow tests of a run keep what they compile, each version of Triton under names of its own, so
    that what one has compiled for a GPU another launches."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def oldest_triton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the oldest Triton that setup.py allows, which is the one that the oldest torch brings."""
    version = re.search(r'"triton>=([\d.]+);', (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert version is not None
    folder = tmp_path_factory.mktemp("triton")
    install = ["pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"triton=={version[1]}.*"]
    done = subprocess.run([sys.executable, "-m", *install], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot install triton {version[1]}: {done.stderr.strip().splitlines()[-1]}")
    return folder
