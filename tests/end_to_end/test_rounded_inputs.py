"""Runs whose products are of codes, through the command lines: their losses, resuming, and what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load_config
from engine.errors import UserError
from engine.training.trainer import train
from tests.support.commands import losses, options
from tests.support.shared_data import settings_on_plays
from tests.support.sweeps import sampled

STEPS = 12


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    given = settings_on_plays(tmp_path_factory.mktemp("text"), stories_dir, data_dir, 30000)
    return {**given, "train.steps": STEPS, "train.micro_batch_size": 4, "train.global_batch_size": 4}


def _train(settings: dict[str, object], folder: Path, base: str, products: str, **more: object) -> dict[int, float]:
    chosen = {**settings, "model.base_dtype": base, "model.base_products": products, "checkpoint.dir": folder, **more}
    train(load_config(options(chosen)))
    return losses(folder)


@pytest.mark.parametrize("base", sampled(["mxfp8", "fp8_block", "nvfp4"], ["fp8_block"]))
def test_a_run_on_a_cpu_learns(
    base: str, settings: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the run that decodes; layers of 64 features have little to average errors over."""
    decoded = _train(settings, tmp_path / "decoded", base, "decoded")
    found = _train(settings, tmp_path / "codes", base, "codes")
    assert len(found) == STEPS and found[STEPS] < found[1] - 0.5
    gaps = [abs(found[step] - decoded[step]) for step in decoded]
    assert 0 < max(gaps) < (0.15 if base == "nvfp4" else 0.05), gaps
    assert "products with codes: inputs of 35 weights of this rank are rounded in groups" in capsys.readouterr().err
    with pytest.raises(UserError) as refused:
        _train(settings, tmp_path / "other", base, "decoded", **{"checkpoint.resume": tmp_path / "codes"})
    assert "was trained with model.base_products codes, but this run has decoded" in str(refused.value)
    more = {"checkpoint.resume": tmp_path / "codes", "train.steps": STEPS + 1}
    assert list(_train(settings, tmp_path / "same", base, "codes", **more)) == [STEPS + 1]
