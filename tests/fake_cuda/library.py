"""Compiles device.cpp once for each torch, and puts the device that it describes in place while torch is imported."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("device.cpp")


def import_torch() -> None:
    """Imports torch, with a CUDA device that does nothing. Nobody may have imported it before."""
    assert "torch" not in sys.modules, "torch has asked for the device's hooks already"
    library = ctypes.CDLL(str(_library()))
    library.register_hooks()
    importlib.import_module("torch")
    library.register_guard()


def _library() -> Path:
    """Returns the compiled library, in a folder of the user's that later sessions find again."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    root = Path(found.origin).parent
    version, source = (root / "version.py").read_text(encoding="utf-8"), _SOURCE.read_text(encoding="utf-8")
    key = hashlib.sha256(f"{root}{version}{source}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"fake-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{key}.so"
    if not library.exists():
        part = folder / f"{key}.{os.getpid()}.part"
        libraries = [f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"]
        command = ["g++", "-shared", "-fPIC", "-std=c++20", "-O0", f"-I{root}/include", str(_SOURCE), "-o", str(part)]
        subprocess.run([*command, *libraries], check=True)
        os.replace(part, library)
    return library
