"""Wrong options of a run on a model with states: one sentence, before weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.model_weights import open_source
from engine.config.load import load_config
from engine.errors import UserError
from engine.training.start_model import check_model
from tests.support.commands import options
from tests.support.family_models import make_model
from tests.wrong_inputs.workplace import VOCABULARY, Workplace

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lora.targets": "in_proj_qkvz"}, "lora.targets contains 'in_proj_qkvz', which matches no module .* in_proj_qkv"),
    ({"lora.targets": "conv1d"}, "lora.targets contains 'conv1d', which matches no module of this model: use names"),
    ({"lora.targets": "linear_attn"}, "lora.targets contains 'linear_attn', which matches no module of this model"),
    ({"trainable": "A_logs"}, "trainable contains 'A_logs', which matches no module of this model: did you mean A_log"),
    ({"data.seq_length": 1}, "data.seq_length is 1, but it must be 2 or more"),
    (
        {"parallel.shard": "parameters", "memory.offload_weights": "true"},
        "memory.offload_weights is true and parallel.shard is parameters, which keeps the weights on the other ranks",
    ),
]
LAYOUTS: list[tuple[str, dict[str, Any], int, str]] = [
    ("qwen3.5", {"parallel.tensor": 4}, 4, "linear attention has 2 key heads, which do not divide .* divides 2"),
    ("granite hybrid", {"parallel.tensor": 4}, 4, "Mamba layers have 10 heads, which do not divide .* divides 10"),
    ("bamba", {"parallel.tensor": 5}, 5, "do not divide over parallel.tensor 5"),
    ("qwen3.5", {"parallel.pipeline": 5}, 5, "4 layers cannot be split into 5 stages"),
    ("qwen3.5", {"parallel.tensor": 2, "model.base_dtype": "nf4"}, 2, "one scale for 64 input features.*out_proj"),
]


@pytest.mark.parametrize(("changes", "words"), OPTIONS, ids=lambda value: str(value)[:50])
def test_options(changes: dict[str, Any], words: str, place: Workplace, tmp_path: Path) -> None:
    make_model("qwen3.5", tmp_path / "hf", vocab_size=VOCABULARY)
    _refused({**place.options, "model.path": tmp_path / "hf", **changes}, 1, words)


@pytest.mark.parametrize(("name", "changes", "world", "words"), LAYOUTS, ids=lambda value: str(value)[:30])
def test_layouts(name: str, changes: dict[str, Any], world: int, words: str, place: Workplace, tmp_path: Path) -> None:
    make_model(name, tmp_path / "hf", vocab_size=VOCABULARY)
    _refused({**place.options, "model.path": tmp_path / "hf", "model.init": "checkpoint", **changes}, world, words)


def _refused(settings: dict[str, Any], world: int, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        config = load_config(options(settings))
        check_model(config, open_source(config.model.path).model, world)
    assert str(caught.value).endswith((".", "?"))
