"""A folder that is made in a hidden sibling: what others planted, and what a kill left at each place."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from engine.errors import UserError
from engine.files import platforms
from engine.files import staging as staging_module
from engine.files.holder import Holder
from engine.files.refusals import FileError
from engine.files.staging import move_into_place, partial_folder, staged_folder


class Killed(BaseException):
    """Stands for the end of the process: nothing is tidied up behind it."""


def allow() -> None:
    """Anything may be replaced."""


def make(out: Path, text: str = "new", plan: str | None = "plan") -> None:
    with staged_folder(out, check=allow, plan=plan) as folder:
        (folder / "config.json").write_text(text)


def _old(out: Path) -> None:
    out.mkdir()
    (out / "config.json").write_text("old")
    (out / "old.json").write_text("old")


def _only(out: Path, text: str = "new") -> None:
    assert list(out.parent.iterdir()) == [out] and [path.name for path in out.iterdir()] == ["config.json"]
    assert (out / "config.json").read_text() == text


@pytest.mark.parametrize("swaps", [True, False])
def test_replacing(swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not swaps:
        monkeypatch.setattr(staging_module, "_renameat2", lambda: None)
    out = tmp_path / "out"
    _old(out)
    make(out)
    _only(out)


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("place", range(4))
def test_killed_while_replacing(swaps: bool, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before or after each rename: `out` is old or new, or gets its name back, and the next command leaves nothing."""
    if not swaps:
        monkeypatch.setattr(staging_module, "_renameat2", lambda: None)
    out, made, rename, exchange = tmp_path / "out", 0, os.rename, staging_module._exchange

    def step(work, *arguments):
        nonlocal made
        if made == place:
            raise Killed
        done = work(*arguments)
        made += 1
        return done

    _old(out)
    folder = tmp_path / ".out.partial"
    folder.mkdir()
    (folder / "config.json").write_text("new")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *arguments: step(rename, *arguments))
        if swaps:
            patch.setattr(staging_module, "_exchange", lambda *arguments: step(exchange, *arguments))
        patch.setattr(staging_module, "delete_folder", lambda path: step(lambda: None) if made > 1 else None)
        try:
            move_into_place(folder, out)
        except Killed:
            assert place < 3
    refusals: list[str] = []

    def refuse_what_is_there() -> None:
        if out.exists():
            refusals.append((out / "config.json").read_text())
            raise UserError("there")

    with pytest.raises(UserError, match="there"), staged_folder(out, check=refuse_what_is_there, plan="plan"):
        pass
    assert refusals[0] in ("old", "new"), "nothing was lost"
    make(out, "newer")
    _only(out, "newer")


def test_links_and_strangers_in_the_way(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    _old(victim)
    for name in ("out", ".out.partial"):
        link = tmp_path / name
        link.symlink_to(victim)
        with pytest.raises(UserError, match=rf"{name} is (a symbolic link|in the way of --out)"):
            make(tmp_path / "out")
        link.unlink()
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a symbolic link to"):
        make(tmp_path / "out")
    (tmp_path / "out").unlink()
    (tmp_path / ".out.partial").write_text("a file")
    with pytest.raises(UserError, match="no folder of yours: remove it"):
        make(tmp_path / "out")
    (tmp_path / ".out.partial").unlink()
    (tmp_path / ".out.replaced").symlink_to(victim)
    _old(tmp_path / "out")
    make(tmp_path / "out")
    assert (victim / "old.json").read_text() == "old" and not (tmp_path / ".out.replaced").is_symlink()


def test_links_in_a_folder_that_is_taken_over(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    _old(victim)
    folder = partial_folder(tmp_path / "out")
    folder.mkdir()
    for name in (".plan", ".holder", ".plan.tmp", ".holder.tmp", "sub"):
        (folder / name).symlink_to(victim / "old.json" if name != "sub" else victim)
    make(tmp_path / "out")
    assert (victim / "old.json").read_text() == "old" and (victim / "config.json").read_text() == "old"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_hard_links_in_a_folder_that_is_taken_over(tmp_path: Path) -> None:
    """What a resumed command writes on is a file of its own."""
    victim = tmp_path / "victim"
    _old(victim)
    folder = partial_folder(tmp_path / "out")
    folder.mkdir()
    (folder / ".plan").write_text("plan")
    os.link(victim / "config.json", folder / "config.json")
    make(tmp_path / "out")
    assert (victim / "config.json").read_text() == "old" and (tmp_path / "out" / "config.json").read_text() == "new"


@pytest.mark.parametrize("has_locks", [True, False])
def test_one_process_at_a_time(has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    if not has_locks:
        monkeypatch.setattr(platforms, "lock", lambda descriptor: None)
    child = os.fork()
    if child == 0:
        with staged_folder(out, check=allow, plan="plan"):
            (tmp_path / "held").touch()
            signal.pause()
    try:
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
        with pytest.raises(UserError, match=rf"out is being written by process {child} on .* since .*: wait until"):
            make(out)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    make(out)  # what it left is taken over
    assert (out / "config.json").exists()


def test_only_the_same_plan_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for plan, found in (("one", []), ("one", ["half"]), ("two", []), (None, [])):
        with pytest.raises((FileError, Killed)), staged_folder(out, check=allow, plan=plan) as folder:
            assert [path.name for path in folder.iterdir() if path.name[0] != "."] == found
            (folder / "half").touch()
            raise FileError("the disk is full") if plan == "one" else Killed
    assert not list(tmp_path.iterdir()), "without a plan nothing is kept"
    with pytest.raises(UserError, match="another value"), staged_folder(out, check=allow, plan="one") as folder:
        (folder / "half").touch()
        raise UserError("give another value")
    assert not list(tmp_path.iterdir()), "a refusal keeps nothing"


def test_who_holds_it_is_never_believed_blindly(tmp_path: Path) -> None:
    folder = partial_folder(tmp_path / "out")
    folder.mkdir()
    (folder / ".holder").write_bytes(Holder.of_this_process().to_bytes()[:-9])
    make(tmp_path / "out")
    _only(tmp_path / "out")


def test_a_disk_without_room_is_named_by_the_folder(tmp_path: Path) -> None:
    """A run writes adapters for a server with the same function, and has no --out."""
    free = staging_module.shutil.disk_usage(tmp_path).free
    needs = f"^{tmp_path}/out needs {2 * free / 1e6:,.1f} MB, but its disk has [0-9,.]+ MB free: make room there"
    with pytest.raises(UserError, match=needs), staged_folder(tmp_path / "out", check=allow, num_bytes=2 * free):
        pass
    assert not list(tmp_path.iterdir())
