"""What each kernel takes on a GPU, in tables that show a change as a diff: tests/kernels/resources/TRITON/sm_ARCH.json

    python -m tests.kernels.resource_tables --arch 80 90 100 120             # says what differs from the tables
    python -m tests.kernels.resource_tables --arch 80 90 100 120 --write     # rewrites them

A table belongs to one version of Triton, the one that this runs with, because each brings its own assembler. What no
kernel should do is refused whatever the table says, except where `KNOWN` names the kernel and gives the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kernels.kernel_resources import MULTIPROCESSORS
from tests.support.sweeps import sampled

ROOT = Path(__file__).resolve().parents[2]
TABLES = Path(__file__).resolve().parent / "resources"
COMMAND = "python -m tests.kernels.resource_tables --write --arch"

PLANNED_FOR = (90, 100)
"""Launchers plan two blocks for each multiprocessor, with tiles for the shared memory of these."""

UNFUSED = ("quantize.", "formats.", "merged_formats.", "coded_rows.", "inputs.")
"""Kernels whose results have the bits of plain torch's: each product is rounded, and none fused with a sum."""

Row = dict[str, Any]
"""A line of `tests.kernels.compiling`, without the architecture, which the table's name has."""


class Known(NamedTuple):
    """A problem that is there on purpose, or not yet solved.

    Args:
        kernel, case, problem: regular expressions, each found anywhere in what it is compared with.
        why: what keeps the problem there.
    """

    kernel: str
    case: str
    problem: str
    why: str


KNOWN = (
    Known("", r"r=[48]\b", r"(h_ptr|\[[35]\]) ", "4, 8 ranks: of a length Triton knows only whether 16 divides it"),
    Known("(lora|swiglu)._project", "r=8", "padding_ptr", "a padding that begins at a multiple of 8 columns only"),
    Known("rmsnorm._backward_tiles", "qkv r=48", "leaves 1 block", "registers: operands with 144 ranks"),
    Known("lora._(project|a_gradient)", "qkv r=12", "leaves 1 block", "registers: rows of 36 ranks are not aligned"),
    Known("swiglu._backward_adapted", "r=48", "leaves 1 block", "registers: dA of 64 ranks stays in them"),
    Known("quantize", "codes|70b swiglu", "leaves 1 block", "16 warps keep a row of more than 8192 in registers"),
    Known(
        "rmsnorm._(for|back)ward_k", "norm", "leaves 1 block", "whole rows, and their weight's gradient, in registers"
    ),
    Known("lora._a_gradient", "", "weight_ptr load", "a norm's weight, one number a thread, before the walk"),
    Known("cross_entropy._local_statistics", "", "logits_ptr load", "the target's logit is one number"),
    Known("rows._(combine|weigh)", "", "weights_ptr load", "a slot's weight is one number"),
    Known("paged_attention._split", "gpt-oss", "sinks_ptr load", "a head's sink is one number"),
    Known("delta._solve|delta_channels._pairs", "", "tf32", "three such products make one that is as exact as fp32"),
    Known("lora._(project|a_gradient)", "float32", "tf32 on sm_100", "Triton 3.6 does so for `ieee`, and 3.9 does not"),
    Known(
        "delta._solve", "", "spills", "before and after Hopper: products of fp32 from registers, in three parts each"
    ),
    Known("delta_channels._pairs", "", "spills", "the same products, beside those of a chunk's tokens"),
    Known("delta_gradients._gradients", "", "spills|leaves 1 block", "registers: sums of a chunk by all keys"),
    Known("delta_channel_gradients._value_sums", "", "leaves 1 block", "the same sums"),
    Known("delta_channel_gradients._token_sums", "", "[mf]_ptr load", "one number for each token of a block of 16"),
    Known(
        "formats", "", r"(parts\[2\]|factors\[0\]) load", "the scale of a block, and of B one number for a whole row"
    ),
    Known(
        "coded_rows", "", r"out_ptr store|(factors\[[02]\]|parts\[2\]) load", "16 x 16 numbers, one a thread; scales"
    ),
    Known("state_steps", "", "(load|store) ", "the vectors of one head, one number a thread"),
    Known("grouped._product", "", "leaves 1 block", "sums of 128 x 256, or all stages of a smaller tile, fill it"),
    Known("grouped._product", "dropped", "spills", "a mask's bits beside 128 sums a thread, before the walk"),
    Known("grouped_factors._outer", "dropped", "spills", "the same bits, on Blackwell"),
    Known("", "", "spills 8 bytes", "two registers of a small kernel, which so fits more of its threads"),
)
"""In the order in which a problem looks for its reason."""


class Compiled(NamedTuple):
    """What a process compiled: Triton's version, and the rows of each architecture."""

    triton: str
    rows: dict[int, list[Row]]


class Cold(NamedTuple):
    """What compiled into an empty cache.

    Args:
        cases: their name; see `tests.kernels.compiling`.
        compiled: what their kernels take.
        cache: where they lie now.
    """

    cases: str
    compiled: Compiled
    cache: Path


some_kernels = pytest.mark.parametrize("cold", sampled(("sample", "quick"), ("sample",)), indirect=True)
"""For the fixture `cold`: the kernels that compile in seconds, and with -m slow every kernel."""


def run_compiler(module: str, *arguments: str, cache: Path | None, packages: Path | None) -> list[str]:
    """Returns the lines that a module of this folder prints in a process in which Triton compiles.

    Args:
        cache: where Triton keeps what it compiles; its own folder where None.
        packages: a folder whose packages stand before the installed ones.

    Raises:
        AssertionError: with the end of what the process said, where it fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    if packages is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", f"tests.kernels.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def compile_rows(
    *names: str, archs: Iterable[int] = (90,), cache: Path | None = None, packages: Path | None = None
) -> Compiled:
    """Compiles the cases of `names` (see `tests.kernels.compiling`); the other arguments are `run_compiler`'s."""
    arguments = [*names, "--arch", *map(str, archs)]
    first, *lines = (json.loads(line) for line in run_compiler("compiling", *arguments, cache=cache, packages=packages))
    rows: dict[int, list[Row]] = {arch: [] for arch in archs}
    for line in lines:
        rows[line.pop("arch")].append(line)
    return Compiled(first["triton"], rows)


def kernels_defined() -> set[str]:
    """Returns the names of all kernels that have a launcher: those called _..._kernel."""
    found = set()
    for path in (ROOT / "triton_kernels").glob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("def _") and "_kernel(" in line:
                found.add(f"{path.stem}.{line[4 : line.index('(')]}")
    return found


def table_path(triton: str, arch: int) -> Path:
    """Returns where the table lies; it may not be there."""
    return TABLES / triton / f"sm_{arch}.json"


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Writes one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


def read_table(path: Path) -> list[Row]:
    """Reads what `write_table` wrote."""
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def changes(before: Iterable[Row], after: Iterable[Row], *, whole: bool) -> list[str]:
    """Lists what differs, a line for each figure of each kernel. A figure that the table lacks is not compared: it was
    written before that was kept.

    Args:
        whole: `after` has all that is compiled, so that what it lacks is gone.
    """
    old, new = ({f"{row['kernel']} | {row['case']}": row for row in rows} for rows in (before, after))
    found = []
    for name, row in new.items():
        if name not in old:
            found.append(f"{name}: new, {json.dumps(row)}")
        else:
            differing = [key for key in row if row[key] != old[name].get(key, row[key])]
            found += [f"{name}: {key} was {old[name].get(key)}, is {row[key]}" for key in differing]
    return found + [f"{name}: gone" for name in old if whole and name not in new]


def problems(arch: int, row: Row) -> Iterator[str]:
    """Yields what a kernel should not do, in words."""
    if row["spilled"]:
        yield f"spills {row['spilled']} bytes"
    if row["shared"] > MULTIPROCESSORS[arch].shared_a_block:
        yield f"takes {row['shared']} bytes of shared memory, and a block may have at most so much"
    elif row["blocks"] < 2 and arch in PLANNED_FOR:
        yield f"leaves {row['blocks']} block a multiprocessor"
    for access in row["narrow"]:
        yield f"{access} 2 bytes at a time"
    computes = set(row.get("instructions", "").split())
    if "atomic" in computes:
        yield "adds up by atomic instructions, in an order that no other run repeats"
    if "tf32" in computes:
        yield f"multiplies numbers of fp32 in tf32 on sm_{arch}, with 10 of their 23 bits"
    if "fma" in computes and row["kernel"].startswith(UNFUSED):
        yield "fuses products with sums, so that its results are not those of plain torch"


def known(row: Row, problem: str) -> Known | None:
    """Returns what is known of a kernel's problem."""
    for one in KNOWN:
        if all(re.search(*pair) for pair in zip(one[:3], (row["kernel"], row["case"], problem), strict=True)):
            return one
    return None


def unknown_problems(arch: int, rows: Iterable[Row]) -> list[str]:
    """Lists the problems that are not known."""
    return [
        f"{row['kernel']} | {row['case']} on sm_{arch}: {problem}"
        for row in rows
        for problem in problems(arch, row)
        if known(row, problem) is None
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[90], choices=list(MULTIPROCESSORS))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    compiled = compile_rows("training", archs=options.arch)
    for arch, rows in compiled.rows.items():
        path = table_path(compiled.triton, arch)
        print(f"Triton {compiled.triton}, sm_{arch}: {len(rows)} kernels")
        print("\n".join(changes(read_table(path) if path.exists() else [], rows, whole=True)))
        print("\n".join(f"problem: {problem}" for problem in unknown_problems(arch, rows)))
        if options.write:
            write_table(path, rows)


if __name__ == "__main__":
    main()
