"""Shows that a change keeps every bit of training: the same small runs before it and after it.

python -m tests.fingerprints write FILE [--keep DIR]   # of this tree, or of --tree; DIR gets runs to resume
python -m tests.fingerprints compare FILE              # one line for each run
python -m tests.fingerprints resume DIR                # checkpoints that another tree wrote, to their last step

Fingerprints depend on the processor and on the versions of torch and transformers, so both trees run on one machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fingerprints.fixtures import write_all
from tests.fingerprints.measure import Fingerprint, RunFailed, after_kept, differences, keep, resume, take
from tests.fingerprints.runs import RUNS

PRINTS = "fingerprints.json"
"""In the folder of kept runs: the fingerprints of their last steps."""


def main() -> int:
    given = _arguments()
    names = given.only.split(",") if given.only else list(RUNS)
    if unknown := [name for name in names if name not in RUNS]:
        sys.exit(f"there is no run {', '.join(unknown)}: the runs are {', '.join(RUNS)}")
    with tempfile.TemporaryDirectory(prefix="fingerprints-") as folder:
        work = Path(folder)
        write_all(work / "fixtures")
        if given.command == "write":
            return _write(given, names, work)
        resumes = given.command == "resume"
        file = given.place / PRINTS if resumes else given.place
        expected: dict[str, Fingerprint] = json.loads(file.read_text(encoding="utf-8"))
        if missing := [name for name in names if name not in expected]:
            print(f"not in {file}: {', '.join(missing)}")

        def check(name: str) -> str:
            out = work / name
            if not resumes:
                found = take(RUNS[name], work / "fixtures", out, given.tree)
                return "; ".join(differences(expected[name], found))
            shutil.copytree(given.place / name, out)
            found = resume(RUNS[name], work / "fixtures", out, given.tree)
            return "; ".join(differences(after_kept(expected[name]), after_kept(found)))

        return _each([name for name in names if name in expected], check, given.jobs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.fingerprints", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=("write", "compare", "resume"))
    parser.add_argument("place", type=Path, help="the file of fingerprints, or the folder of kept runs")
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[2], help="repository that trains")
    parser.add_argument("--only", help="names of runs, with commas")
    parser.add_argument("--keep", type=Path, help="new folder for the runs as they are in the middle (write)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    given = parser.parse_args()
    given.tree, given.place = given.tree.resolve(), given.place.resolve()
    return given


def _write(given: argparse.Namespace, names: list[str], work: Path) -> int:
    found: dict[str, Fingerprint] = {}

    def write(name: str) -> str:
        out = work / name
        found[name] = take(RUNS[name], work / "fixtures", out, given.tree)
        if given.keep:
            keep(out, given.keep / name)
        return ""

    failed = _each(names, write, given.jobs)
    text = json.dumps({name: found[name] for name in names if name in found}, indent=0) + "\n"
    for file in (given.place, *([given.keep / PRINTS] if given.keep else [])):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return failed


def _each(names: list[str], check: Callable[[str], str], jobs: int) -> int:
    """Checks each run and prints a line for it; returns 1 where one failed or differs."""

    def line(name: str) -> tuple[str, str]:
        begin = time.monotonic()
        try:
            odd = check(name)
        except RunFailed as error:
            odd = f"failed: {error}"
        return odd, f"{name:<17} {time.monotonic() - begin:5.1f} s  {odd or 'ok'}"

    bad = 0
    with ThreadPoolExecutor(jobs) as pool:
        for odd, text in pool.map(line, names):
            print(text, flush=True)
            bad += bool(odd)
    print(f"{len(names) - bad} of {len(names)} runs are as they were" if bad else f"all {len(names)} runs are ok")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
