"""Arranges ten result logs as MLCommons wants a submission, and runs its checkers over it.

    python package.py --org ORG --system SYSTEM.json --results FOLDER --out PACKAGES

FOLDER has result_0.txt to result_9.txt, SYSTEM.json describes the machine (system.py begins one). Written is
PACKAGES/ORG with systems/SYSTEM.json, results/SYSTEM/llama2_70b_lora/result_*.txt and, under benchmarks/, the code and
configuration that the results were made with.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rules import BENCHMARK

from engine.errors import UserError
from engine.telemetry.errors import run_command

RUNS = 10
RULESET = "6.1.0"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = (
    "engine",
    "triton_kernels",
    "rankfold",
    "csrc",
    "tools/pretrain_lora.py",
    "tools/convert.py",
    "setup.py",
    "constraints.txt",
)
VARIES = {"seed", "eval_accuracy", "train_loss", "cache_clear", "init_start", "init_stop", "run_start", "run_stop"}
"""Keys whose values, or number of lines, may differ from run to run."""


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a result log.

    Raises:
        UserError: there is none, or it is no log.
    """
    if not path.is_file():
        raise UserError(
            f"{path} does not exist, but a submission has result_0.txt to result_{RUNS - 1}.txt: run again."
        )
    token = ":::MLLOG "
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line.partition(token)[2]) for line in lines if token in line]
    except ValueError:
        raise UserError(f"{path} has a line that is no MLPerf log record: run again.") from None


def check_runs(logs: dict[str, list[dict[str, Any]]]) -> None:
    """What must be equal in all runs, and what must not.

    Raises:
        UserError: runs are of different configurations, share a seed, or more than one was aborted.
    """
    first_name, first = next(iter(logs.items()))
    seeds: dict[int, str] = {}
    for name, records in logs.items():
        settings, expected = (_settings(found) for found in (records, first))
        for key in sorted(settings.keys() | expected.keys()):
            if settings.get(key) != expected.get(key):
                raise UserError(
                    f"{name} has {key} {settings.get(key)} and {first_name} has {expected.get(key)}, but all runs of a "
                    "submission are configured alike: run again."
                )
        seed = next((record["value"] for record in records if record["key"] == "seed"), None)
        if seed is None or seed in seeds:
            other = f", that of {seeds[seed]}" if seed in seeds else ""
            raise UserError(
                f"{name} has the seed {seed}{other}, but each run has its own: run again with another seed."
            )
        seeds[seed] = name
    aborted = [name for name, records in logs.items() if _status(records) != "success"]
    if len(aborted) > 1:
        raise UserError(
            f"{', '.join(aborted)} did not reach the target, and at most one run of {RUNS} may be left out: run again."
        )


def _settings(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        record["key"]: record["value"]
        for record in records
        if record["event_type"] == "POINT_IN_TIME" and record["key"] not in VARIES
    }


def _status(records: list[dict[str, Any]]) -> str | None:
    return next((record["metadata"]["status"] for record in records if record["key"] == "run_stop"), None)


def write_package(folder: Path, system: Path, logs: dict[str, Path], configs: list[Path]) -> None:
    """Lays the files out under `folder`, PACKAGES/ORG."""
    name = system.stem
    for kind in ("systems", f"results/{name}/{BENCHMARK}"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    shutil.copy(system, folder / "systems" / system.name)
    for file, log in logs.items():
        shutil.copy(log, folder / "results" / name / BENCHMARK / file)
    code = folder / "benchmarks" / BENCHMARK / "implementations" / f"{name}_pytorch"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "out", "make_small.py", "small*.yaml", "run_small.sh")
    for source in (*SOURCES, HERE.relative_to(ROOT).as_posix()):
        target = code / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=ignored)
        else:
            shutil.copy(ROOT / source, target)
    for config in configs:
        shutil.copy(config, code / config.name)
    shutil.copy(HERE / "README.md", code / "README.md")


def run_checkers(folder: Path) -> bool:
    """MLCommons' package checker, which runs the others; prints what it says.

    Raises:
        UserError: mlperf-logging is not installed.
    """
    log = folder.parent.resolve() / f"{folder.name}_package_checker.log"
    with tempfile.TemporaryDirectory() as name:  # the checker leaves files of its own beside the results
        copy = shutil.copytree(folder, Path(name) / folder.name)
        command = [sys.executable, "-m", "mlperf_logging.package_checker", str(copy), "training", RULESET]
        result = subprocess.run(
            [*command, "--log_output", str(log)], cwd=name, capture_output=True, text=True, check=False
        )
    if "No module named" in result.stderr:
        raise UserError("The package checker is part of mlperf-logging: run `bash tools/setup_venv.sh mlperf`.")
    print(result.stdout + result.stderr)
    return "PACKAGE CHECKER FOUND NO ERRORS" in result.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description="Arrange ten result logs as a submission and check it.")
    parser.add_argument("--org", required=True, help="as in the logs")
    parser.add_argument("--system", type=Path, required=True, metavar="SYSTEM.json", help="named as --platform was")
    parser.add_argument(
        "--results", type=Path, required=True, metavar="FOLDER", help="with result_0.txt to result_9.txt"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--config", type=Path, action="append", default=[], help="a configuration to add, repeatable")
    options = parser.parse_args()
    if not options.system.is_file():
        raise UserError(f"--system {options.system} does not exist: make one with system.py and complete it by hand.")
    paths = {f"result_{run}.txt": options.results / f"result_{run}.txt" for run in range(RUNS)}
    logs = {name: read_log(path) for name, path in paths.items()}
    check_runs(logs)
    told = _settings(logs["result_0.txt"])
    for key, given, option in (
        ("submission_org", options.org, "--org"),
        ("submission_platform", options.system.stem, "--system"),
    ):
        if told.get(key) != given:
            raise UserError(
                f"{option} is {given}, but the logs say {told.get(key)}: give the name the runs were made with."
            )
    folder = options.out / options.org
    if folder.exists():
        raise UserError(f"{folder} is there already: remove it, or give another --out.")
    write_package(folder, options.system, paths, options.config)
    if not run_checkers(folder):
        raise UserError(f"the package checker found errors in {folder}: they stand above.")


if __name__ == "__main__":
    run_command(main)
