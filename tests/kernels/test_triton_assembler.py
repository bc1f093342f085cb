"""The assembler of kernels on a Hopper GPU: the newest there is where Triton's own is older than the fixed one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.errors import UserError
from engine.hybrids.kernels import _require_assembler
from engine.kernels.triton import assembler
from engine.kernels.triton.assembler import hopper_assembler


def write_program(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a machine with a Hopper GPU, Triton's own ptxas and others beside it, of these versions of CUDA."""

    def make(own: str, *others: str, capability: tuple[int, int] = (9, 0)) -> dict[str, str]:
        paths = {}
        for version in (own, *others):
            path = tmp_path / f"ptxas-{version}"
            write_program(path, f'echo "Cuda compilation tools, release {version}, V{version}.7"')
            paths[version] = str(path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(assembler, "_own", lambda: assembler._at(paths[own]))
        monkeypatch.setattr(assembler, "_candidates", lambda: [assembler._at(paths[one]) for one in others])
        return paths

    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    hopper_assembler.cache_clear()
    yield make
    assembler.os.environ.pop("TRITON_PTXAS_PATH", None)
    hopper_assembler.cache_clear()


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        ("12.8", ("12.9", "13.0"), "13.0"), ("12.9", ("13.4", "13.0"), "13.4"), ("12.8", (), "12.8"),
        ("13.3", ("13.5",), "13.3"), ("12.9", ("12.8",), "12.9"),
    ],
)  # fmt: skip
def test_the_newest_takes_the_place_of_one_with_the_mistake(found, monkeypatch, own, others, chosen) -> None:
    paths = found(own, *others)
    one = hopper_assembler()
    assert one is not None and one.path == paths[chosen] and str(one) == f"ptxas {chosen}"
    assert assembler.os.environ.get("TRITON_PTXAS_PATH") == (None if chosen == own else paths[chosen])


def test_a_choice_in_the_environment_and_other_gpus_are_left_alone(found, monkeypatch) -> None:
    found("12.8", "13.4", capability=(8, 0))
    assert hopper_assembler() is None and "TRITON_PTXAS_PATH" not in assembler.os.environ
    hopper_assembler.cache_clear()
    paths = found("12.8", "13.4")
    monkeypatch.setenv("TRITON_PTXAS_PATH", paths["12.8"])
    one = hopper_assembler()
    assert one is not None and one.version == (12, 8)
    assert assembler.os.environ["TRITON_PTXAS_PATH"] == paths["12.8"]


def test_layers_with_states_are_refused_where_they_would_be_wrong(found) -> None:
    found("12.8", "12.9")
    with pytest.raises(UserError, match=r"ptxas 12\.9 assembled.*nvidia-cuda-nvcc>=13\.3.*kernels to reference"):
        _require_assembler()


def test_the_programs_that_are_looked_for(monkeypatch, tmp_path: Path) -> None:
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    write_program(home / "bin" / "ptxas", 'echo "Cuda compilation tools, release 13.9, V13.9.1"')
    monkeypatch.setenv("CUDA_HOME", str(home))
    versions = {one.path: one.version for one in assembler._candidates()}
    assert versions[str(home / "bin" / "ptxas")] == (13, 9)
    assert assembler.knobs.nvidia.ptxas_blackwell.path in versions
