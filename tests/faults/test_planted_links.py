"""Links that somebody planted where a command makes or deletes something: what they point at stays as it is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.file_faults import Command, Ended, Faults, Sweep, digests
from tests.faults.test_file_operations import NAMES, commands, inputs, server  # noqa: F401

pytestmark = pytest.mark.distributed

HARD = "hard link"
KINDS = (HARD, "folder", "file", "nothing")
QUICK_NAMES = ("import over", "train")


@pytest.fixture
def victims(tmp_path: Path) -> Path:
    folder = tmp_path / "victims"
    (folder / "folder" / "inside").mkdir(parents=True)
    (folder / "folder" / "inside" / "letter.txt").write_text("years of work")
    (folder / "file").write_text("more of it")
    return folder


def _plant(link: Path, victims: Path, kind: str) -> None:
    for parent in reversed(link.parents):
        if not parent.exists():
            parent.mkdir()
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    if kind == HARD:
        os.link(victims / "file", link)
    else:
        link.symlink_to(victims / kind)


def _touched(command: Command, operations: list[str]) -> Iterator[str]:
    """Paths below the folder that is watched, each once, in the order in which a command comes to them."""
    names = (operation.partition(" ")[2].removeprefix("/") for operation in operations)
    yield from dict.fromkeys(name for name in names if name and name not in command.linkable)


def _one_sentence(ended: Ended) -> bool:
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    return ended.status == 0 or (ended.status == 2 and len(errors) == 1 and "Traceback" not in ended.stderr)


def _check(sweep: Sweep, victims: Path, path: str, kind: str, *, at: int = 0) -> None:
    """Runs the command with a link at `path`; killed at an operation before, if `at` is not 0."""
    if at:
        assert sweep.run("kill", at).status == -9
    else:
        sweep.prepare()
    before = digests(victims)
    _plant(sweep.folder / path, victims, kind)
    ended = sweep.run_again()
    assert digests(victims) == before, f"{path} -> {kind}"
    assert _one_sentence(ended), f"{path} -> {kind}: status {ended.status}\n{ended.stderr}"


def _sweep(name: str, server: Faults, inputs: Path, folder: Path) -> tuple[Sweep, list[str]]:  # noqa: F811
    (folder / "work").mkdir()
    sweep = Sweep(server, commands(inputs)[name], folder / "work")
    return sweep, sweep.undisturbed()


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_some_links(name: str, server: Faults, inputs: Path, tmp_path: Path, victims: Path) -> None:  # noqa: F811
    sweep, operations = _sweep(name, server, inputs, tmp_path)
    paths = list(_touched(sweep.command, operations))
    for number, path in enumerate(paths[:: max(1, len(paths) // 3)]):
        _check(sweep, victims, path, KINDS[number % len(KINDS)])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_all_links(name: str, server: Faults, inputs: Path, tmp_path: Path, victims: Path) -> None:  # noqa: F811
    sweep, operations = _sweep(name, server, inputs, tmp_path)
    paths = list(_touched(sweep.command, operations))
    for path in paths:
        for kind in KINDS:
            _check(sweep, victims, path, kind)
    print(name, f"{len(KINDS)} kinds of links at {len(paths)} paths")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("report", "generate")])
def test_all_links_in_what_a_kill_left(
    name: str,
    server: Faults,  # noqa: F811
    inputs: Path,  # noqa: F811
    tmp_path: Path,
    victims: Path,
) -> None:
    """The next command goes on with the folder in which they are."""
    sweep, operations = _sweep(name, server, inputs, tmp_path)
    last = max(at for at, operation in enumerate(operations, 1) if operation.startswith("rename"))
    paths = list(_touched(sweep.command, operations[:last]))
    for path in paths:
        for kind in KINDS:
            _check(sweep, victims, path, kind, at=last // 2)
            _check(sweep, victims, path, kind, at=last)
    print(name, f"{len(KINDS)} kinds of links at {len(paths)} paths, each after two kills")
