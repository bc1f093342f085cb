"""Every file that a command finds, damaged in every way: the command works all the same, or says one sentence.

Which files there are is not listed here: each file of the workplace, and of a run's folder, has its turn.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.rights import ordinary_rights
from tests.wrong_inputs.workplace import Workplace, make_place, run_here

MODEL, ADAPTER, OUT, TRAIN = "{folder}/model", "{folder}/adapter", "{folder}/out", "{folder}/train.jsonl"
TOOLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "import": ("convert", ("import", "--source", MODEL, "--out", OUT)),
    "merge": ("convert", ("merge", "--base", MODEL, "--adapter", ADAPTER, "--out", OUT, "--no-proof")),
    "inspect": ("convert", ("inspect", MODEL)),
    "generate": (
        "generate",
        ("--model", MODEL, "--adapter", ADAPTER, "--prompt", "ab", "--max-new-tokens", 1),
    ),
    "plan": ("plan", ("memory", "--model", MODEL, "--gpus", 1, "--gpu-memory", 1, "--seq-length", 16)),
    "preprocess": ("preprocess", ("--tokenizer", MODEL, "--out", OUT, "--workers", 1, TRAIN)),
}


def _unreadable(path: Path) -> None:
    path.chmod(0)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _holding(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


DAMAGE: dict[str, Callable[[Path], None]] = {
    "unreadable": _unreadable,
    "a folder": _folder,
    "a pipe": _pipe,
    "cut off": _half,
    "empty": _holding(b""),
    "no UTF-8": _holding(b"\xff\xfe\x00{}"),
    "a deep list": _holding(b"[" * 200_000),
    "deep mappings": _holding(b'{"a":' * 100_000),
    "a long number": _holding(b'{"a": ' + b"9" * 10_000 + b"}"),
    "another kind": _holding(b'"text"\n'),
}


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["train", *TOOLS])
def test_each_file_of_a_model_an_adapter_and_the_data(
    name: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, file in enumerate(_files(make_place(tmp_path / "sound").folder)):
        place = make_place(tmp_path / str(number))
        (place.model / "notes.md").write_text("beside the model")
        place.set(checkpoint__dir=tmp_path / f"run-{number}", lora__init_from=place.adapter)
        tool, arguments = ("pretrain_lora", place.arguments()) if name == "train" else TOOLS[name]
        _check(place.folder / file, damage, lambda: (tool, _filled(arguments, place)), capsys)  # noqa: B023


def _filled(arguments: Any, place: Workplace) -> list[str]:
    return [str(one).format(folder=place.folder) for one in arguments]


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_file_of_a_run_that_resumes(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = make_place(tmp_path / "place")
    place.set(checkpoint__dir=tmp_path / "first", train__eval_every=1, data__validation=place.train)
    assert run_here("pretrain_lora", place.arguments(), capsys).status == 0
    assert _files(tmp_path / "first")
    for number, file in enumerate(_files(tmp_path / "first")):
        again = tmp_path / f"run-{number}"
        shutil.copytree(tmp_path / "first", again)
        place.set(checkpoint__dir=again, train__steps=2)
        _check(again / file, damage, lambda: ("pretrain_lora", place.arguments()), capsys)


def _check(
    file: Path, damage: str, command: Callable[[], tuple[str, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the command on the damaged file, with the rights of an ordinary user."""
    tool, arguments = command()
    DAMAGE[damage](file)
    with ordinary_rights():
        seen = run_here(tool, arguments, capsys)
    case = f"{file.name} {damage}: {seen.printed[-600:]}"
    assert seen.status in (0, 2), case
    assert "Traceback" not in seen.printed, case
    if seen.status == 2:
        assert seen.sentence.endswith((".", ".)", "?")) and len(seen.sentence) < 700, case
