"""Reads a run's folder. Anything may be missing or damaged; a run that was cut off still opens.

Nothing in the files is trusted: a record keeps finite numbers where numbers are expected, counts are validated,
and a file that cannot be used becomes a note on the page.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config.run_files import CONFIG, ENVIRONMENT, TELEMETRY
from engine.errors import UserError
from engine.files.strict_yaml import YamlFlaw, parse_yaml
from engine.telemetry.format import counted, how_far

_LARGEST = 1e100
"""Largest magnitude of a figure: sums and differences of such numbers are finite."""
_LARGEST_COUNT = 2**53
_METRICS = "metrics.jsonl"
_COMPLETION = "completion/"
_LONGEST_TEXT = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One line of a log.

    Args:
        step: after which it was written.
        figures: name -> finite number.
        phases: part of a step -> seconds.
        text: the completion that it logs, if it logs one.
        communication: axis and operation -> its figures.
        expert_rows: layer -> rows of each expert since the record before that has some.
    """

    step: int
    figures: Mapping[str, float]
    phases: Mapping[str, float]
    communication: Mapping[str, Mapping[str, float]]
    expert_rows: Mapping[int, Sequence[int]]
    text: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run's folder, read.

    Args:
        path: of the folder.
        name: short, and different from that of the other runs on the page.
        steps: records of training steps, by their order.
        evaluations: records of evaluations.
        tasks: records of evaluations of tasks.
        evaluated: records of evaluations that sampled completions.
        ranks: rank -> its records.
        config: sections of options; empty where there is no such file.
        environment: the recorded machine and layout; empty likewise.
        experts: layer -> rows that each of its experts was sent in the whole run.
        texts: step and text of each completion that was logged, by their order.
        notes: sentences about files that could not be read.
    """

    path: Path
    name: str
    steps: Sequence[Record]
    evaluations: Sequence[Record]
    ranks: Mapping[int, Sequence[Record]]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    experts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    texts: Sequence[tuple[int, str]] = ()
    tasks: Sequence[Record] = ()
    evaluated: Sequence[Record] = ()
    notes: list[str] = field(default_factory=list)

    def option(self, name: str) -> Any:
        """Returns an option of the configuration as it was written; None where it is not known."""
        return _at(self.config, name)

    def fact(self, name: str) -> Any:
        """Returns a fact of the environment, such as "layout.tensor"; None where it is not recorded."""
        return _at(self.environment, name)

    def series(self, key: str) -> list[tuple[float, float]]:
        """Returns (step, value) of a figure of the training steps, where it is finite."""
        return points(self.steps, key)

    @property
    def devices(self) -> int | None:
        """The number of processes of the run."""
        return count(self.fact("world_size")) or (len(self.ranks) or None)

    @property
    def speed(self) -> float | None:
        """Tokens per second over all reported steps but the first, which warms up; None without steps."""
        counted = self.steps[1:] if len(self.steps) > 2 else self.steps
        seconds = sum(record.figures.get("seconds", 0.0) for record in counted)
        tokens = sum(record.figures.get("tokens", 0.0) for record in counted)
        return tokens / seconds if seconds > 0 else None

    @property
    def status(self) -> str:
        """The run's status in a few words."""
        last = max((record.step for record in self.steps), default=None)
        if last is None:
            return "evaluated only" if self.evaluations else "no steps recorded"
        wanted = count(self.fact("steps")) or count(self.option("train.steps"))
        if not wanted:
            return counted(last, "step")
        epochs = None if self.option("train.steps") else number(self.option("train.epochs")) or 1.0
        return f"{'ended at ' if last < wanted else ''}{how_far(last, wanted, epochs)}"


def read_runs(paths: list[Path]) -> list[Run]:
    """Reads runs, and gives each a distinct name.

    Raises:
        UserError: a path is not the folder of a run.
    """
    return [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def number(value: object) -> float | None:
    """Returns a finite number of a size that can be drawn; None for anything else, as NaN is written as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _LARGEST else None  # NaN compares false


def count(value: object) -> int | None:
    """Returns a whole number from 0 on; None for anything else."""
    found = number(value)
    return int(found) if found is not None and found == math.floor(found) and 0 <= found <= _LARGEST_COUNT else None


def points(records: Sequence[Record], key: str) -> list[tuple[float, float]]:
    """Returns (step, value) of a figure."""
    return [(float(record.step), record.figures[key]) for record in records if key in record.figures]


def _at(tree: Mapping[str, Any], name: str) -> Any:
    found: Any = tree
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _read(path: Path, name: str) -> Run:
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: give the folder of a run, which has metrics.jsonl and config.yaml.")
    notes: list[str] = []
    config = _tree(path / CONFIG, parse_yaml, notes)
    metrics = _metrics_name(config, notes)
    if not any((path / found).exists() for found in (metrics, CONFIG, ENVIRONMENT, TELEMETRY)):
        raise UserError(f"{path} has neither {metrics} nor config.yaml: give the folder of a run.")
    records = _records(path / metrics, notes)
    found = ((re.fullmatch(r"rank_([0-9]{1,9})", file.stem), file) for file in (path / TELEMETRY).glob("*.jsonl"))
    return Run(
        path=path,
        name=name,
        steps=_newest([record for record, given in records if "loss" in given]),
        evaluations=[record for record, given in records if "eval_loss" in given],
        tasks=_newest([record for record, given in records if "task_seconds" in given]),
        evaluated=_newest([record for record, given in records if "eval_seconds" in given]),
        texts=[(record.step, record.text) for record, _ in records if record.text is not None],
        ranks={
            int(match[1]): _newest([record for record, _ in _records(file, notes)]) for match, file in found if match
        },
        config=config,
        environment=_tree(path / ENVIRONMENT, json.loads, notes) if (path / ENVIRONMENT).exists() else {},
        experts=_together(_newest([record for record, _ in records if record.expert_rows])),
        notes=notes,
    )


def _metrics_name(config: Mapping[str, Any], notes: list[str]) -> str:
    """Returns the name of the log in the run's folder, as the configuration has it."""
    given = _at(config, "log.metrics")
    if given is None:
        return _METRICS
    if isinstance(given, str) and given not in ("", ".", "..") and Path(given).name == given and "\0" not in given:
        return given
    notes.append("log.metrics in config.yaml is not the name of a file")
    return _METRICS


def _text(file: Path, notes: list[str]) -> str | None:
    """Returns the content of a file; None, with a note, where there is none or it cannot be read."""
    if not file.is_file():
        notes.append(f"there is no {file.name}")
        return None
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error.strerror})")
        return None


def _tree(file: Path, parse: Any, notes: list[str]) -> dict[str, Any]:
    """Reads a JSON or YAML file that is one mapping; empty, with a note, where it is not."""
    text = _text(file, notes)
    if text is None:
        return {}
    try:
        found = parse(text)
    except (ValueError, YamlFlaw, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    notes.append(f"{file.name} is damaged")
    return {}


def _records(file: Path, notes: list[str]) -> list[tuple[Record, frozenset[str]]]:
    """Returns the records of a JSON-lines file with the keys that each had; lines that are none are counted in a
    note.
    """
    text = _text(file, notes)
    records, bad = [], 0
    for line in text.splitlines() if text else ():
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            raw = None
        record = _record(raw) if isinstance(raw, dict) else None
        if record is None:
            bad += 1
        else:
            records.append((record, frozenset(raw)))
    if bad:
        notes.append(f"{bad} line{'s' if bad > 1 else ''} of {file.name} cannot be read")
    return records


def _record(raw: dict[str, Any]) -> Record | None:
    step = count(raw.get("step"))
    if step is None:
        return None
    transfers = raw.get("communication")
    return Record(
        step=step,
        figures=_numbers(raw),
        phases=_numbers(raw.get("phases")),
        communication={name: _numbers(one) for name, one in transfers.items()} if isinstance(transfers, dict) else {},
        expert_rows=_expert_rows(raw.get("expert_rows")),
        text=_completion(raw),
    )


def _expert_rows(raw: object) -> dict[int, Sequence[int]]:
    """Returns the layers whose rows are whole numbers; a layer is named by its index."""
    found: dict[int, Sequence[int]] = {}
    for name, rows in raw.items() if isinstance(raw, dict) else ():
        counts = [count(one) for one in rows] if isinstance(rows, list) else []
        if counts and re.fullmatch("[0-9]{1,6}", name):
            found[int(name)] = [one or 0 for one in counts]
    return found


def _together(records: Sequence[Record]) -> dict[int, Sequence[int]]:
    """Returns the sums over the records; those with another number of experts than the last are left out."""
    totals: dict[int, Sequence[int]] = {}
    for record in reversed(records):
        for layer, rows in record.expert_rows.items():
            known = totals.setdefault(layer, [0] * len(rows))
            if len(known) == len(rows):
                totals[layer] = [first + second for first, second in zip(known, rows, strict=True)]
    return totals


def _completion(raw: Mapping[str, Any]) -> str | None:
    found = (value for name, value in raw.items() if name.startswith(_COMPLETION) and isinstance(value, str))
    return next((value[:_LONGEST_TEXT] for value in found), None)


def _numbers(raw: object) -> dict[str, float]:
    found = ((name, number(value)) for name, value in raw.items()) if isinstance(raw, dict) else ()
    return {name: value for name, value in found if value is not None}


def _newest(records: list[Record]) -> list[Record]:
    """Returns the last record of each step, by step: a run that resumed from a checkpoint wrote some twice."""
    return [record for _, record in sorted({record.step: record for record in records}.items())]


def _names(paths: list[Path]) -> list[str]:
    """Returns the last component of each path that distinguishes it."""
    whole = [path.resolve() for path in paths]
    for depth in range(1, 8):
        names = ["/".join(path.parts[-depth:]) for path in whole]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({place})" for place, path in enumerate(whole, 1)]
