"""Runs the first tests and benchmarks on a machine with a GPU: bash tools/gpu_first_hour.sh OUT [PART ...] [options]

First the ten minutes that tell whether the engine runs here and how fast, then correctness, the measurements that
decide how products and norms run, whole steps, and layouts of several GPUs where there are some. A part that fails or
takes longer than it may, nine minutes at most, does not stop the others. For
each part OUT gets its log, a JSON and a Markdown file, and after each summary.json and summary.md over all parts that
OUT has, also from earlier calls, with the figures that have a target and whether they met it. Without PART all parts
run that have not passed yet, so that a second call resumes where the first stopped. A part that is named, by its number
or its name, runs again. Ctrl-C, or a signal to end, ends the part that runs, which counts as interrupted, and the
call. The status is 1 where a part of OUT did not pass, else 0.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import IO, Any

from engine.config.command_line import CommandLine
from engine.errors import UserError
from engine.files import platforms
from engine.telemetry.errors import run_command
from engine.telemetry.format import format_columns
from rankfold.benchmarking.first_hour.figures import figures_of_training, key_figures, record_of_tests
from rankfold.benchmarking.first_hour.parts import PARTS, ROOT, Part
from rankfold.benchmarking.first_hour.targets import judge
from rankfold.benchmarking.table import progress

TEN_MINUTES = 570.0
"""Seconds of a call with --ten-minutes: a caller who waits ten minutes for a command still sees its end."""
_LEAST = 30.0
"""Seconds that must be left for a part to begin."""
_GRACE = 15.0
"""Seconds after an interrupt in which tests may still report."""
_DUMP = 1.0
"""Seconds in which any other part may print where it is, and again those in which the processes it started may."""
PASSED, LEFT_OUT, INTERRUPTED = "passed", "left out", "interrupted"
"""Statuses: a part that ran to its end; one for which this machine has too few GPUs, too little memory, GPUs that are
too old, or a package that is not installed; and one that ran when the call was ended."""
SMOKE_TEST = "smoke-test"
"""Folder in OUT of the results on a CPU, so that no later call takes them for a GPU's."""


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
        status: PASSED, "failed", "out of time", LEFT_OUT or INTERRUPTED.
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
    """Runs one part, with its output in its log, and leaves JSON and Markdown, whatever the outcome, and no weights.

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
        except KeyboardInterrupt:
            status = INTERRUPTED
        finally:
            written = Path(log.name).stat().st_size  # without what its end adds
            _end(process, part)
    for weights in Path(f"{stem}.run").rglob("*.safetensors"):  # results are to be carried home
        weights.unlink()
    taken = time.monotonic() - start
    log_text = Path(f"{stem}.log").read_bytes()[:written].decode("utf-8", errors="replace")
    record = _record(stem, part)
    figures = figures_of_training(log_text) if part.tool == "train" and status == PASSED else ""
    figures = figures or (_last_line(log_text) if record is None else key_figures(record))
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
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},  # prints all threads' frames at SIGABRT
        start_new_session=True,
        preexec_fn=_take_signals,
    )


def _take_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    platforms.write_no_core_file()  # SIGABRT would write one of all its memory


def _end(process: subprocess.Popen[bytes], part: Part) -> None:
    """Ends everything that the part started and has not ended. Before that pytest reports what has failed so far; any
    other command prints where it is, and then the processes that it started do."""
    try:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if process.poll() is None and part.tool == "tests":
                os.killpg(process.pid, signal.SIGINT)
                process.wait(_GRACE)
            elif process.poll() is None:
                process.send_signal(signal.SIGABRT)
                process.wait(_DUMP)
                os.killpg(process.pid, signal.SIGABRT)
                time.sleep(_DUMP)
    finally:  # also where a second Ctrl-C comes meanwhile
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
    lacking = _lacking(part)
    names = " and ".join(filter(None, (", ".join(lacking[:-1]), *lacking[-1:])))
    return f"needs {names}, not installed for {sys.executable}" if lacking else ""


def _lacking(part: Part) -> list[str]:
    """Returns the packages that a part imports and that are not installed."""
    return [name for name in part.packages if find_spec(name) is None]


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
        raise UserError(
            "torch sees no GPU here: run this on a machine with one, or add --smoke-test to run small sizes on the "
            "CPU, or --dry-run to see the commands."
        )
    found = torch.cuda.get_device_properties(0)
    return Gpus(torch.cuda.device_count(), found.total_memory / 2**30, (found.major, found.minor))


def main() -> None:
    start = time.monotonic()
    parser = CommandLine(prog="gpu_first_hour.sh", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the results")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="numbers or names, before any option; all without them"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the parts and their commands, and run nothing")
    parser.add_argument(
        "--ten-minutes", action="store_true", help="the early parts alone, in order, until ten minutes are over"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help=f"end after so many ({TEN_MINUTES:.0f} with --ten-minutes); the same command runs the rest next",
    )
    parser.add_argument(
        "--smoke-test",
        action="store_true",
        help=f"the early parts with small sizes on the CPU, into OUT/{SMOKE_TEST}: needs no GPU, and measures nothing",
    )
    arguments = parser.parse_args()
    early = arguments.ten_minutes or arguments.smoke_test
    chosen = [one for one in chosen_parts(arguments.parts) if one[1].early or not early]
    out = arguments.out.absolute()  # parts run in the repository's folder
    if arguments.smoke_test:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        chosen = [(number, part.in_small()) for number, part in chosen]
        out /= SMOKE_TEST
    if arguments.dry_run:
        for number, part in chosen:
            print(f"{number} {part.name}: {shlex.join(part.command(out / f'{number:02d}-{part.name}'))}")
        return
    here = Gpus(0, 0.0, (0, 0)) if arguments.smoke_test else _require_gpu()
    out.mkdir(parents=True, exist_ok=True)
    _say_what_is_missing([part for _, part in chosen], here)
    seconds = arguments.seconds or (TEN_MINUTES if arguments.ten_minutes else math.inf)
    with _leaving_in_order():
        waiting = _run_parts(chosen, here, out, again=bool(arguments.parts), end=start + seconds)
    print(summarise(out))
    if waiting:
        print(f"Time is over: {', '.join(waiting)} did not begin; the same command runs them next.")
    outcomes = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    sys.exit(0 if all(each["status"] in (PASSED, LEFT_OUT) for each in outcomes) else 1)


def _run_parts(chosen: Sequence[tuple[int, Part]], here: Gpus, out: Path, *, again: bool, end: float) -> list[str]:
    """Runs parts in order, and keeps the summary up to date.

    Args:
        chosen: parts with their numbers.
        here: the GPUs that there are.
        out: folder of the results.
        again: also those that have passed.
        end: time by the monotonic clock at which no part runs any more.

    Returns:
        names of those for which no time was left.

    Raises:
        KeyboardInterrupt: the call was ended.
    """
    waiting = []
    for number, part in chosen:
        if not again and _has_passed(number, part, out):
            progress("first hour", f"{number} {part.name}: passed before")
            continue
        why, left = _what_is_missing(part, here), end - time.monotonic()
        if not why and left < _LEAST:
            waiting.append(part.name)
            continue
        progress("first hour", f"{number} {part.name}")
        outcome = leave_out(number, part, out, why) if why else run_part(number, part, out, left)
        progress("first hour", why or f"{outcome.status} after {outcome.seconds:.0f} s")
        summarise(out)
        if outcome.status == INTERRUPTED:
            raise KeyboardInterrupt
    return waiting


@contextmanager
def _leaving_in_order() -> Iterator[None]:
    """Has every signal to end raise KeyboardInterrupt inside, so that no part outlives the call: each is in a session
    of its own, which a terminal's signals do not reach. What is ignored stays so, as `nohup` wants it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say_what_is_missing(parts: Sequence[Part], here: Gpus) -> None:
    """Says, before anything runs, which parts will be left out, and how to install what they need."""
    reasons: dict[str, list[str]] = {}
    for part in parts:
        if why := _what_is_missing(part, here):
            reasons.setdefault(why, []).append(part.name)
    for why, names in reasons.items():
        progress("first hour", f"will be left out: {', '.join(names)} ({why})")
    if lacking := sorted({name.replace("_", "-") for part in parts for name in _lacking(part)}):
        packages = " ".join(lacking)
        progress(
            "first hour",
            f"to have them run: {sys.executable} -m pip install -c {ROOT / 'constraints.txt'} {packages}",
        )
        progress(
            "first hour",
            f"without a network: pip download --no-deps -d WHEELS -c constraints.txt {packages} on another machine, "
            f"then here {sys.executable} -m pip install --no-index --no-deps WHEELS/*",
        )


if __name__ == "__main__":
    run_command(main)
