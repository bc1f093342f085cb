"""Runs on records with images that stop and go on in another layout: as if they had not stopped."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from examples.minicpm_v import make_small
from tests.support.commands import losses, options, run_tool
from tests.support.sweeps import sampled

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

STEPS, HALF, RECORDS = 6, 3, 10
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "context": (2, {"parallel.context": 2}),
    "tensor, not packed": (2, {"parallel.tensor": 2, "data.packing": "false"}),
    "pipeline, recomputed": (2, {"parallel.pipeline": 2, "memory.recompute": "full"}),
    "data, sharded weights": (2, {"parallel.shard": "parameters", "train.micro_batch_size": 1}),
}
"""Ranks and options of the second half; the first was on one process."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of MiniCPM-V's kind; records with an image, with two and with none."""
    folder = tmp_path_factory.mktemp("images")
    make_small.write(folder)
    records = json.loads((folder / "train.json").read_text(encoding="utf-8"))[:RECORDS]
    for number, record in enumerate(records):
        if number % 4 == 2:
            record["image"] = {"<image_00>": record["image"], "<image_01>": records[0]["image"]}
            record["conversations"][0]["content"] = "Compare <image_00> and <image_01>."
        if number % 4 == 3:
            del record["image"]
    (folder / "train.json").write_text(json.dumps(records), encoding="utf-8")
    return folder


def _train(place: Path, run: Path, ranks: int = 0, **more: object) -> tuple[dict[int, float], str]:
    """The loss of each step, and what the run said."""
    given = {
        "model.path": place / "model", "model.dtype": "float32", "data.train": place / "train.json",
        "data.seq_length": 160, "data.packing": "true", "lora.rank": 4, "lora.dropout": 0.1,
        "lora.targets": r"q_proj,v_proj,vpm\.blocks\..*(qkv|proj)", "trainable": "resampler,embed_tokens",
        "optim.lr": 3e-3, "optim.schedule": "constant", "optim.lr_pattern": "{vpm: 1e-3, resampler: 5e-4}",
        "train.micro_batch_size": 2, "train.global_batch_size": 4, "train.eval_every": 0, "train.steps": STEPS,
        "checkpoint.every": HALF, "checkpoint.keep": 0, "checkpoint.dir": run, "log.every": 1, **more,
    }  # fmt: skip
    said = run_tool("pretrain_lora", *options(given), ranks=ranks).stderr
    return losses(run), said


@pytest.fixture(scope="module")
def whole(place: Path) -> Callable[[str], tuple[Path, dict[int, float]]]:
    """Runs on one process, with `data.packing` as asked for."""

    @functools.cache
    def run(packing: str) -> tuple[Path, dict[int, float]]:
        folder = place / f"whole-{packing}"
        return folder, _train(place, folder, **{"data.packing": packing})[0]

    return run


def _half(run: Path, out: Path) -> Path:
    """The run as it was after half of its steps."""
    shutil.copytree(run, out, ignore=shutil.ignore_patterns(f"step_{STEPS:08}", "*.lock"))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(LAYOUTS, ["context"]))
def test_another_layout_goes_on(name: str, place: Path, whole: Any, tmp_path: Path) -> None:
    ranks, more = LAYOUTS[name]
    before, expected = whole(more.get("data.packing", "true"))
    found, said = _train(place, _half(before, tmp_path / "run"), ranks, **more)
    assert f"step_{HALF:08} after step {HALF}, " in said
    assert found.keys() == expected.keys() and expected[STEPS] < expected[1] - 0.1
    assert [found[step] for step in expected] == pytest.approx(list(expected.values()), rel=1e-5)


def test_images_that_have_changed_since_are_said(place: Path, whole: Any, tmp_path: Path) -> None:
    folder = tmp_path / "place"
    shutil.copytree(place, folder, ignore=shutil.ignore_patterns("whole-*"))
    file = folder / json.loads((folder / "train.json").read_text(encoding="utf-8"))[0]["image"]
    with Image.open(file) as image:
        image.resize((image.width + 30, image.height)).save(file)
    found, said = _train(folder, _half(whole("true")[0], tmp_path / "run"))
    assert "warning: data.train differs from the data" in said and found != whole("true")[1]
