"""Names and bits in and out, of every type that a small model can be made of; the quick ones are in test_names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import export_hf, import_checkpoint
from tests.adopted.saved_models import assert_same, save_small, stored

pytestmark = pytest.mark.slow

TYPES = [
    "afmoe",
    "apertus",
    "arcee",
    "aria_text",
    "axk1",
    "axk2",
    "bamba",
    "beam",
    "biogpt",
    "bitnet",
    "bloom",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "diffllama",
    "doge",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon",
    "falcon_mamba",
    "flex_olmo",
    "flint",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gpt_neox_japanese",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "helium",
    "hy_v3",
    "jamba",
    "jetmoe",
    "kolibri1",
    "laguna",
    "lfm2",
    "lfm3",
    "llama",
    "mamba",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "ministral3",
    "mistral",
    "mixtral",
    "mpt",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "opt",
    "persimmon",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "xglm",
    "youtu",
]
CHANGES = {"deepseek_v2": {"num_experts_per_tok": 2}}
"""Of configs whose defaults make no model."""


@pytest.mark.parametrize("model_type", TYPES)
def test_in_and_out(tmp_path: Path, model_type: str) -> None:
    model = save_small(model_type, tmp_path / "hf", **CHANGES.get(model_type, {}))
    source = open_source(tmp_path / "hf", "adopted")
    state = model.state_dict()
    for name in source.tensor_names():
        place = source.model.names.to_hf(name).name
        is_turned = isinstance(model.get_submodule(place.rpartition(".")[0]), Conv1D) and place.endswith(".weight")
        expected = state[place].t() if is_turned else state[place]
        assert torch.equal(source.read_whole(name), expected), name
    import_checkpoint(source, tmp_path / "base", tensor=1)
    export_hf(open_source(tmp_path / "base"), tmp_path / "out")
    assert_same(stored(tmp_path / "out"), stored(tmp_path / "hf"))
