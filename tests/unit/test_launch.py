"""How a process starts, where there is no launcher."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from engine.runtime import launch
from engine.runtime.launch import choose_interface, keep_kernels_on_this_node, open_file_warning, start
from engine.runtime.network import interface_towards, name_is_usable

NAME = "CUBLAS_WORKSPACE_CONFIG"
"""Without it, and before torch 2.13, torch refuses the first product of a deterministic run on a GPU."""


def test_a_deterministic_run_gets_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "")  # so that it is as before when this ends
    monkeypatch.delenv(NAME)
    start()
    assert NAME not in os.environ
    start(deterministic=True)
    assert os.environ[NAME] == ":4096:8"
    monkeypatch.setenv(NAME, ":16:8")
    start(deterministic=True)
    assert os.environ[NAME] == ":16:8", "the user's own stays"


def test_too_few_open_files_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two connections of each rank arrive at the process that holds the store."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 524288))
    assert open_file_warning(1) is None and open_file_warning(384) is None
    warning = open_file_warning(1024)
    assert warning is not None and "may open 1024 files" in warning and "ulimit -n 2304 before torchrun" in warning
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert open_file_warning(4096) is None


def _cache(monkeypatch: pytest.MonkeyPatch, nodes: int | None, own: str | None = None) -> str | None:
    """Where Triton keeps its kernels on a rank of so many machines; None for no torchrun."""
    with monkeypatch.context() as patch:
        for name, value in {
            "TRITON_CACHE_DIR": own,
            "TORCHELASTIC_RUN_ID": None if nodes is None else "x",
            "GROUP_WORLD_SIZE": None if nodes is None else str(nodes),
        }.items():
            patch.setenv(name, value or "")
            if value is None:
                patch.delenv(name)
        keep_kernels_on_this_node()
        return os.environ.get("TRITON_CACHE_DIR")


def test_kernels_of_several_machines_are_kept_on_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert _cache(monkeypatch, None) is None and _cache(monkeypatch, 1) is None and not list(tmp_path.iterdir())
    assert _cache(monkeypatch, 2, "/own") == "/own"
    folder = tmp_path / f"rankfold-triton-{os.getuid()}"
    assert _cache(monkeypatch, 2) == str(folder) and folder.stat().st_mode & 0o777 == 0o700
    assert _cache(monkeypatch, 2) == str(folder), "a restart finds them again"


def test_kernels_are_not_taken_from_a_folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"rankfold-triton-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert _cache(monkeypatch, 2) is None
    folder.rmdir()
    (tmp_path / "planted").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "planted")
    assert _cache(monkeypatch, 2) is None


@pytest.mark.skipif(shutil.which("ip") is None, reason="asks ip")
def test_the_interface_to_a_host_is_the_one_that_ip_names() -> None:
    found = json.loads(subprocess.run(["ip", "-j", "-4", "address"], capture_output=True, check=True).stdout)
    for interface in found:
        for address in interface["addr_info"]:
            own = None if interface["ifname"] == "lo" else interface["ifname"]
            assert interface_towards(address["local"], 29500) == own
    assert interface_towards("no such host.invalid", 29500) is None


@pytest.mark.parametrize(
    ("addresses", "usable"),
    [(["127.0.1.1", "::1"], False), (["127.0.0.1", "10.0.0.7"], True), (["fe80::1%eth0"], True), ([], False)],
)
def test_a_name_that_stands_for_the_loopback_is_of_no_use(
    addresses: list[str], usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(name: str, port: object, **options: object) -> list[tuple[object, ...]]:
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert name_is_usable() == usable


def _interface(monkeypatch: pytest.MonkeyPatch, *, ranks: int, usable: bool, own: str | None = None) -> str | None:
    """Which interface Gloo takes on a machine with two of so many ranks."""
    with monkeypatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", own or "")
        if own is None:
            patch.delenv("GLOO_SOCKET_IFNAME")
        for name, value in {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}.items():
            patch.setenv(name, value)
        patch.setattr(launch, "name_is_usable", lambda: usable)
        patch.setattr(launch, "interface_towards", lambda host, port: {("10.0.0.1", 29500): "net0"}[host, port])
        choose_interface(ranks)
        return os.environ.get("GLOO_SOCKET_IFNAME")


def test_machines_meet_where_their_names_do_not_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _interface(monkeypatch, ranks=4, usable=False) == "net0"
    assert _interface(monkeypatch, ranks=4, usable=True) is None
    assert _interface(monkeypatch, ranks=2, usable=False) is None
    assert _interface(monkeypatch, ranks=4, usable=False, own="net1") == "net1", "the user's own stays"
