"""A batch with fewer rows than slots trains as a batch of just those rows does, whatever the rows are.

Three rows make a full batch of three, in which nothing is padding, and the short batch of an epoch in batches of eight,
in which there are rows of padding and whole micro-batches of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config.load import load_config
from engine.training.trainer import train
from tests.support.commands import losses, options, run_tool
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

WORDS = ("once there was a cat", "the sun was high", "Lily had a red ball", "they went home to eat", "it was big")


def _texts() -> list[dict[str, object]]:
    return [{"text": " ".join(WORDS[index:] * (index + 1))} for index in range(3)]


def _pairs() -> list[dict[str, object]]:
    return [
        {"prompt": f"{WORDS[index]}. ", "chosen": WORDS[index + 1] * (index + 1), "rejected": WORDS[index + 2]}
        for index in range(3)
    ]


def _judged() -> list[dict[str, object]]:
    return [
        {"prompt": f"{WORDS[index]}. ", "completion": WORDS[index + 1] * (index + 1), "label": index != 1}
        for index in range(3)
    ]


KINDS: dict[str, tuple[list[dict[str, object]], dict[str, object]]] = {
    "padded": (_texts(), {"data.seq_length": 96}),
    "packed": (_texts() * 2, {"data.seq_length": 96, "data.packing": "true"}),
    "concatenated": (_texts(), {"data.seq_length": 32, "data.packing": "concatenate"}),
    "dpo": (_pairs(), {"data.seq_length": 64, "objective.name": "dpo"}),
    "dpo packed": (_pairs() * 4, {"data.seq_length": 64, "objective.name": "dpo", "data.packing": "true"}),
    "kto": (_judged(), {"data.seq_length": 64, "objective.name": "kto"}),
}


def _settings(kind: str, folder: Path, stories_dir: Path, batch: int, **more: object) -> dict[str, object]:
    records, changes = KINDS[kind]
    data = folder / f"{kind}.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return {
        "model.path": stories_dir, "data.train": data, "lora.rank": 4, "optim.lr": 3e-3, "optim.schedule": "constant",
        "train.epochs": 3, "train.global_batch_size": batch, "log.peak_tflops": 0,
        "checkpoint.dir": folder / f"{kind}-{batch}-{more.get('parallel.shard', 'alone')}", **changes, **more,
    }  # fmt: skip


def _losses(settings: dict[str, object], ranks: int = 0) -> dict[int, float]:
    if ranks:
        run_tool("pretrain_lora", *options(settings), ranks=ranks)
    else:
        train(load_config(options(settings)))
    return losses(Path(str(settings["checkpoint.dir"])))


@pytest.mark.parametrize("kind", sampled(KINDS, ("packed", "concatenated", "dpo")))
def test_a_short_batch_is_a_batch_of_its_rows(
    kind: str, tmp_path: Path, stories_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    full = _losses(_settings(kind, tmp_path, stories_dir, 1))
    rows = len(full) // 3  # of an epoch
    assert 1 < rows < 8 and "the last" not in capfd.readouterr().err
    full = _losses(_settings(kind, tmp_path, stories_dir, rows))
    short = _losses(_settings(kind, tmp_path, stories_dir, 8, **{"train.micro_batch_size": 2}))
    assert f"one epoch is {rows} rows in 1 step\n" in capfd.readouterr().err
    assert full.keys() == short.keys() == {1, 2, 3}
    assert short == pytest.approx(full, abs=2e-6)
    assert abs(full[3] - full[1]) > 1e-3, "nothing moved, so agreement would say little"


@pytest.mark.parametrize("kind", ["kto", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dpo", "packed"))])
def test_so_does_one_over_ranks_of_which_some_have_no_row(kind: str, tmp_path: Path, stories_dir: Path) -> None:
    alone = _losses(_settings(kind, tmp_path, stories_dir, 8, **{"train.micro_batch_size": 2}))
    spread = _settings(kind, tmp_path, stories_dir, 8, **{"train.micro_batch_size": 1, "parallel.shard": "optimizer"})
    assert _losses(spread, ranks=4) == pytest.approx(alone, abs=2e-6)
