"""What the planner says of a model whose layers attend to encoded images: peaks of real steps, arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.checkpoint.model_folder import open_model
from engine.config.load import from_yaml
from engine.config.parallel import ParallelOptions
from engine.config.run import RunConfig
from engine.models.families import family_of
from engine.planning.ledger import total
from engine.planning.predict import predict_peak, workload_of
from engine.planning.traces import rank_model
from engine.runtime.launch import Launch
from engine.training.module_plan import training_plan
from engine.training.start_model import check_model
from engine.vision.layers.token_experts import ExpertPair
from rankfold.planning.memory_measure import build, draw_batches, measure
from tests.support.shared_data import shared
from tests.support.sweeps import sampled

LAUNCH = Launch(rank=0, world_size=1, device=torch.device("cpu"))
ROOT = Path(__file__).resolve().parents[2]


def _config(folder: Path, *, lora: str = "{rank: 4}", trainable: str = "[]", memory: str = "{}") -> RunConfig:
    return from_yaml(
        f"model: {{path: '{folder}', dtype: float32, init: random, kernels: reference}}\n"
        f"lora: {lora}\ntrainable: {trainable}\nmemory: {memory}\n"
        "data: {seq_length: 48}\ntrain: {micro_batch_size: 4, global_batch_size: 4}\noptim: {backend: torch}\n"
    )


@pytest.fixture(scope="module")
def folder() -> Path:
    return shared("vision/cogagent")


CASES: dict[str, dict[str, Any]] = {
    "adapters": {},
    "adapters, full": {"memory": "{recompute: full}"},
    "adapters, attention": {"memory": "{recompute: attention}"},
    "encoder and cross attention": {
        "lora": "{rank: 0}", "trainable": "[vision.cross_vision, cross_attention]", "memory": "{recompute: full}",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(CASES, ["adapters, full"]))
def test_peaks_are_those_of_real_steps(name: str, folder: Path) -> None:
    config = _config(folder, **CASES[name])
    plan = check_model(config, open_model(folder))
    predicted = predict_peak(config, open_model(folder).decoder, plan.modules, device_type="cpu")
    measured = measure(config, LAUNCH)
    print(name, predicted.step, measured.step, predicted.step / measured.step - 1, predicted.moment)
    assert predicted.step == pytest.approx(measured.step, rel=0.01)


def test_made_up_images_reach_both_towers_and_the_vision_expert(folder: Path) -> None:
    """Without them, a warm-up would leave these to the first step on data."""
    training = build(_config(folder), LAUNCH)
    (model,) = training.parts
    rows: dict[str, list[int]] = {}

    def counted(name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, given: rows.setdefault(name, []).append(given[0].shape[0]))

    tower, encoder = model.fronts
    counted("tower", tower.model.module)
    counted("encoder", encoder.model.module)
    pair = model.layers[0].mlp
    assert isinstance(pair, ExpertPair)
    counted("vision expert", pair.vision)
    (batch,) = draw_batches(_config(folder), training, LAUNCH)
    training.step([batch], 192.0, 1e-4)
    assert rows == {"tower": [4 * 4 * 4], "encoder": [4 * 7 * 7], "vision expert": [4 * 18]}


def test_the_released_encoder_is_counted_without_scores() -> None:
    """Linears, patches and both products of attention, by hand; attention that wrote its scores would take 2.4 GiB."""
    hf = json.loads((ROOT / "examples/memory/models/cogagent.json").read_text())
    family, text = family_of(hf)
    decoder = family.config_from_hf(text)
    config = from_yaml("model: {path: a}\ndata: {seq_length: 672}\nlora: {rank: 8}\n")
    workload = workload_of(config, decoder, training_plan(config, decoder, family.names), device_type="cuda")
    trace = rank_model(workload, ParallelOptions()).encoder("full", saved=False)
    positions, width = 6401, 1024
    block = positions * width * (4 * width + 3 * 2730) + 2 * positions**2 * width
    by_hand = 2 * (6400 * 3 * 14**2 * width + 23 * block)
    assert sum(one.flops for one in trace.launches.forward) == pytest.approx(by_hand, rel=1e-6)
    assert by_hand == pytest.approx(7.6e12, rel=0.01)
    assert total(trace.forward) < 300 * 2**20
