"""What the system says about a file is one sentence; small files are whole or absent; planted links lead nowhere."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from engine.errors import UserError
from engine.files.durable import copy_file, delete_folder, open_append, open_new, write_durably, write_named
from engine.files.refusals import FileError, reading, writing


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "cannot be written (No space left on device): free some space"),
        (errno.EACCES, "cannot be written (Permission denied): use a folder that you may write to"),
        (errno.EROFS, "cannot be written (Read-only file system): use a folder that you may write to"),
        (errno.EIO, "cannot be written (Input/output error): use a folder on another disk if this one is failing"),
        (errno.ELOOP, "cannot be written (it is a symbolic link"),
    ],
)
def test_what_to_do_depends_on_what_happened(code: int, words: str) -> None:
    with pytest.raises(FileError) as refused, writing(Path("a/b")):
        raise OSError(code, os.strerror(code), "somewhere/else")
    assert f"a/b {words}" in str(refused.value) and str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("missing", None, "cannot be read (No such file or directory): check the path"),
        ("x" * 300, None, "cannot be read (File name too long): use a shorter name"),
        ("a\0b", None, "is not the name of a file or folder"),
        ("a\ud800b", None, "is not the name of a file or folder"),
        ("latin", b"ab\xff", "is not UTF-8 text (byte 2)"),
        (".", None, "cannot be read (Is a directory)"),
    ],
)
def test_what_cannot_be_read(name: str, text: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(FileError) as refused, reading(path):
        path.read_text(encoding="utf-8")
    assert words in str(refused.value) and "\n" not in str(refused.value) and "\0" not in str(refused.value)
    with (
        pytest.raises(UserError, match="give another --source"),
        reading(tmp_path / "missing", "give another --source"),
    ):
        (tmp_path / "missing").read_bytes()


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(ValueError, match="^another$"), writing(Path("a")):
        raise ValueError("another")
    with pytest.raises(KeyError), reading(Path("a")):
        raise KeyError


@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
@pytest.mark.parametrize(
    "work",
    [
        lambda path: write_durably(path.with_suffix(""), b"new"),
        lambda path: os.close(open_new(path)),
        delete_folder,
        lambda path: copy_file(Path(__file__), path),
    ],
)
def test_planted_links_are_replaced_and_not_followed(work: Callable[[Path], None], kind: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    if kind == "folder":
        victim.mkdir()
        (victim / "kept").write_text("kept")
    elif kind == "file":
        victim.write_text("kept")
    link = tmp_path / "out.tmp"
    link.symlink_to(victim)
    work(link)
    assert not link.is_symlink()
    assert (victim / "kept").read_text() == "kept" if kind == "folder" else victim.exists() == (kind == "file")
    if kind == "file":
        assert victim.read_text() == "kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices, or has a right to remove one")
@pytest.mark.parametrize("write", [lambda path: write_durably(path, b"new"), open_new])
def test_a_device_is_not_replaced(write: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "null"
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with pytest.raises((OSError, FileError), match="it is a device, not a file"):
        write(path)
    assert stat.S_ISCHR(path.lstat().st_mode) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("opened", "text"), [(open_append, "kept and more"), (write_named, " and more")], ids=["appended", "named"]
)
def test_the_other_name_of_a_file_keeps_what_it_has(
    opened: Callable[[Path], IO[str]], text: str, tmp_path: Path
) -> None:
    victim, planted = tmp_path / "victim", tmp_path / "planted"
    victim.write_text("kept")
    os.link(victim, planted)
    with opened(planted) as file:
        file.write(" and more")
    assert (victim.read_text(), planted.read_text()) == ("kept", text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["planted", "victim"]


def test_a_named_file_may_be_a_link_or_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with write_named(tmp_path / "link") as file:
        file.write("text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "text"
    with write_named(Path("/dev/null")) as file:
        file.write("text")


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_durably(path, "old")
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(FileError, match=r"a\.json cannot be written \(No space"):
        patch.setattr("engine.files.durable.open_new", lambda path: full)
        write_durably(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_only_regular_files_are_copied(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(FileError, match="it is not a regular file"):
            copy_file(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
