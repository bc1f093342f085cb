"""What a run left in its folder. Anything may be missing: a run that only evaluated or was cut off still opens."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from engine.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run's folder, read.

    Args:
        path: of the folder.
        name: short, and different from that of the other runs on the page.
        steps: records of training steps, by their order.
        evaluations: records of evaluations.
        ranks: rank -> its records.
        config: sections of options; empty where there is no such file.
        environment: what was written of machine and layout; empty likewise.
        notes: what could not be read.
    """

    path: Path
    name: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    ranks: dict[int, list[dict[str, Any]]]
    config: dict[str, Any]
    environment: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def option(self, name: str) -> Any:
        """Of the configuration; None where it is not known."""
        section, _, leaf = name.rpartition(".")
        found = self.config.get(section, {}) if section else self.config
        return found.get(leaf) if isinstance(found, dict) else None

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of a figure of the training steps, where it is finite."""
        return points(self.steps, key)

    @property
    def devices(self) -> int | None:
        """Processes of the run."""
        return self.environment.get("world_size") or (len(self.ranks) or None)

    @property
    def speed(self) -> float | None:
        """Tokens a second over all reported steps but the first, which warms up; None without steps."""
        counted = self.steps[1:] if len(self.steps) > 2 else self.steps
        seconds = sum(number(record.get("seconds")) or 0 for record in counted)
        tokens = sum(number(record.get("tokens")) or 0 for record in counted)
        return tokens / seconds if seconds > 0 else None

    @property
    def status(self) -> str:
        """In a few words."""
        wanted = self.option("train.steps")
        last = max((int(record["step"]) for record in self.steps), default=None)
        if last is None:
            return "evaluated only" if self.evaluations else "no steps recorded"
        if wanted is None:
            return f"{last} steps"
        return f"complete, {last} steps" if last >= wanted else f"ended at step {last} of {wanted}"


def read_runs(paths: list[Path]) -> list[Run]:
    """The runs, each with a name of its own.

    Raises:
        UserError: a path is not the folder of a run.
    """
    names = _names(paths)
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def number(value: object) -> float | None:
    """A finite number; None for anything else, as NaN is written as text."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def points(records: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value) where the value is a finite number."""
    found = ((number(record.get("step")), number(record.get(key))) for record in records)
    return [(step, value) for step, value in found if step is not None and value is not None]


def _read(path: Path, name: str) -> Run:
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: give the folder of a run, which has metrics.jsonl and config.yaml.")
    notes: list[str] = []
    config = _config(path, notes)
    log = config.get("log")
    metrics = (log.get("metrics") if isinstance(log, dict) else None) or "metrics.jsonl"
    if not any((path / found).exists() for found in (metrics, "config.yaml", "environment.json", "telemetry")):
        raise UserError(f"{path} has neither {metrics} nor config.yaml: give the folder of a run.")
    records = _lines(path / metrics, notes)
    ranks = {}
    for file in sorted((path / "telemetry").glob("rank_*.jsonl")):
        rank = file.stem.removeprefix("rank_")
        if rank.isdigit():
            ranks[int(rank)] = _newest(_lines(file, notes))
    environment: dict[str, Any] = {}
    if (path / "environment.json").is_file():
        try:
            environment = json.loads((path / "environment.json").read_text(encoding="utf-8"))
        except ValueError:
            notes.append("environment.json is not whole")
    return Run(
        path=path,
        name=name,
        steps=_newest([record for record in records if "loss" in record]),
        evaluations=[record for record in records if "eval_loss" in record],
        ranks=ranks,
        config=config,
        environment=environment if isinstance(environment, dict) else {},
        notes=notes,
    )


def _config(path: Path, notes: list[str]) -> dict[str, Any]:
    file = path / "config.yaml"
    if not file.is_file():
        notes.append("there is no config.yaml")
        return {}
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        notes.append("config.yaml cannot be read")
        return {}
    return found if isinstance(found, dict) else {}


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Records of a JSON-lines file; what is cut off is noted."""
    if not path.is_file():
        notes.append(f"there is no {path.name}")
        return []
    records, bad = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and number(record.get("step")) is not None:
            records.append(record)
        else:
            bad += 1
    if bad:
        notes.append(f"{bad} line{'s' if bad > 1 else ''} of {path.name} cannot be read")
    return records


def _newest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last record of each step, by step: a run that went on from a checkpoint wrote some twice."""
    return [record for _, record in sorted({record["step"]: record for record in records}.items())]


def _names(paths: list[Path]) -> list[str]:
    """The last part of each path that tells them apart."""
    whole = [path.resolve() for path in paths]
    for depth in range(1, 8):
        names = ["/".join(path.parts[-depth:]) for path in whole]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({place})" for place, path in enumerate(whole, 1)]
