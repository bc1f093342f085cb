"""Trains, exports and resumes the runs through the command line alone, and takes their fingerprints.

A fingerprint has four parts, each a mapping of names to values: `metrics` (every reported figure that is no time, rate
or memory), `state` (the checkpoint's own account of step, data and base), `tensors` (SHA-256 of all masters and moments
by logical name), and `export` (SHA-256 of the exported tensors, and the adapter's settings).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.fingerprints.runs import DEFAULTS, KEPT, STEPS, Run

Fingerprint = dict[str, dict[str, Any]]
TIMEOUT = 600
"""Seconds of one command."""
_OF_MACHINE = re.compile(r"seconds|per_second|memory|stall|utilization|flops|mfu|path|base_model_name")


class RunFailed(Exception):
    """A command ended with an error, which the message has."""


def take(run: Run, fixtures: Path, out: Path, tree: Path) -> Fingerprint:
    """Trains from the first step, in the new folder `out`/run.

    Raises:
        RunFailed: a command fails.
    """
    store = out / "store"
    if run.store is not None:
        _command(
            tree, "preprocess", "--tokenizer", fixtures / run.model, "--out", store, fixtures / f"{run.store}.jsonl"
        )
    _train(run, fixtures, out, tree)
    return _read(run, out, tree)


def keep(out: Path, kept: Path) -> None:
    """Copies a run as it was after step KEPT."""
    ignored = shutil.ignore_patterns(f"step_{STEPS:08}", "*.lock", "metrics.jsonl", "telemetry", "export")
    shutil.copytree(out, kept, ignore=ignored)


def resume(run: Run, fixtures: Path, out: Path, tree: Path) -> Fingerprint:
    """Trains the run in `out`/run to its end.

    Raises:
        RunFailed: a command fails, or the run does not begin from the checkpoint.
    """
    _train(run, fixtures, out, tree)
    found = _read(run, out, tree)
    if "step 1 loss" in found["metrics"]:
        raise RunFailed("it begins anew in place of resuming")
    return found


def after_kept(found: Fingerprint) -> Fingerprint:
    """Returns the fingerprint without the metrics of steps up to KEPT."""
    late = {name: value for name, value in found["metrics"].items() if int(name.split()[1]) > KEPT}
    return {**found, "metrics": late}


def _train(run: Run, fixtures: Path, out: Path, tree: Path) -> None:
    options: dict[str, object] = {
        **DEFAULTS, "model.path": fixtures / run.model, "data.train": fixtures / f"{run.data}.jsonl",
        "checkpoint.dir": out / "run", **run.options,
    }  # fmt: skip
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    places = (("{at}", str(fixtures)), ("{store}", str(out / "store")))
    for mark, place in places:
        words = [word.replace(mark, place) for word in words]
    _command(tree, "train", *words, ranks=run.ranks)


def _command(tree: Path, *words: object, ranks: int = 1) -> None:
    """Runs `rankfold` of the tree."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {
        **os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "rankfold", *map(str, words)],
        env=environment, cwd="/", capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.splitlines() or ["nothing was printed"]
        errors = [line for line in lines if re.match(r"(\[rank\d+\]:? *)?(error:|[\w.]*Error)", line)]
        raise RunFailed(errors[0] if errors else lines[-1])


def _read(run: Run, out: Path, tree: Path) -> Fingerprint:
    """Exports the run, and reads everything that it left."""
    export = out / "export"
    words = ["--format", "hf", "--merge"] if run.merge else ["--format", "peft"]
    form = ["--adapter-form", run.form] if run.form else []
    _command(tree, "convert", "export", "--source", out / "run", "--out", export, *words, *form, "--no-proof")
    checkpoint = out / "run" / "checkpoints" / f"step_{STEPS:08}"
    exported = _digests(export)
    if (settings := export / "adapter_config.json").is_file():
        exported |= dict(_leaves(json.loads(settings.read_text(encoding="utf-8"))))
    return {
        "metrics": _metrics(out / "run" / "metrics.jsonl"),
        "state": _state(checkpoint / "manifest.json"),
        "tensors": _digests(checkpoint),
        "export": exported,
    }


def _metrics(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        step = record.pop("step", 0)
        for name, value in _leaves(record):
            key = f"step {step} {name}"
            number = sum(other == key or other.startswith(f"{key} #") for other in found)
            found[f"{key} #{number + 1}" if number else key] = value
    return found


def _state(file: Path) -> dict[str, Any]:
    training = json.loads(file.read_text(encoding="utf-8"))["training"]
    return dict(_leaves({"state": training["state"], "base": training["base"], "lora": training.get("lora")}))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Numbers and texts of a document by their paths, without those that depend on the machine or on folders."""
    if _OF_MACHINE.search(name):
        return
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _leaves(value[key], f"{name}.{key}" if name else key)
    else:
        yield name, value


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each tensor in a folder: of its parts, in the order of the files, where ranks share it."""
    parts: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                tensor = opened.get_tensor(name).contiguous()
                digest = parts.setdefault(name, hashlib.sha256())
                digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return {name: digest.hexdigest() for name, digest in sorted(parts.items())}


def differences(expected: Fingerprint, found: Fingerprint) -> Iterable[str]:
    """Yields a phrase for each part that differs, with the first value that does."""
    for part, values in expected.items():
        now = found[part]
        odd = [name for name in dict.fromkeys((*values, *now)) if values.get(name, _NONE) != now.get(name, _NONE)]
        if odd:
            first = f"{_short(values.get(odd[0], _NONE))} -> {_short(now.get(odd[0], _NONE))}"
            yield f"{len(odd)} of {len(values)} {part} (first {odd[0]}: {first})"


_NONE = "absent"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 40 else f"{text[:12]}..."
