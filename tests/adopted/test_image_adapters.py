"""Adapters on the language model and the tower of adopted models, read by PEFT and merged: logits with images; and what
of a tower has no gradient."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.adopted.config import adopted_config
from engine.adopted.images.arguments import forward_arguments
from engine.adopted.images.inputs import ImageInputs
from engine.adopted.images.made_up import made_up_images
from engine.adopted.proof import packed
from engine.adopted.structure import quiet
from engine.batch import Batch
from engine.checkpoint.loading import load_parameters
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import open_run
from engine.conversion.import_export import export_hf
from engine.conversion.live_logits import Overlay, adapter_plan
from engine.conversion.merged_model import MergedSource
from engine.conversion.peft_write import export_peft
from engine.conversion.proof import prove_adapter, prove_model
from engine.files.documents import read_json
from engine.layers.context import TensorLayout
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder, build_decoder
from tests.adopted.image_models import save_image_model
from tests.unit.test_checkpoint_peft import RANK, trained_run

SCALE = 5.0 / RANK


@torch.no_grad()
def _ours(model: Decoder, batch: Batch) -> Tensor:
    context = model.context(batch, torch.zeros((), dtype=torch.int64), training=False)
    return model.logits(model.run_layers(model.embed(batch), context), context).flatten(0, -2)


@torch.no_grad()
def _stock(model: nn.Module, batch: Batch) -> Tensor:
    return _logits(model, batch)


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    given = forward_arguments(model, batch.tokens_BS, batch.part(ImageInputs))
    logits: Tensor = model(input_ids=batch.tokens_BS, **given).logits
    return logits[0]


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "glm4v"])
def test_peft_and_transformers_compute_with_exported_towers(model_type: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    stock, folder = save_image_model(model_type, tmp_path / "hf", std=0.2), tmp_path / "hf"
    base, drawn = open_source(folder), torch.Generator().manual_seed(2)
    model, config = base.model, base.model.decoder
    queries = [name.removesuffix(".weight") for name in base.tensor_names() if name.endswith("q_proj.weight")]
    factors = {}
    for name in (*config.vision_linears(), *queries):
        outputs, inputs = base.shape(f"{name}.weight")
        for leaf, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
            factors[f"{name}.{leaf}"] = torch.randn(shape, generator=drawn) * 0.1
    trained = open_run(trained_run(tmp_path / "run", factors, folder))
    live = build_decoder(
        config,
        layout=TensorLayout(),
        plan=adapter_plan(trained.trained(), SCALE),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    load_parameters((entry.shard for entry in shard_entries(live)), Overlay(trained.trained(), base))
    made_up = made_up_images(read_json(folder / "config.json"), stock)
    batch = packed([made_up.tokens]).with_parts(made_up.images)
    found = _ours(live, batch)

    proof = partial(prove_adapter, base=base, trained=trained.trained(), scale=SCALE)
    report = export_peft(trained.trained(), trained.lora, model, tmp_path / "adapter", proof=proof)
    assert "checked with PEFT" in report.notes[-1]
    merged = MergedSource(model, base, trained.trained(), scale=SCALE)
    report = export_hf(merged, tmp_path / "merged", proof=partial(prove_model, source=merged))
    assert "checked with transformers" in report.notes[-1]
    with quiet():
        plain = AutoModelForImageTextToText.from_pretrained(folder).eval()
        whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    assert (found - _stock(plain, batch)).abs().max() > 1e-1
    torch.testing.assert_close(found, _stock(whole, batch), rtol=1e-5, atol=1e-4)
    adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(found, _stock(adapted.get_base_model(), batch), rtol=1e-5, atol=1e-4)


def test_layers_behind_the_one_that_is_taken_are_known(tmp_path: Path) -> None:
    """Eight layers in the tower, more than the small model has, of which the last two have no gradient."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    save_image_model("llava", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.vision_config.num_hidden_layers, config.vision_feature_layer = 8, -3
    config.save_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_config(config)
    made_up = made_up_images(read_json(tmp_path / "config.json"), model)
    batch = packed([made_up.tokens]).with_parts(made_up.images)
    _logits(model, batch).sum().backward()
    dead = {name.rpartition(".")[0] for name, one in model.named_parameters() if one.grad is None}
    known = adopted_config(read_json(tmp_path / "config.json")).unread_modules
    assert {f"model.{name.removeprefix('vision.')}" for name in known} == dead
    assert {name.split(".")[4] for name in dead if ".layers." in name} == {"6", "7"}
