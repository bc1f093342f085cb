"""Runs the first tests and benchmarks on a machine with a GPU, part by part: bash tools/gpu_first_hour.sh OUT [PART
...]

First whether everything is right, then what decides how products and norms run, then whole steps. A part that fails or
takes longer than its nine minutes does not stop the others. For each part OUT gets its log, a JSON and a Markdown file,
and at the end summary.json and summary.md over all parts that OUT has, also from earlier calls. Without PART all parts
run; a part is named by its number or its name. The status is 0 where all parts passed and 1 where one did not.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.config.command_line import CommandLine
from engine.errors import UserError
from engine.telemetry.errors import run_command
from engine.telemetry.format import format_columns
from rankfold.benchmarking.first_hour_figures import key_figures, record_of_tests

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 540.0
"""Seconds that one part may take."""
PRESET = "--preset llama3-8b"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of the first hour: one command.

    Args:
        name: of the part and, with its number, of its files.
        tool: "tests" for pytest, or a section of `rankfold benchmark`.
        arguments: of the tool, without those that say where results go.
    """

    name: str
    tool: str
    arguments: str

    def command(self, stem: Path) -> list[str]:
        """Returns the whole command; its results begin with `stem`."""
        if self.tool == "tests":
            files = [
                str(found.relative_to(ROOT)) for word in self.arguments.split() for found in sorted(ROOT.glob(word))
            ]
            # the project's own pytest options want pytest-timeout, which a machine with a GPU may lack
            return [
                sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "addopts=", "-p", "no:cacheprovider",
                f"--junitxml={stem}.xml", *files,
            ]  # fmt: skip
        results = ["--json", f"{stem}.json", "--markdown", f"{stem}.md"]
        return [sys.executable, "tools/benchmark.py", self.tool, *shlex.split(self.arguments), *results]


PARTS = (
    Part(
        name="test-kernels",
        tool="tests",
        arguments="tests/kernels/test_triton_[!t]*.py tests/kernels/test_linear_cross_entropy.py",
    ),
    Part(
        name="test-training",
        tool="tests",
        arguments="tests/kernels/test_triton_training.py tests/unit/test_cuda_graph.py "
        "tests/unit/test_varlen_attention.py",
    ),
    Part(
        name="check-kernels",
        tool="kernels",
        arguments="--repeats 0 --only norm,swiglu,low-rank,dropout,head,attention",
    ),
    Part(name="check-lora-tax", tool="lora-tax", arguments="--repeats 0"),
    Part(name="product", tool="kernels", arguments="--only product"),
    Part(name="elementwise", tool="kernels", arguments="--only norm,swiglu"),
    Part(name="attention", tool="kernels", arguments="--only attention"),
    Part(name="step", tool="step", arguments=f"{PRESET} --peers none --repeats 10"),
    Part(name="step-peft", tool="step", arguments=f"{PRESET} --rows 1 --peers peft --repeats 10"),
    Part(name="graph", tool="graph", arguments="--dtype bfloat16"),
    Part(name="lora-tax", tool="lora-tax", arguments=""),
    Part(name="memory", tool="memory", arguments=f"{PRESET} --peers peft"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a part.

    Args:
        number, name, command: of the part.
        seconds: it took.
        status: "passed", "failed" or "out of time".
        figures: its main figures in a few words.
    """

    number: int
    name: str
    command: str
    seconds: float
    status: str
    figures: str


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


def run_part(number: int, part: Part, out: Path, seconds: float = SECONDS) -> Outcome:
    """Runs one part, with its output in its log, and leaves JSON and Markdown, whatever the outcome."""
    stem = out / f"{number:02d}-{part.name}"
    for old in out.glob(f"{stem.name}.*"):
        old.unlink()
    command, start = part.command(stem), time.monotonic()
    with Path(f"{stem}.log").open("wb") as log:
        # a session of its own: the processes that a section starts end with it
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = "passed" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            _end(process)
    taken = time.monotonic() - start
    log_text = Path(f"{stem}.log").read_text(encoding="utf-8", errors="replace")
    record = _record(stem, part)
    figures = key_figures(record, log_text) if status == "passed" or record is not None else _last_line(log_text)
    outcome = Outcome(
        number=number,
        name=part.name,
        command=shlex.join(["python", *command[1:]]),
        seconds=round(taken, 1),
        status=status,
        figures=figures,
    )
    _write_what_is_missing(stem, outcome, record)
    return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends everything that the part started and has not ended."""
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
    head = ("part", "seconds", "status", "key figures")
    rows = [(f"{each.number} {each.name}", f"{each.seconds:.0f}", each.status, each.figures) for each in outcomes]
    cells = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---", "---:", "---", "---"), *cells)]
    (out / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "\n".join(line.rstrip() for line in format_columns((head, *rows)))


def _require_gpu() -> None:
    """Raises UserError where torch is missing or sees no GPU."""
    try:
        import torch
    except ImportError:
        raise UserError(f"{sys.executable} has no torch: name an interpreter that has it by PYTHON=...") from None
    if not torch.cuda.is_available():
        raise UserError("torch sees no GPU here: run this on a machine with one, or add --dry-run to see the commands.")


def main() -> None:
    parser = CommandLine(prog="gpu_first_hour.sh", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the results")
    parser.add_argument("parts", nargs="*", metavar="PART", help="numbers or names; all without them")
    parser.add_argument("--dry-run", action="store_true", help="print the parts and their commands, and run nothing")
    arguments = parser.parse_args()
    chosen = chosen_parts(arguments.parts)
    if arguments.dry_run:
        for number, part in chosen:
            print(f"{number} {part.name}: {shlex.join(part.command(arguments.out / f'{number:02d}-{part.name}'))}")
        return
    _require_gpu()
    out = arguments.out.absolute()  # the parts run in the repository's folder
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for number, part in chosen:
        print(f"[first hour] {number} {part.name}", file=sys.stderr, flush=True)
        outcome = run_part(number, part, out)
        failed |= outcome.status != "passed"
        print(f"[first hour] {outcome.status} after {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
    print(summarise(out))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    run_command(main)
