"""CogAgent's options: what all-linear and lora.fused mean for it, and what would leave its images out is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.model_folder import open_model
from engine.config.data import DataOptions
from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from engine.data.build_store import Request as StoreRequest
from engine.data.build_store import preprocess
from engine.data.tokenizer import load_tokenizer
from engine.errors import UserError
from engine.inference.generate import check_requests
from engine.inference.rows import Request
from engine.models.names import FUSED, KEY_VALUE
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.data import build_data
from engine.training.module_plan import training_plan
from engine.training.samples import read_prompts
from engine.vision.data.families import read_vision_family
from tests.parity.test_generate_images import model_folder
from tests.support.vision_fixtures import VisionFixture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder("cogagent", tmp_path_factory.mktemp("cogagent"))


def _config(folder: Path, **sections: Any) -> RunConfig:
    return replace(
        RunConfig(model=ModelOptions(path=str(folder)), data=DataOptions(seq_length=64), train=TrainOptions()),
        **sections,
    )


def _adapted(folder: Path, **options: Any) -> set[str]:
    """The modules with an adapter, as the checkpoint names them."""
    model = open_model(folder)
    lora = LoraOptions(rank=2, targets=("all-linear",), **options)
    plan = training_plan(_config(folder, lora=lora), model.decoder, model.names)
    kinds = {*model.names.layer_modules, *FUSED}
    names = [f"layers.{index}.{kind}" for index in range(model.decoder.num_layers) for kind in kinds]
    return {name for name in (*names, "lm_head", "embed_tokens") if plan.adapter(name) is not None}


def test_all_linear_is_every_matrix_of_the_checkpoints_layers(folder: Path) -> None:
    """Without the targets in cross attention, its three matrices of each layer are missing."""
    names = open_model(folder).names
    matrices = {
        key.removesuffix(".weight")
        for key, value in VisionFixture("cogagent").weights.items()
        if key.startswith("model.layers.") and value.dim() == 2
    }
    assert {names.module_to_hf(module) for module in _adapted(folder)} == matrices
    assert sum(".cross_attn." in name for name in matrices) == 3 * 3


def test_key_and_value_of_cross_attention_are_fused_with_all(folder: Path) -> None:
    together, apart = _adapted(folder, fused="all"), _adapted(folder, fused="none")
    assert {name for name in together if ".cross_attention.key" in name} == {
        f"layers.{layer}.{KEY_VALUE}" for layer in range(3)
    }
    assert {name for name in apart if re.search(r"cross_attention\.(key|value)", name)} == {
        f"layers.{layer}.cross_attention.{name}" for layer in range(3) for name in ("key", "value")
    }


def test_a_token_store_is_refused(folder: Path, tmp_path: Path) -> None:
    records = tmp_path / "train.jsonl"
    records.write_text('{"text": "ab ab"}\n{"text": "ba"}\n')
    preprocess(StoreRequest(files=(records,), tokenizer=folder), tmp_path / "store")
    config = _config(folder, data=DataOptions(train=str(tmp_path / "store"), seq_length=64))
    with pytest.raises(UserError, match=r"store has 2 documents without an image, but every layer of this cogagent"):
        build_data(config, Launch(rank=0, world_size=1, device=torch.device("cpu")), open_model(folder), Log(1))


def test_prompts_without_images_are_refused(folder: Path) -> None:
    config = _config(folder, train=TrainOptions(sample_prompts=("ab",), sample_every=2))
    tokenizer, decoder = load_tokenizer(folder), open_model(folder).decoder
    with pytest.raises(UserError, match="has no image, but the model's layers attend to one"):
        read_prompts(config, tokenizer, decoder, read_vision_family(folder, tokenizer))
    with pytest.raises(UserError, match="prompt 1 has no image, but every layer of this cogagent model"):
        check_requests([Request(row=0, ids=(1, 5))], decoder, 2)
