"""Nemotron-H: the corrections of its routers, which differ by less than bfloat16 tells apart, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import open_run
from engine.choices import AdapterForm
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.conversion.peft_write import export_peft
from engine.errors import UserError
from engine.hybrids.families.nemotron import nemotron_h
from engine.models.families import family_of
from tests.support.family_models import batch_of, engine_model, make_model, stock_losses
from tests.support.half_model import frozen_parameters
from tests.unit.test_checkpoint_peft import trained_run

KEY = "backbone.layers.1.mixer.gate.e_score_correction_bias"


def test_corrections_near_64_stay_in_fp32(tmp_path: Path) -> None:
    model = make_model("nemotron h", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    corrections = 64.0 + torch.linspace(-0.1, 0.1, 6)
    assert len(corrections.to(torch.bfloat16).unique()) == 1
    dict(model.named_buffers())["model.layers.1.mixer.gate.e_score_correction_bias"].copy_(corrections)
    tensors = {**load_file(path), KEY: corrections}
    save_file(tensors, path, {"format": "pt"})
    built, batch = engine_model(tmp_path / "hf"), batch_of()
    with torch.no_grad():
        losses = built.model(batch, built.stage.step, training=False)
        _, expected = stock_losses(model, batch)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-4)
    # a run in bfloat16, of a base that was partitioned and a checkpoint that is written of it
    save_file({key: one if key == KEY else one.bfloat16() for key, one in tensors.items()}, path, {"format": "pt"})
    import_checkpoint(open_source(tmp_path / "hf"), tmp_path / "parts", tensor=2)
    source = open_source(tmp_path / "parts")
    (correction,) = (one for name, one in frozen_parameters(source).items() if "correction" in name)
    assert correction.dtype == torch.float32 and torch.equal(correction, corrections)
    export_hf(source, tmp_path / "back")
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")[KEY], corrections)


def test_a_pattern_of_letters_is_a_list_of_layers() -> None:
    sizes = {"hidden_size": 40, "num_attention_heads": 4, "vocab_size": 67, "n_group": 1}
    config = nemotron_h({**sizes, "hybrid_override_pattern": "ME*-M"})
    listed = ["mamba", "moe", "attention", "mlp", "mamba"]
    assert config == nemotron_h({**sizes, "layers_block_type": listed}) and config.num_layers == 5


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("per_expert", "PEFT does not stack the experts' adapters of a nemotron_h model"),
        ("stacked", "the experts of a nemotron_h model have no gates"),
    ],
)
def test_peft_reads_no_adapters_of_experts(form: AdapterForm, words: str, tmp_path: Path) -> None:
    """It knows neither their modules nor stacks without gates, and would fail or compute without them."""
    make_model("nemotron h", tmp_path / "hf")
    built = engine_model(tmp_path / "hf", trained="", adapters=r"layers\..*experts\..*_proj")
    run = open_run(trained_run(tmp_path / "run", built.parameters(), tmp_path / "hf"))
    with pytest.raises(UserError, match=words):
        export_peft(run.trained(), run.lora, open_source(tmp_path / "hf").model, tmp_path / "adapter", form=form)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"moe_latent_size": 8, "mlp_bias": True}, "moe_latent_size 8 and mlp_bias true"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
        ({"hybrid_override_pattern": "MX"}, "layers of type 'X'"),
        ({"n_groups": 3}, "128 Mamba heads and 3 groups"),
    ],
)
def test_what_is_not_computed_is_refused(more: dict[str, object], words: str) -> None:
    sizes = {"hidden_size": 40, "num_attention_heads": 4, "vocab_size": 67}
    with pytest.raises(UserError, match=words):
        nemotron_h({**sizes, **more})


def test_experts_of_a_narrower_stream_are_adopted_where_linears_around_them_have_biases(tmp_path: Path) -> None:
    make_model("nemotron h latent", tmp_path / "latent")
    stock = make_model("nemotron h latent", tmp_path / "biased", mlp_bias=True)
    assert open_source(tmp_path / "latent").model.implementation == "native"
    assert open_source(tmp_path / "biased").model.implementation == "adopted"
    with pytest.raises(UserError, match="set model.implementation to auto"):
        family, text = family_of(stock.config.to_dict(), "native")
        family.config_from_hf(text)
