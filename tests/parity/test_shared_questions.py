"""Whole runs on answers and texts that share their beginnings, against the same runs that share nothing.

One step over all records, so that it does not matter which of them are in a row: loss, norm of the gradient, the other
figures and the adapter afterwards. The runs that share nothing are compared with TRL in the neighbouring modules.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.preference_data import save_model_and_adapter, short_pairs, write_records
from tests.parity.trl_training import SEED, train
from tests.support.commands import run_tool
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

_SYSTEM = "You answer in one short sentence, without a list, and you name the source of each number that you give. "
PACKED = ["--data.packing", "true", "--train.micro_batch_size", "1"]
ROWS = ["--data.seq_length", "256", "--train.global_batch_size", "64", "--train.steps", "1"]
OBJECTIVES: dict[str, tuple[str, list[str]]] = {
    "dpo": ("pairs", ["--objective.name", "dpo"]),
    "dpo packed": ("pairs", ["--objective.name", "dpo", *PACKED]),
    "kto packed": ("answers", ["--objective.name", "kto", *PACKED]),
    "texts packed": ("texts", [*PACKED]),
    "texts with shared targets": ("texts", [*PACKED, "--data.mask_prompt", "false"]),
    "reward model": ("pairs", ["--objective.name", "reward", "--lora.init_from", "null"]),
}
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one-process": (1, []),
    "tensor-2": (2, ["--parallel.tensor", "2", "--parallel.sequence", "true"]),
    "context-2": (2, ["--parallel.context", "2"]),
    "pipeline-2": (2, ["--parallel.pipeline", "2"]),
}
CASES = [(name, "one-process") for name in OBJECTIVES] + [
    (name, layout) for name in ("dpo packed", "kto packed", "texts packed") for layout in list(LAYOUTS)[1:]
]
QUICK = [("kto packed", "one-process")]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    save_model_and_adapter(folder, data_dir, SEED)
    pairs = [
        {"prompt": _SYSTEM + one["prompt"], "chosen": one["chosen"][:90], "rejected": one["rejected"][:90]}
        for one in short_pairs(data_dir, 16)
    ]
    write_records(folder / "pairs.jsonl", pairs)
    answers: list[dict[str, Any]] = [
        {"prompt": one["prompt"], "completion": one[side], "label": side == "chosen"}
        for one in pairs
        for side in ("chosen", "rejected")
    ]
    write_records(folder / "answers.jsonl", answers)
    write_records(folder / "texts.jsonl", [{"prompt": one["prompt"], "completion": one["chosen"]} for one in pairs])
    return folder


@cache
def _run(
    workspace: Path, name: str, layout: str, share: str, *options: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    data, arguments = OBJECTIVES[name]
    ranks, split = LAYOUTS[layout]
    out = "-".join((name, layout, share, *options)).replace(" ", "-")
    more = [*ROWS, *arguments, *split, "--data.share_prefixes", share, *options]
    settings = {
        "objective.reference": "base",
        "lora.init_from": "null",
        "lora.targets": json.dumps(["q_proj", "up_proj"]),
    }
    if data == "texts" or "reward" in arguments:
        settings.pop("objective.reference")
    (figures,) = train(workspace, f"{data}.jsonl", out, ranks, settings, *more)
    run_tool("convert", "export", "--source", workspace / out, "--out", workspace / f"{out}-export", "--format", "peft")
    return figures, load_file(workspace / f"{out}-export" / "adapter_model.safetensors")


@pytest.mark.parametrize(("name", "layout"), sampled(CASES, QUICK))
def test_sharing_changes_nothing(name: str, layout: str, workspace: Path) -> None:
    plain, plain_adapter = _run(workspace, name, layout, "false")
    shared, adapter = _run(workspace, name, layout, "true")
    assert shared["tokens"] < 0.85 * plain["tokens"], "little was shared"
    for figure in ("loss", "grad_norm", "accuracy", "margin", "kl", "logp_chosen"):
        if figure in plain:
            assert shared[figure] == pytest.approx(plain[figure], rel=1e-5, abs=1e-6), figure
    errors = {key: ((adapter[key] - value).norm() / value.norm()).item() for key, value in plain_adapter.items()}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_dropout_of_shared_tokens_is_the_same_in_every_layout(layout: str, workspace: Path) -> None:
    dropout = ["--lora.dropout", "0.2"]
    one, one_adapter = _run(workspace, "dpo packed", "one-process", "true", *dropout)
    other, adapter = _run(workspace, "dpo packed", layout, "true", *dropout)
    without, _ = _run(workspace, "dpo packed", "one-process", "true")
    assert abs(one["grad_norm"] - without["grad_norm"]) > 1e-3 * without["grad_norm"], "nothing was dropped"
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    errors = {key: ((adapter[key] - value).norm() / value.norm()).item() for key, value in one_adapter.items()}
    assert max(errors.values()) < 1e-4, errors
