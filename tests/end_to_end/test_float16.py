"""Runs in float16 and bfloat16 on real weights beside the one in fp32, overflows, and going on after them."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from engine.checkpoint.run.step_folders import checkpoint_folder
from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.config.load import parse_config
from engine.errors import UserError
from engine.optim.loss_scale import CEILING
from engine.training.trainer import train
from tests.support.commands import losses, options, run_tool
from tests.support.shared_data import write_plays

STEPS = 12

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    text = write_plays(tmp_path_factory.mktemp("text") / "text.txt", data_dir, 20000)
    return {
        "model.path": stories_dir, "data.train": text, "data.seq_length": 128, "train.steps": STEPS,
        "train.micro_batch_size": 2, "train.global_batch_size": 4, "lora.rank": 8, "optim.lr": 3e-3,
        "optim.schedule": "constant", "guards.liveness_steps": 3, "guards.replicas_every": 1, "log.every": 1,
    }  # fmt: skip


def run_here(settings: dict[str, object], folder: Path, **more: object) -> None:
    given = {**settings, "checkpoint.dir": folder, **{key.replace("__", "."): value for key, value in more.items()}}
    train(parse_config(options(given)))


def scales(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss_scale"] for record in map(json.loads, lines) if "loss_scale" in record]


def worst_difference(one: Path, other: Path) -> float:
    found, expected = losses(one), losses(other)
    assert found.keys() == expected.keys()
    return max(abs(found[step] - expected[step]) for step in found)


def test_both_follow_fp32_within_their_rounding(settings: dict[str, object], tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        run_here(settings, tmp_path / dtype, model__dtype=dtype)
    exact = losses(tmp_path / "float32")
    assert exact[STEPS] < exact[1] - 0.5, "it learns"
    # values are rounded to 11 and to 8 bits; the losses are about 4, and errors of many roundings partly cancel
    assert worst_difference(tmp_path / "float16", tmp_path / "float32") < 4 * 2**-11
    assert worst_difference(tmp_path / "bfloat16", tmp_path / "float32") < 4 * 2**-8
    assert scales(tmp_path / "float16") == [65536.0] * STEPS and not scales(tmp_path / "bfloat16")


SMALL = {
    "data.seq_length": 64, "train.micro_batch_size": 1, "train.global_batch_size": 2, "train.steps": 16,
    "optim.loss_scale": int(CEILING), "optim.loss_scale_window": 3, "optim.max_skipped_steps": 1,
    "model.dtype": "float16", "optim.lr": 1e-3,
}  # fmt: skip
"""At this scale the loss's own gradient, the scale over 126 targets, is beyond float16's largest number."""


@pytest.fixture(scope="module")
def overflowing(settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overflowing") / "run"
    run_here({**settings, **SMALL}, folder, checkpoint__every=8)
    return folder


def test_an_overflow_is_skipped_and_the_scale_recovers(overflowing: Path) -> None:
    found = scales(overflowing)
    changes = [after / before for before, after in pairwise(found)]
    assert found[0] == CEILING and changes[0] == 0.5
    first_good = changes.index(1.0)
    assert changes[:first_good] == [0.5] * first_good
    assert 2.0 in changes, "it grows again"
    assert all(changes[index - 2 : index] == [1.0, 1.0] for index, change in enumerate(changes) if change == 2.0)
    state = TrainingCheckpoint(checkpoint_folder(overflowing, 16)).state
    # what the scale is after the last step tells whether that one was left out
    skipped = changes.count(0.5) + (state["loss_scale"] < found[-1])
    assert state["skipped"] == skipped and state["updates"] == 16 - skipped
    assert skipped >= 2 and all(math.isfinite(loss) for loss in losses(overflowing).values())


def test_the_scale_is_saved_and_goes_on(settings: dict[str, object], overflowing: Path, tmp_path: Path) -> None:
    start = checkpoint_folder(overflowing, 8)
    run_here({**settings, **SMALL}, tmp_path / "run", checkpoint__resume=start)
    assert scales(tmp_path / "run") == scales(overflowing)[8:]
    assert losses(tmp_path / "run") == {step: loss for step, loss in losses(overflowing).items() if step > 8}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [
        {"parallel.tensor": 2},
        pytest.param({"parallel.pipeline": 2}, marks=pytest.mark.slow),
        pytest.param({"parallel.shard": "gradients"}, marks=pytest.mark.slow),
        pytest.param({"parallel.shard": "parameters", "train.global_batch_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_layouts_have_one_scale(
    settings: dict[str, object], overflowing: Path, tmp_path: Path, layout: dict[str, object]
) -> None:
    given = {**settings, **SMALL, **layout, "checkpoint.dir": tmp_path / "run"}
    said = run_tool("pretrain_lora", *options(given), ranks=2).stderr
    assert "Traceback" not in said
    assert scales(tmp_path / "run") == scales(overflowing)
    # sums of two ranks are rounded elsewhere, which 16 updates carry on; processors with float16 arithmetic round more
    assert worst_difference(tmp_path / "run", overflowing) < 8 * 2**-11


def test_what_overflows_at_any_scale_is_a_fault(settings: dict[str, object], tmp_path: Path) -> None:
    """A learning rate of 1e30 leaves weights that are not finite, and then a loss that is not."""
    given = {**settings, **SMALL, "optim.loss_scale": 2, "optim.lr": 1e30, "optim.max_skipped_steps": 2}
    with pytest.raises(UserError, match="the last 2 steps up to step"):
        run_here(given, tmp_path / "run")
