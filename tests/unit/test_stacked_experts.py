"""Checkpoints with all experts of a layer in one tensor: as transformers' modules have them, and gpt-oss in MXFP4."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.checkpoint.held_tensors import HeldTensors
from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.conversion.low_precision.kept_format import stored_format
from engine.conversion.low_precision.proof import prove_low
from engine.conversion.merged_model import MergedSource
from engine.errors import UserError
from engine.quantization.shipped.config import encoding_of
from tests.support.family_models import batch_of, engine_model, make_model, stock_losses
from tests.support.sweeps import sampled

STACKED = ("mixtral", "qwen2 moe", "qwen3 moe", "glm4 moe")


@pytest.mark.parametrize("name", sampled(STACKED, ["mixtral", "glm4 moe"]))
def test_stacked_experts_there_and_back_are_bit_identical(name: str, tmp_path: Path) -> None:
    """Taking up's rows for gate's, or an expert for its neighbour, is another weight."""
    model = make_model(name, tmp_path / "apart")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    before = load_file(tmp_path / "stacked" / "model.safetensors")
    assert any(key.endswith(".mlp.experts.gate_up_proj") for key in before)
    apart, stacked = open_source(tmp_path / "apart"), open_source(tmp_path / "stacked")
    assert apart.tensor_names() == stacked.tensor_names()
    assert all(torch.equal(apart.read_whole(key), stacked.read_whole(key)) for key in apart.tensor_names())
    import_checkpoint(stacked, tmp_path / "parts", tensor=2)
    export_hf(open_source(tmp_path / "parts"), tmp_path / "back")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(value.dtype == after[key].dtype and torch.equal(value, after[key]) for key, value in before.items())


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A gpt-oss model whose experts are random codes, as released ones are stored."""
    folder = tmp_path / "released"
    make_model("gpt oss", folder, hidden_size=64, intermediate_size=32)
    tensors = {key: value.bfloat16() for key, value in load_file(folder / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(3)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(key).shape
        groups = (experts, outputs, inputs // 32)
        codes = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{key}_blocks"] = codes
        tensors[f"{key}_scales"] = torch.randint(122, 126, groups, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]  # as released
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_codes_mean_what_transformers_decodes() -> None:
    """Every byte, and scales to the ends of what bfloat16 has: swapping the halves of a byte moves most numbers."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 8, 16, 16)
    scales = torch.tensor([2, 60, 119, 126, 127, 128, 190, 250], dtype=torch.uint8)[None, :, None].expand(1, 8, 16)
    expected = convert_moe_packed_tensors(codes, scales)[0].t()
    spelling = encoding_of({"quantization_config": {"quant_method": "mxfp4"}}).spelling("mlp.experts.down_proj")
    tensors, out = {"_blocks": codes[0], "_scales": scales[0]}, torch.empty(expected.shape, dtype=torch.bfloat16)
    spelling.decode(tensors, tuple(expected.shape), *(slice(0, size) for size in expected.shape), out)
    assert torch.equal(out, expected)


def test_released_gpt_oss_keeps_its_format(released: Path, tmp_path: Path) -> None:
    """Unchanged byte for byte; an expert whose gate was trained has new codes in every second row of its own."""
    source = open_source(released)
    low = stored_format(source, None)
    report = export_hf(source, tmp_path / "same", low=low, proof=partial(prove_low, source=source, low=low))
    assert report.notes[-1].startswith("checked with transformers") and len(report.notes) == 1, report.notes
    before, after = (load_file(folder / "model.safetensors") for folder in (released, tmp_path / "same"))
    assert before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())
    name, place = "layers.0.mlp.experts.1.gate_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"
    trained = HeldTensors({name: 1.5 * source.read_whole(name).float()}, "held")
    merged = MergedSource(source.model, source, trained, scale=0.0)
    export_hf(merged, tmp_path / "trained", low=stored_format(merged, None))
    after = load_file(tmp_path / "trained" / "model.safetensors")
    changed = (before[f"{place}_blocks"] != after[f"{place}_blocks"]).flatten(2).any(2)
    assert changed[1, ::2].all() and not changed[1, 1::2].any() and not changed[[0, *range(2, len(changed))]].any()
    decoded = convert_moe_packed_tensors(after[f"{place}_blocks"], after[f"{place}_scales"])[1, :, ::2].t().float()
    wanted = 1.5 * source.read_whole(name).float()
    assert (decoded - wanted).norm() < 0.15 * wanted.norm()


def test_released_gpt_oss_is_read_decoded(released: Path, tmp_path: Path) -> None:
    source = open_source(released)
    assert source.notes == [
        "weights are stored in few bits (8 tensors in MXFP4), and were decoded: they are bfloat16 here, and "
        "quantization_config is gone"
    ]
    report = import_checkpoint(source, tmp_path / "parts", tensor=2)
    assert report.notes == tuple(source.notes)
    export_hf(open_source(tmp_path / "parts"), tmp_path / "back")
    export_hf(source, tmp_path / "direct")
    before = load_file(released / "model.safetensors")
    for folder in (tmp_path / "back", tmp_path / "direct"):
        after = load_file(folder / "model.safetensors")
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
        for key, value in after.items():
            assert value.dtype == torch.bfloat16
            if f"{key}_blocks" in before:
                expected = convert_moe_packed_tensors(before[f"{key}_blocks"], before[f"{key}_scales"])
                assert torch.equal(value, expected), key
            else:
                assert torch.equal(value, before[key]), key
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval().float()
    built, batch = engine_model(released), batch_of()
    with torch.no_grad():
        context = built.model.context(batch, built.stage.step, training=False)
        logits = built.model.logits(built.model.run_layers(built.model.embed(batch), context), context)
        expected, _ = stock_losses(stock, batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.layers.1.mlp.experts.down_proj_scales", "lacks model.layers.1.mlp.experts.down_proj_scales"),
        ("model.layers.1.mlp.experts.down_proj_blocks", "_blocks with shape .*, of which no matrix is made"),
        ("model.layers.1.mlp.experts.gate_up_proj_bias", "_bias with shape .* but its config.json calls for"),
    ],
)
def test_other_shapes_are_refused(key: str, words: str, released: Path) -> None:
    tensors = load_file(released / "model.safetensors")
    value = tensors.pop(key)
    if "lacks" not in words:
        tensors[key] = value[:4]
    save_file(tensors, released / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=words):
        open_source(released)
