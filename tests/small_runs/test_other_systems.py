"""Windows and macOS, as `tests.support.other_systems` stands in for them: everything is imported, and one process
trains, converts and generates; what those systems cannot do is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.other_systems import LINUX, MACOS, WINDOWS, run_as
from tests.wrong_inputs.workplace import make_place

IMPORT_ALL = """
import importlib, pkgutil, sys
import engine, rankfold
found = [module.name for package in (engine, rankfold) for module in
         pkgutil.walk_packages(package.__path__, package.__name__ + ".") if not module.name.endswith("__main__")]
found = [name for name in found if ".libkernels_" not in name and ".kernels.triton" not in name]
failed = []
for name in found:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append((name, str(error)))
from engine.files import platforms
from engine.telemetry.process_memory import peak_memory_bytes, total_memory_bytes
print(len(found), failed, platforms.sys.platform, peak_memory_bytes() >> 20, total_memory_bytes() >> 30)
"""


@pytest.mark.parametrize("system", [WINDOWS, pytest.param(MACOS, marks=pytest.mark.slow)])
def test_every_module_is_imported(system: str, tmp_path: Path) -> None:
    done = run_as(system, "-c", IMPORT_ALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert int(words[0]) > 500 and words[1:3] == ["[]", system], done.stdout
    if system == WINDOWS:
        assert words[3:] == ["123", "8"], "as the calls of its library answer, see stand_in.py"


def test_the_stand_in_does_lack_what_windows_lacks(tmp_path: Path) -> None:
    """Otherwise the other tests prove nothing."""
    code = """
import os, signal, subprocess, sys
missing = [name for name in ("fork", "preadv", "O_NOFOLLOW", "geteuid", "sysconf") if not hasattr(os, name)]
missing += [name for name in ("SIGUSR1", "SIGKILL", "setitimer") if not hasattr(signal, name)]
for name in ("fcntl", "resource", "termios"):
    try:
        exec(f"import {name}")
    except ModuleNotFoundError:
        missing.append(name)
open("held", "w").close()
with open("held") as held:
    for call in (lambda: os.unlink("held"), lambda: os.rename("held", "other"), lambda: os.open(".", os.O_RDONLY)):
        try:
            call()
        except PermissionError:
            missing.append("")
print(len(missing), sys.platform)
"""
    done = run_as(WINDOWS, "-c", code, cwd=tmp_path)
    assert done.stdout.split() == ["14", "win32"], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (("train", "--nproc", "2", "--config", "run.yaml"), "--nproc 2"),
        pytest.param(("quickstart",), "the quickstart, which trains on two ranks,", marks=pytest.mark.slow),
        pytest.param(("serve", "--model", "nowhere"), "rankfold serve", marks=pytest.mark.slow),
    ],
)
def test_what_windows_cannot_do_is_refused(words: tuple[str, ...], begins: str, tmp_path: Path) -> None:
    done = run_as(WINDOWS, "-m", "rankfold", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {begins} needs Linux or macOS, and this is win32: run it there, or in WSL.\n"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("system", [WINDOWS, MACOS])
def test_one_process_trains_resumes_converts_and_generates(system: str, tmp_path: Path) -> None:
    """With the same bits as on Linux without the compiled kernels, which other systems do not have."""
    folders = {name: tmp_path / name for name in (system, LINUX)}
    for name, folder in folders.items():
        place = make_place(folder / "place")
        place.set(data__seq_length=20, optim__lr=0.01, log__peak_tflops=0, checkpoint__dir=folder / "run")
        place.set(checkpoint__every=2, model__kernels="reference", optim__backend="torch")

        def run(*words: object, folder: Path = folder, name: str = name) -> str:
            done = run_as(name, "-m", "rankfold", *words, cwd=folder)
            assert done.returncode == 0, done.stderr
            assert "Traceback" not in done.stderr
            return done.stdout + done.stderr

        for steps in (3, 5):  # the second call resumes
            place.set(train__steps=steps)
            run("train", *place.arguments())
        export = ("convert", "export", "--source", folder / "run", "--out")
        assert "checked with PEFT" in run(*export, folder / "adapter", "--format", "peft")
        assert "checked with transformers" in run(*export, folder / "merged", "--format", "hf", "--merge")
        for _ in range(2):  # the second call replaces a folder
            given = ("--out", folder / "parts", "--tensor", 2, "--overwrite")
            run("convert", "import", "--source", folder / "merged", *given)
        tokenizer = ("--tokenizer", place.options["model.path"])
        run("preprocess", *tokenizer, "--out", folder / "store", "--workers", 2, place.options["data.train"])
        run("generate", "--model", folder / "merged", "--prompt", "abab", "--max-new-tokens", 3)
        left = [
            path.name for path in folder.rglob("*") if path.suffix in (".tmp", ".partial", ".replaced", ".deleting")
        ]
        assert left == []
    found, expected = (_tensors(folder) for folder in folders.values())
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        np.testing.assert_array_equal(found[key], tensor, err_msg=key)
    assert any(np.any(tensor) for key, tensor in expected.items() if "lora_B" in key)
    records = [json.loads(line) for line in (folders[system] / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4, 5]


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(path for name in ("adapter", "merged", "parts") for path in (folder / name).glob("*.safetensors"))
    return {f"{path.relative_to(folder)} {key}": one for path in files for key, one in load_file(path).items()}
