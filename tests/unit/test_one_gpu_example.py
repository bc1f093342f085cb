"""examples/llama2_70b_one_gpu at a twentieth of its size, on a CPU.

The example's own configuration, with the model's sizes and the tokens divided by 20. A CPU's FP8 products take one
scale a matrix or one a row. What real steps hold is next to what the planner says of it; and so for the mixes that the
example's table compares it with.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config.load import parse_config
from engine.config.run import RunConfig
from engine.layers.saved import SavedTensors
from engine.models import decoder as decoder_module
from engine.models.families import family_of
from engine.planning.peak import PeakEstimate
from engine.planning.predict import predict_peak
from engine.runtime.launch import Launch
from engine.training.module_plan import training_plan
from engine.training.start_model import check_model, model_source
from rankfold.planning.memory_measure import measure
from tests.support.sweeps import sampled

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
LLAMA_2_70B = json.loads((ROOT / "examples/memory/models/llama-2-70b.json").read_text(encoding="utf-8"))
TOKENS = 416
SMALL = {
    **LLAMA_2_70B, "hidden_size": 416, "intermediate_size": 1440, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 1, "vocab_size": 1600,
}  # fmt: skip
"""A twentieth of each, in multiples of 16; an eighth of the heads, which must divide the width, and of the rank."""
MIXES: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "one scale a row": ("--model.base_dtype", "fp8_row"),
    "half of the layers made again": (
        "--memory.offload_weights", "false", "--memory.recompute", "full", "--memory.recompute_layers", "2",
    ),
    "float8": ("--memory.offload_weights", "false", "--memory.activation_dtype", "float8"),
    "activations away": ("--memory.offload_weights", "false", "--memory.offload_activations", "true"),
    "activations away in float8": (
        "--memory.offload_weights", "false", "--memory.offload_activations", "true", "--memory.activation_dtype",
        "float8",
    ),
    "activations away, one layer made again": (
        "--memory.offload_weights", "false", "--memory.offload_activations", "true", "--memory.recompute", "full",
        "--memory.recompute_layers", "1",
    ),
}  # fmt: skip


class _OutOfSight:
    """Moves tensors to where no count of tensors sees them, as a GPU's host memory is."""

    def __init__(self) -> None:
        self.away = 0

    def send(self, tensor: Tensor) -> tuple[np.ndarray[Any, Any], torch.Size, torch.dtype]:
        self.away += tensor.nbytes
        return tensor.view(torch.uint8).numpy().copy(), tensor.shape, tensor.dtype

    def fetch(self, sent: tuple[np.ndarray[Any, Any], torch.Size, torch.dtype]) -> Tensor:
        tensor = torch.empty(sent[1], dtype=sent[2])
        tensor.view(torch.uint8).numpy()[...] = sent[0]
        return tensor

    def wait(self, fetched: Tensor) -> Tensor:
        return fetched


def _config(folder: Path, changes: tuple[str, ...]) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    example = str(ROOT / "examples/llama2_70b_one_gpu/run.yaml")
    return parse_config(
        [
            "--config", example, "--model.path", str(folder), "--model.init", "random", "--model.kernels", "reference",
            "--lora.rank", "2",
            "--data.seq_length", str(TOKENS), "--train.global_batch_size", "1", "--optim.backend", "torch", *changes,
        ]
    )  # fmt: skip


def _predicted(config: RunConfig) -> PeakEstimate:
    source = model_source(config)
    return predict_peak(config, source.model.decoder, check_model(config, source.model, 1).modules, device_type="cpu")


@pytest.mark.parametrize("name", sampled(MIXES, ["activations away in float8"]))
def test_what_is_measured_is_what_is_predicted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path, MIXES[name])
    transfer = _OutOfSight()
    monkeypatch.setattr(decoder_module, "SavedTensors", partial(SavedTensors, transfer=transfer))
    monkeypatch.setattr("engine.training.device_choices.check_offload", lambda device: None)  # the transfer does it
    steps = 2
    measured = measure(config, Launch(rank=0, world_size=1, device=CPU), steps=steps)
    found = _predicted(config)
    visible = 0 if config.memory.offload_activations else found.host
    print(
        f"\n{name:40} predicted {found.step / 2**20:.2f} MiB  measured {(measured.step - visible) / 2**20:.2f}", end=""
    )
    assert found.step == pytest.approx(measured.step - visible, rel=0.01)
    if config.memory.offload_activations:
        assert found.host == pytest.approx(transfer.away / (steps + 1), rel=0.02)


def test_the_whole_one_fits() -> None:
    """139 GiB less 6%; a byte for each of the layers' 80 x 855,638,016 numbers waits in host memory, 2 for the rest."""
    example = str(ROOT / "examples/llama2_70b_one_gpu/run.yaml")
    config = parse_config(["--config", example])
    family, text = family_of(LLAMA_2_70B)
    decoder = family.config_from_hf(text)
    found = predict_peak(config, decoder, training_plan(config, decoder, family.names), device_type="cuda")
    assert found.peak < 0.94 * 139 * 2**30
    numbers = 80 * (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672)
    assert found.host == pytest.approx(numbers + 2 * 2 * 32000 * 8192, rel=0.001)
