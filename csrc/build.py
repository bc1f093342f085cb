"""Compiles the CPU kernels with the machine's C++ compiler; needs nothing but the standard library.

One shared library for each instruction set, because a library must hold no instruction that the processor lacks; the
loader (engine/kernels/native) picks one when it knows the processor. The OpenMP runtime is not linked in: the loader
makes the libraries use the one that torch has brought, since two runtimes in a process fight for the cores.

    python csrc/build.py            # into engine/kernels/native
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent
OUTPUT_DIR = SOURCE_DIR.parent / "engine" / "kernels" / "native"

INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
}
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
         "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas",
         "-include", str(SOURCE_DIR / "glibc.inc"))  # fmt: skip


class BuildError(Exception):
    """The kernels could not be compiled; says why in one sentence."""


def instruction_sets() -> tuple[str, ...]:
    """Those that make sense for this machine's architecture, whatever this very processor has."""
    return tuple(INSTRUCTION_SETS) if platform.machine() in ("x86_64", "AMD64") else ("baseline",)


def library_name(instruction_set: str) -> str:
    return f"libkernels_{instruction_set}.so"


def source_digest() -> str:
    """A hash of all C++ sources; libraries carry the hash of what they were built from."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def find_compiler() -> str:
    """The C++ compiler: $CXX, else c++, g++ or clang++ from the path.

    Raises:
        BuildError: where there is none, or the platform is not Linux.
    """
    if sys.platform != "linux":
        raise BuildError(f"the native kernels are built on Linux only, and this is {sys.platform}")
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        if shutil.which(name.split()[0]):
            return name
    raise BuildError(f"no C++ compiler was found ({wanted or 'c++, g++, clang++'}): install g++ or set CXX")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {lines[0] if lines else 'no message'}")


def build(output_dir: Path = OUTPUT_DIR, sets: tuple[str, ...] | None = None) -> list[Path]:
    """Compile every library.

    Args:
        output_dir: where the libraries go.
        sets: names of instruction sets; None for all of this architecture.

    Returns:
        Their paths.

    Raises:
        BuildError: where there is no compiler or it fails.
    """
    sets = sets or instruction_sets()
    compiler = find_compiler().split()
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    define = f'-DSOURCE_DIGEST="{source_digest()}"'
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs: list[list[str]] = []
        for name in sets:
            for source in sources:
                target = str(Path(folder) / f"{source.stem}.{name}.o")
                jobs.append([*compiler, *FLAGS, *INSTRUCTION_SETS[name], define, "-c", str(source), "-o", target])
        list(pool.map(_run, jobs))
        built = []
        for name in sets:
            objects = [str(Path(folder) / f"{source.stem}.{name}.o") for source in sources]
            fresh = Path(folder) / library_name(name)
            # without -fopenmp: the runtime's symbols stay open until the library is loaded beside torch
            _run([*compiler, "-shared", "-o", str(fresh), *objects])
            final = output_dir / library_name(name)
            beside = final.with_suffix(f".{os.getpid()}.tmp")
            shutil.copy2(fresh, beside)
            beside.replace(final)  # a process that has the old file mapped keeps it
            built.append(final)
    return built


def main() -> int:
    try:
        built = build()
    except BuildError as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    for path in built:
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
