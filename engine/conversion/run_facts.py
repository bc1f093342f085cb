"""Facts about a training for its model card: objective, data, options and figures.

The card is for others, so paths of this machine are not in it: a file is named without its folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.choices import STORED
from engine.config.hub import DATA_PREFIX, parse_name
from engine.config.objective import POLICY_GRADIENT
from engine.config.run_files import CHECKPOINTS
from engine.files.documents import open_file
from engine.files.strict_json import JsonFlaw, parse_json
from engine.files.strict_yaml import YamlFlaw, parse_yaml

_METRICS = "metrics.jsonl"
_SECTIONS = ("model", "objective", "data", "optim", "train", "log", "lora")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFacts:
    """The facts that are known about a training.

    Args:
        rows: name -> value, of the card's table.
        datasets: data sets on the Hugging Face hub, as OWNER/NAME.
    """

    rows: Mapping[str, str] = field(default_factory=dict)
    datasets: tuple[str, ...] = ()


NO_FACTS = TrainingFacts()


def training_facts(checkpoint: TrainingCheckpoint) -> TrainingFacts:
    """Returns the facts about a training run: its options as they were recorded, and the figures that are known."""
    try:
        found = parse_yaml(checkpoint.run_config)
    except YamlFlaw:
        found = None
    options = {name: _section(found, name) for name in _SECTIONS}
    names = list(_data(options["data"]))
    repos = [_repo(name) for name in names]
    sampled = options["objective"].get("name") in POLICY_GRADIENT
    rows = _options(options, [_shown(name) for name in names], checkpoint.base.get("encodings"))
    rows |= _figures(checkpoint, options["log"], sampled=sampled)
    return TrainingFacts(rows=rows, datasets=tuple(dict.fromkeys(repo for repo in repos if repo is not None)))


def _section(config: object, name: str) -> dict[str, Any]:
    found = config.get(name) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _data(section: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of the training data, without their weights in a mixture."""
    if isinstance(train := section.get("train"), str):
        yield train
    mix = section.get("mix")
    for entry in mix if isinstance(mix, list) else ():
        if isinstance(entry, str):
            yield entry.rpartition("=")[0]


def _repo(name: str) -> str | None:
    """Returns OWNER/NAME of a data set on the hub."""
    found = parse_name(name.removeprefix(DATA_PREFIX).partition("?")[0]) if name.startswith(DATA_PREFIX) else None
    return None if found is None else found.repo


def _shown(name: str) -> str:
    """Returns a name of data without the folders of this machine."""
    short = name.removeprefix(DATA_PREFIX) if _repo(name) is not None else Path(name).name
    return f"`{short}`"


def _options(options: Mapping[str, Mapping[str, Any]], data: list[str], encodings: object) -> dict[str, str]:
    """Returns the rows about objective, data and options; `encodings` are those of the base's weights."""
    model, optim, train = options["model"], options["optim"], options["train"]
    objective = options["objective"].get("name")
    if objective in POLICY_GRADIENT:
        objective = f"{objective} ({options['objective'].get('loss_type')})"
    rows = {"Objective": None if objective is None else str(objective).replace("_", " "), "Data": ", ".join(data)}
    if isinstance(start := options["lora"].get("init_from"), str):
        name = parse_name(start)  # a record has the commit, and a path has none
        rows["Started from the adapter"] = f"`{name if name is not None and name.is_pinned else Path(start).name}`"
    rows |= {
        "Sequence length": _text(options["data"].get("seq_length")),
        "Packed": "yes" if options["data"].get("packing") else None,
        "Global batch size": _text(train.get("global_batch_size")),
        "Epochs": _text(train.get("epochs")),
        "Optimizer": _optimizer(optim),
        "Precision": _precision(model, encodings),
        "Seed": _text(train.get("seed")),
    }
    return {name: value for name, value in rows.items() if value}


def _optimizer(optim: Mapping[str, Any]) -> str | None:
    if "lr" not in optim:
        return None
    parts = [f"AdamW, learning rate {optim['lr']:g}" if isinstance(optim["lr"], float) else "AdamW"]
    if optim.get("schedule"):
        parts.append(f"schedule `{optim['schedule']}`")
    if optim.get("weight_decay"):
        parts.append(f"weight decay {optim['weight_decay']}")
    return ", ".join(parts)


def _precision(model: Mapping[str, Any], encodings: object) -> str | None:
    if "dtype" not in model:
        return None
    name = model.get("base_dtype")
    if name == STORED and isinstance(encodings, list):
        name = f"{' and '.join(map(str, encodings))}, as it is stored"
    return f"{model['dtype']}, base in {name}" if name else str(model["dtype"])


def _text(value: object) -> str | None:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_result(key: str) -> bool:
    """Returns whether a key is TASK/METRIC, or a reward or pass@k of sampled completions."""
    return "/" in key and (not key.startswith("eval/") or key.startswith(("eval/reward", "eval/pass@")))


def _figures(checkpoint: TrainingCheckpoint, log: Mapping[str, Any], *, sampled: bool) -> dict[str, str]:
    state = checkpoint.state
    step = state.get("step")
    rows = {"Steps": str(step)}
    loss, tasks = _measured(checkpoint, step, log.get("metrics"))
    if loss is not None:
        rows["Training loss of the last step"] = f"{loss:.4f}"
    best = state.get("best")
    if not sampled and isinstance(best, dict) and isinstance(last := best.get("last"), float):
        rows["Last evaluation loss"] = f"{last:.4f} (step {best.get('seen')})"
    for name, value in tasks.items():
        rows[f"`{name}`"] = f"{value:.4f}"
    return rows


def _measured(checkpoint: TrainingCheckpoint, step: object, name: object) -> tuple[float | None, dict[str, float]]:
    """Returns the loss of the checkpoint's step, and the figures of tasks that were evaluated after it, where the run's
    metrics file is beside its checkpoints."""
    folder = checkpoint.folder.absolute()
    path = folder.parents[1] / (Path(name).name if isinstance(name, str) else _METRICS)
    loss: float | None = None
    tasks: dict[str, float] = {}
    if folder.parent.name != CHECKPOINTS or not path.is_file():
        return loss, tasks
    with open_file(path) as file:
        for line in file:
            try:
                record = parse_json(line)
            except JsonFlaw:
                continue  # the line that a killed run was writing
            if not isinstance(record, dict) or record.get("step") != step:
                continue
            if isinstance(record.get("loss"), float):
                loss = record["loss"]
            if "task_seconds" in record or "eval_seconds" in record:
                tasks |= {key: value for key, value in record.items() if _is_result(key) and isinstance(value, float)}
    return loss, tasks
