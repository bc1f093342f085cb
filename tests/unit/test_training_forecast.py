"""What a run says of its memory before it starts, and when it speaks of a difference."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config.load import to_yaml
from engine.config.run import RunConfig
from engine.data.columns import contiguous
from engine.data.dataset import TokenDataset
from engine.errors import UserError
from engine.planning.predict import workload_of
from engine.runtime.launch import Launch
from engine.telemetry.format import format_bytes
from engine.training.build import Training
from engine.training.reports import forecast
from engine.training.reports.forecast import MemoryForecast
from engine.training.row_shape import shape_of_launch
from engine.vision.data.columns import Extras, PlacedImage, VisionColumns
from engine.vision.layers.fronts import ImageTower
from rankfold.planning import memory, memory_config
from rankfold.planning.memory_measure import build, measure
from tests.support.toy_vision import ToyVisionConfig
from tests.unit.test_planning_memory import Case

CPU = Launch(rank=0, world_size=1, device=torch.device("cpu"))
GPU = replace(CPU, device=torch.device("cuda"))
"""Where a figure of 1.11 times the prediction is a difference; nothing is computed on it."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Training]:
    config = Case(layers=2, length=512).write(tmp_path_factory.mktemp("model"))
    return config, build(config, CPU)


def _rows(*lengths: int, packing: bool = False) -> TokenDataset:
    targets = np.ones(sum(lengths), dtype=bool)
    offsets = np.cumsum([0, *lengths])
    targets[offsets[:-1]] = False
    columns = contiguous(np.zeros(sum(lengths), dtype=np.int32), targets, offsets.astype(np.int64))
    return TokenDataset(columns, seq_length=512, packing=packing)


def _forecast(
    run: tuple[RunConfig, Training], launch: Launch = CPU, dataset: TokenDataset | None = None
) -> MemoryForecast:
    return MemoryForecast(run[0], launch, run[1], dataset or _rows(512), say=pytest.fail)


def test_the_line_is_for_the_longest_row_of_the_data(run: tuple[RunConfig, Training], tmp_path: Path) -> None:
    measured = measure(Case(layers=2, length=128).write(tmp_path), CPU).step
    found = _forecast(run, dataset=_rows(100, 128, 16))
    assert found.estimate.step == pytest.approx(measured, rel=0.01)
    line = found.line()
    assert line.startswith(f"memory: {format_bytes(found.estimate.peak)} of tensors predicted for rank 0, fullest in ")
    assert f"the largest part {found.estimate.largest_part()} with " in line
    packed = _forecast(run, dataset=_rows(100, 128, 16, packing=True)).estimate
    assert packed == _forecast(run, dataset=_rows(512)).estimate and packed.step > 1.5 * measured


def test_rows_on_a_gpu_are_as_the_loader_pads_them(run: tuple[RunConfig, Training]) -> None:
    """Native kernels on both: a GPU's would hold other buffers."""
    estimates = {length: _forecast(run, dataset=_rows(length)).estimate.step for length in (100, 128, 510, 512)}
    config = replace(run[0], model=replace(run[0].model, kernels="native"))
    of_a_gpu = {length: _forecast((config, run[1]), GPU, _rows(length)).estimate.step for length in (100, 128, 510)}
    assert estimates[100] < estimates[128] and estimates[510] < estimates[512]
    assert of_a_gpu[100] == of_a_gpu[128] < of_a_gpu[510]
    multiples = [shape_of_launch(config, launch).length_multiple for launch in (CPU, GPU)]
    assert multiples == [1, 128]


def test_a_difference_of_more_than_a_tenth_is_told_once(run: tuple[RunConfig, Training]) -> None:
    above = _forecast(run, GPU)
    predicted = above.estimate.peak
    assert above.seen(int(1.09 * predicted)) is None
    sentence = above.seen(int(1.5 * predicted))
    assert "50% more than" in sentence and format_bytes(predicted) in sentence
    assert above.seen(2 * predicted, last=True) is None
    below = _forecast(run, GPU)
    assert below.seen(predicted // 2) is None  # the longest row, or a save, may still come
    assert "50% less than" in below.seen(predicted // 2, last=True)
    on_a_cpu = _forecast(run)
    assert on_a_cpu.seen(100 * predicted, last=True) is None


def test_other_ranks_are_silent(run: tuple[RunConfig, Training]) -> None:
    other = _forecast(run, replace(GPU, rank=1))
    assert other.line() is None and other.seen(1 << 50) is None


def test_what_cannot_be_predicted_runs_on(run: tuple[RunConfig, Training], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise UserError("there is no formula for this.")

    monkeypatch.setattr(forecast, "workload_of", refuse)
    found = _forecast(run, GPU)
    assert found.line() == "memory: there is no formula for this."
    assert found.seen(1 << 50, last=True) is None


def test_tiles_are_those_of_the_row_that_has_most(run: tuple[RunConfig, Training]) -> None:
    """Features take 4 tokens a tile here: 10 of them in one row are three tiles, none is no tile."""
    config, training = run
    decoder = replace(training.source.model.decoder, fronts=(ImageTower(model=ToyVisionConfig()),))
    workload = workload_of(config, decoder, training.plan.modules, device_type="cpu")
    spans = [[(3, 7)], [], [(2, 5), (9, 16)]]
    images = [tuple(PlacedImage("a.png", "", "", (8, 8), (span,)) for span in document) for document in spans]
    dataset = _rows(20, 20, 20)
    dataset.put(VisionColumns.of([Extras(own) for own in images]))
    assert dataset.feature_counts.tolist() == [4, 0, 10]
    rows = config.train.micro_batch_size
    assert forecast._with_rows(workload, config, CPU, dataset).tiles == ((4, 3),) * 3 * rows
    assert forecast._with_rows(workload, config, CPU, _rows(20)).tiles == ()


def test_kernels_of_one_configuration(run: tuple[RunConfig, Training], tmp_path: Path) -> None:
    """Each kernel's row is printed for --config as for a search."""
    (tmp_path / "run.yaml").write_text(to_yaml(run[0]), encoding="utf-8")
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    given = ["--config", str(tmp_path / "run.yaml"), "--machine", "h100-80"]
    page = memory_config.report(parser.parse_args([*given, "--by-kernel"]))
    assert "One rank's step, kernel by kernel" in page and "The whole step takes" in page
    assert "kernel by kernel" not in memory_config.report(parser.parse_args(given))
