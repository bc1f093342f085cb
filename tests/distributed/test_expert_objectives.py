"""Runs whose experts are divided over ranks, against one process: what is predicted without training, too.

Evaluations, samples of text, and the passes that preference objectives compare with go to experts on other ranks as
training does. Ranks therefore have to make equally many of them, whatever rows they have.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.small_runs.routed_place import put_experts
from tests.support.rollout_runs import run_here
from tests.support.spawning import spawn
from tests.support.sweeps import sampled
from tests.wrong_inputs.workplace import make_place

pytestmark = pytest.mark.distributed

TEXTS = ("abab baba", "cab bac abc abba", "aa bb cc", "ba", "cc ab ba cab", "bab", "abba abba cc")
FULL = {"lora.rank": 0, "trainable": '["*"]'}
KINDS: dict[str, dict[str, object]] = {
    "text": {
        "train.sample_every": 1, "train.sample_prompts": '["ab", "c", "cab ba"]', "train.sample_tokens": 5,
    },
    "dpo": {"objective.name": "dpo"},
    "dpo, initial": {"objective.name": "dpo", "objective.reference": "initial", **FULL},
    "kto": {"objective.name": "kto"},
    "kto, initial": {"objective.name": "kto", "objective.reference": "initial", **FULL},
}  # fmt: skip
LAYOUTS: dict[str, dict[str, object]] = {
    "data": {"parallel.expert": 2},
    "data, parameters": {"parallel.expert": 2, "parallel.shard": "parameters"},
    "tensor": {"parallel.expert": 2, "parallel.tensor": 2, "parallel.sequence": "false"},
    "tensor, sequence": {"parallel.expert": 2, "parallel.tensor": 2},
    "context": {"parallel.expert": 2, "parallel.context": 2},
    "data, int8": {"parallel.expert": 2, "model.base_dtype": "int8"},
    "whole experts": {"parallel.expert_tensor": 1, "parallel.tensor": 2},
}
QUICK = ("data, parameters", "tensor")
CASES = [(kind, layout) for kind in KINDS for layout in LAYOUTS if not ("initial" in kind and "int8" in layout)]
QUICK_CASES = [("text", "tensor"), ("dpo", "data, parameters")]
PARALLEL = {"parallel.expert", "parallel.expert_tensor"}
OTHERS = re.compile(r"(seconds|save|tokens_per_second|memory|data_stall|mfu).*|.*expert.*")
"""Figures of the machine; and those of the router's load, which count padding: rows that divide over more ranks have
more of it."""


def _records(kind: str) -> Iterable[dict[str, object]]:
    for index, text in enumerate(TEXTS):
        other = TEXTS[index - 2]
        if kind.startswith("dpo"):
            yield {"prompt": text, "chosen": other, "rejected": TEXTS[index - 3]}
        elif kind.startswith("kto"):
            yield {"prompt": text, "completion": other, "label": index % 3 != 1}
        else:
            yield {"text": text}


def _settings(kind: str, folder: Path) -> dict[str, object]:
    place = make_place(folder / "place")
    put_experts(place, 4, sees_signs=False)
    place.records(*_records(kind))
    shutil.copy(place.train, folder / "validation.jsonl")
    place.set(
        data__seq_length=32, data__validation=folder / "validation.jsonl", train__steps=3, train__micro_batch_size=1,
        train__global_batch_size=4, train__eval_every=1, optim__lr=0.1, optim__schedule="constant", log__every=1,
        lora__dropout=0.0 if "initial" in kind else 0.1, checkpoint__dir=folder / "run",
    )  # fmt: skip
    return {name: value for name, value in (place.options | KINDS[kind]).items() if value is not None}


def _train_all(settings: list[dict[str, object]]) -> None:
    """Runs one after the other, on ranks that meet at a store as torchrun's do."""
    if dist.get_world_size() > 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
        port = [None if store is None else store.port]
        dist.broadcast_object_list(port)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]))
    for one in settings:
        run_here(one)


class Runs:
    """Runs, each made when it is first asked for; those of a layout and sample in the same processes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, dict[tuple[str, str], list[dict[str, Any]]]()

    def recorded(
        self, kind: str, layout: str, kinds: Iterable[str], changes: dict[str, object]
    ) -> list[dict[str, Any]]:
        """What a run recorded of its model."""
        if (kind, layout) not in self._known:
            folder = self._folder / str(len(self._known))
            places = {one: folder / one.replace(", ", "-") for one in kinds}
            settings = [{**_settings(one, place), **changes} for one, place in places.items()]
            spawn(_train_all, world=2 if changes.keys() & PARALLEL else 1, args=(settings,), timeout=200)
            self._known |= {(one, layout): _seen(place / "run" / "metrics.jsonl") for one, place in places.items()}
        return self._known[kind, layout]


def _seen(metrics: Path) -> list[dict[str, Any]]:
    records = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [{key: value for key, value in record.items() if not OTHERS.fullmatch(key)} for record in records]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("kind", "layout"), sampled(CASES, QUICK_CASES))
def test_predictions_are_those_of_one_process(kind: str, layout: str, runs: Runs) -> None:
    """Losses, figures and samples before, between and after steps."""
    quick = (kind, layout) in QUICK_CASES
    kinds = [one for one, name in (QUICK_CASES if quick else CASES) if name == layout]
    kinds = kinds if quick else [one for one in kinds if (one, layout) not in QUICK_CASES]
    found = runs.recorded(kind, layout, kinds, LAYOUTS[layout])
    encoded = {name: value for name, value in LAYOUTS[layout].items() if name == "model.base_dtype"}
    expected = runs.recorded(kind, f"one, {encoded}", kinds, encoded)
    assert len(found) == len(expected) and len({record.get("eval_loss") for record in expected}) > 3
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-4, abs=1e-5)), key
