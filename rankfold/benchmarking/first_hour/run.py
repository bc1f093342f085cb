"""Runs the first tests and benchmarks on a machine with a GPU: bash tools/gpu_first_hour.sh OUT [PART ...]

First the ten minutes that tell whether the engine runs here and how fast, then correctness, the measurements that
decide how products and norms run, whole steps, and layouts of several GPUs where there are some. A part that fails or
takes longer than it may, nine minutes at most, does not stop the others. For
each part OUT gets its log, a JSON and a Markdown file, and at the end summary.json and summary.md over all parts that
OUT has, also from earlier calls, with the figures that have a target and whether they met it. Without PART all parts
run that have not passed yet, so that a second call resumes where the first stopped. A part that is named, by its number
or its name, runs again. The status is 1 where a part of OUT did not pass, else 0.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from engine.config.command_line import CommandLine
from engine.errors import UserError
from engine.telemetry.errors import run_command
from engine.telemetry.format import format_columns
from rankfold.benchmarking.first_hour.figures import key_figures, record_of_tests
from rankfold.benchmarking.first_hour.parts import PARTS, ROOT, Part
from rankfold.benchmarking.first_hour.targets import judge
from rankfold.benchmarking.table import progress

TEN_MINUTES = 570.0
"""Seconds of all parts together with --ten-minutes: a caller who waits ten minutes for a command still sees its end."""
_LEAST = 30.0
"""Seconds that must be left for a part to begin."""
_GRACE = 15.0
"""Seconds after an interrupt in which tests may still report."""
PASSED, LEFT_OUT = "passed", "left out"
"""Statuses: a part that ran to its end, and one for which this machine has too few GPUs, too little memory, GPUs that
are too old, or a package that is not installed."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of a machine.

    Args:
        number: of them.
        gib: memory of the first.
        capability: compute capability of the first.
    """

    number: int
    gib: float
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a part.

    Args:
        number, name, command: of the part.
        seconds: it took.
        status: PASSED, "failed", "out of time" or LEFT_OUT.
        figures: its main figures in a few words, or why it was left out.
        targets: its figures that have a target.
        missed: number of those that missed it.
    """

    number: int
    name: str
    command: str
    seconds: float
    status: str
    figures: str
    targets: tuple[str, ...] = ()
    missed: int = 0


def chosen_parts(names: Sequence[str], parts: Sequence[Part] = PARTS) -> list[tuple[int, Part]]:
    """Returns the parts with these numbers or names, in their own order; all where none is named.

    Raises:
        UserError: a part that does not exist.
    """
    known = {name: index for index, part in enumerate(parts, 1) for name in (str(index), part.name)}
    for name in names:
        if name not in known:
            listed = ", ".join(f"{index} {part.name}" for index, part in enumerate(parts, 1))
            raise UserError(f"there is no part {name!r}: name some of {listed}.")
    wanted = {known[name] for name in names} or set(known.values())
    return [(index, part) for index, part in enumerate(parts, 1) if index in wanted]


def run_part(number: int, part: Part, out: Path, seconds: float = math.inf) -> Outcome:
    """Runs one part, with its output in its log, and leaves JSON and Markdown, whatever the outcome.

    Args:
        seconds: that are left for it, if those are fewer than it may take.
    """
    stem = _cleared(number, part, out)
    part.prepare(stem)
    command, start = part.command(stem), time.monotonic()
    with Path(f"{stem}.log").open("wb") as log:
        process = _start(command, log)
        try:
            status = PASSED if process.wait(min(seconds, part.seconds)) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            _end(process, interrupt=part.tool == "tests")
    taken = time.monotonic() - start
    log_text = Path(f"{stem}.log").read_text(encoding="utf-8", errors="replace")
    record = _record(stem, part)
    figures = _last_line(log_text) if record is None else key_figures(record)
    judged = judge(record, log_text)
    outcome = Outcome(
        number=number,
        name=part.name,
        command=shlex.join(["python", *command[1:]]),
        seconds=round(taken, 1),
        status=status,
        figures=figures,
        targets=tuple(map(str, judged)),
        missed=sum(not one.is_met for one in judged),
    )
    _write_what_is_missing(stem, outcome, record)
    return outcome


def _cleared(number: int, part: Part, out: Path) -> Path:
    """Deletes the files that an earlier call left of a part, and returns their prefix."""
    stem = out / f"{number:02d}-{part.name}"
    for old in out.glob(f"{stem.name}.*"):
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()
    return stem


def _start(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts a part in a session of its own, with which the processes that it starts end, and that takes interrupts: a
    shell has its background jobs, and all that they start, ignore them."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _end(process: subprocess.Popen[bytes], *, interrupt: bool) -> None:
    """Ends everything that the part started and has not ended.

    Args:
        interrupt: whether it is interrupted first, at which pytest reports what has failed so far.
    """
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if interrupt and process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(_GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _record(stem: Path, part: Part) -> dict[str, Any] | None:
    """Returns the JSON that the part wrote, or None."""
    if part.tool == "tests":
        path = Path(f"{stem}.xml")
        return record_of_tests(path.read_text(encoding="utf-8")) if path.exists() else None
    path = Path(f"{stem}.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _write_what_is_missing(stem: Path, outcome: Outcome, record: dict[str, Any] | None) -> None:
    """Writes missing JSON and Markdown files: those of tests and of failed parts. Sections that passed wrote their
    own.
    """
    path = Path(f"{stem}.json")
    if not path.exists():
        path.write_text(json.dumps({**asdict(outcome), **(record or {})}, indent=2) + "\n", encoding="utf-8")
    path = Path(f"{stem}.md")
    if not path.exists():
        lines = [f"### {outcome.name}", f"`{outcome.command}`", f"- {outcome.status}: {outcome.figures}"]
        lines += [f"- failed: {name}" for name in (record or {}).get("failed", ())]
        path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    if outcome.targets:
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" + "".join(f"- {line}\n" for line in ("Targets:", *outcome.targets)))
    Path(f"{stem}.outcome").write_text(json.dumps(asdict(outcome)) + "\n", encoding="utf-8")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"


def summarise(out: Path) -> str:
    """Writes summary.json and summary.md over all outcomes in OUT and returns the table as text."""
    found = sorted(out.glob("*.outcome"))
    outcomes = [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in found]
    (out / "summary.json").write_text(
        json.dumps([asdict(each) for each in outcomes], indent=2) + "\n", encoding="utf-8"
    )
    head = ("part", "seconds", "status", "targets", "key figures")
    rows = [
        (f"{each.number} {each.name}", f"{each.seconds:.0f}", each.status, _targets(each), each.figures)
        for each in outcomes
    ]
    cells = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---", "---:", "---", "---", "---"), *cells)]
    (out / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "\n".join(line.rstrip() for line in format_columns((head, *rows)))


def _targets(outcome: Outcome) -> str:
    met = len(outcome.targets) - outcome.missed
    return f"{met} of {len(outcome.targets)} met" if outcome.targets else ""


def _has_passed(number: int, part: Part, out: Path) -> bool:
    """Returns whether an earlier call ran this part to its end."""
    path = out / f"{number:02d}-{part.name}.outcome"
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["status"] == PASSED


def leave_out(number: int, part: Part, out: Path, why: str) -> Outcome:
    """Notes that this machine cannot run a part, in place of an earlier call's files."""
    stem = _cleared(number, part, out)
    outcome = Outcome(
        number=number, name=part.name, command=shlex.join(part.command(stem)), seconds=0.0, status=LEFT_OUT, figures=why
    )
    _write_what_is_missing(stem, outcome, None)
    return outcome


def _what_is_missing(part: Part, here: Gpus) -> str:
    """Returns why a machine with these GPUs cannot run a part; "" where it can."""
    if part.gpus > here.number:
        return f"needs {part.gpus} GPUs, here {'is' if here.number == 1 else 'are'} {here.number}"
    if part.memory > here.gib:
        return f"needs a GPU of {part.memory} GiB, here it has {here.gib:.0f}"
    if part.capability > here.capability:
        needed, found = (".".join(map(str, one)) for one in (part.capability, here.capability))
        return f"needs a GPU of compute capability {needed}, here it has {found}"
    lacking = [name for name in part.packages if find_spec(name) is None]
    names = " and ".join(filter(None, (", ".join(lacking[:-1]), *lacking[-1:])))
    return f"needs {names}, not installed for {sys.executable}" if lacking else ""


def _require_gpu() -> Gpus:
    """Returns the GPUs of this machine.

    Raises:
        UserError: torch is missing or sees no GPU.
    """
    try:
        import torch
    except ImportError:
        raise UserError(f"{sys.executable} has no torch: name an interpreter that has it by PYTHON=...") from None
    if not torch.cuda.is_available():
        raise UserError("torch sees no GPU here: run this on a machine with one, or add --dry-run to see the commands.")
    found = torch.cuda.get_device_properties(0)
    return Gpus(torch.cuda.device_count(), found.total_memory / 2**30, (found.major, found.minor))


def main() -> None:
    parser = CommandLine(prog="gpu_first_hour.sh", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the results")
    parser.add_argument("parts", nargs="*", metavar="PART", help="numbers or names; all without them")
    parser.add_argument("--dry-run", action="store_true", help="print the parts and their commands, and run nothing")
    parser.add_argument(
        "--ten-minutes", action="store_true", help="the early parts alone, in order, until ten minutes are over"
    )
    arguments = parser.parse_args()
    chosen = [one for one in chosen_parts(arguments.parts) if one[1].early or not arguments.ten_minutes]
    if arguments.dry_run:
        for number, part in chosen:
            print(f"{number} {part.name}: {shlex.join(part.command(arguments.out / f'{number:02d}-{part.name}'))}")
        return
    here, end = _require_gpu(), time.monotonic() + (TEN_MINUTES if arguments.ten_minutes else math.inf)
    out = arguments.out.absolute()  # the parts run in the repository's folder
    out.mkdir(parents=True, exist_ok=True)
    _say_what_is_missing([part for _, part in chosen], here)
    waiting = []
    for number, part in chosen:
        if not arguments.parts and _has_passed(number, part, out):
            progress("first hour", f"{number} {part.name}: passed before")
            continue
        why, left = _what_is_missing(part, here), end - time.monotonic()
        if not why and left < _LEAST:
            waiting.append(part.name)
            continue
        progress("first hour", f"{number} {part.name}")
        outcome = leave_out(number, part, out, why) if why else run_part(number, part, out, left)
        progress("first hour", why or f"{outcome.status} after {outcome.seconds:.0f} s")
    print(summarise(out))
    if waiting:
        print(f"Ten minutes are over: {', '.join(waiting)} did not begin; the same command runs them next.")
    outcomes = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    sys.exit(0 if all(each["status"] in (PASSED, LEFT_OUT) for each in outcomes) else 1)


def _say_what_is_missing(parts: Sequence[Part], here: Gpus) -> None:
    """Says, before anything runs, which parts will be left out, so that what they need can still be installed."""
    reasons: dict[str, list[str]] = {}
    for part in parts:
        if why := _what_is_missing(part, here):
            reasons.setdefault(why, []).append(part.name)
    for why, names in reasons.items():
        progress("first hour", f"will be left out: {', '.join(names)} ({why})")


if __name__ == "__main__":
    run_command(main)
