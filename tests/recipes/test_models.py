"""The facts of models: their parameters as transformers builds them, and as they were published."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from rankfold.recipes import catalog, update
from rankfold.recipes.catalog import GPUS, MODELS_FILE, Model
from tests.support.sweeps import sampled

PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624, "qwen3-vl-8b": 8_767_123_696,
    "gemma-3-12b": 12_187_325_040, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "phi-4": 14_659_507_200, "smollm3-3b": 3_075_098_624,
}  # fmt: skip
"""Model -> parameters in the headers of its published weights."""
BILLIONS = {
    "qwen3-0.6b": 0.6, "qwen3.5-9b": 9.4, "qwen3.5-27b": 27.4, "qwen3.5-35b-a3b": 35.1, "gemma-4-31b": 30.7,
    "glm-4.7-flash": 29.9, "deepseek-v3.2": 671.9, "kimi-k2": 1026.4, "ministral-3-8b": 8.5, "minicpm-v-4.6": 1.3,
    "nemotron-3-nano-30b-a3b": 31.6,
}  # fmt: skip
"""Model -> what its card says, or its card without layers that predict later tokens and without parts left out."""

NAMES = [*catalog.models()]
_QUICK = ["llama-3.2-1b", "qwen3-vl-8b", "smollm3-3b", "glm-4.7-flash"]


def test_every_model_has_a_published_size() -> None:
    assert set(PUBLISHED) | set(BILLIONS) == set(NAMES) and not set(PUBLISHED) & set(BILLIONS)
    assert len(NAMES) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_that_were_published(name: str) -> None:
    model = catalog.models()[name]
    assert model.parameters == update.parameters_of(model)
    if name in PUBLISHED:
        assert model.parameters == PUBLISHED[name]
    else:
        assert model.parameters / 1e9 == pytest.approx(BILLIONS[name], abs=0.051)


def _theirs(config: dict[str, Any]) -> int:
    """Counts the parameters of transformers' model of a config, which are not allocated."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = {**config, "model_type": {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])}
    if config["model_type"] == "deepseek_v3":
        config.pop("scoring_func", None)
        config["num_mtp_layers"] = config["num_nextn_predict_layers"] = 0
    if "vision_config" not in config and "text_config" in config:
        config = config["text_config"]
    theirs = AutoConfig.for_model(**config)
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        built = kind.from_config(theirs, attn_implementation="eager")
    return sum(one.numel() for one in built.parameters())


@pytest.mark.parametrize("name", sampled(NAMES, _QUICK))
def test_parameters_are_those_of_transformers(name: str) -> None:
    assert _theirs(deepcopy(catalog.models()[name].config)) == catalog.models()[name].parameters


def test_the_file_is_as_it_is_written() -> None:
    assert MODELS_FILE.read_text(encoding="utf-8") == update.models_text(catalog.models().values())


@pytest.mark.parametrize("model", catalog.models().values(), ids=lambda model: model.name)
def test_names_need_no_quotes(model: Model) -> None:
    names = [one.name for one in catalog.recipes() if one.model is model]
    assert names and len(names) == len(set(names))
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") for name in names)


def test_gpus_have_speeds() -> None:
    from engine.planning.machine import MACHINES

    for gpu in GPUS.values():
        machine = MACHINES[gpu.machine]
        assert 0.9 * machine.memory < gpu.memory <= machine.memory
        assert {"24", "48", "80", "141", "180"} & set(gpu.title.replace(",", "").split())
