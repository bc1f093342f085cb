"""Merges: against plain arithmetic and stock PEFT; what rounding does is told; nothing trained is dropped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.checkpoint.model_weights import open_source
from engine.checkpoint.weight_source import WeightSource
from engine.conversion import add_adapter as merging
from engine.conversion.add_adapter import summary
from engine.conversion.decoded_base import DecodedSource, encoded_names
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.conversion.merged_model import MergedSource
from engine.conversion.peft_read import AdapterSource
from engine.conversion.proof import prove_model
from engine.errors import UserError
from engine.quantization.encoding import ENCODING_NAMES, encoding
from tests.support.shared_scales import encoded_whole
from tests.unit.checkpoint_models import hf_name, tiny_llama
from tests.unit.test_checkpoint_source import load_folder

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = torch.arange(24).view(2, 12)


def stock_adapter(base: Path, out: Path, **settings: object) -> PeftModel:
    """An adapter saved by PEFT, every value of it drawn, and modules trained in full changed."""
    torch.manual_seed(3)
    config = LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **{"target_modules": LINEARS, **settings})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3 if "lora_" in name else 0.4)
    model.save_pretrained(out)
    return model.eval()


def merged_source(base: WeightSource, adapter: Path) -> MergedSource:
    source = AdapterSource(adapter, names=base.model.names, decoder=base.model.decoder, with_saved_modules=True)
    base = source.on(base)
    return MergedSource(base.model, base, source, scale=source.settings.scale)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block_bytes", [1 << 20, 200])
def test_rounded_once_and_the_rounding_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block_bytes: int
) -> None:
    monkeypatch.setattr(merging, "_BLOCK_BYTES", block_bytes)
    tiny_llama(tmp_path / "hf", dtype=dtype)
    stock_adapter(tmp_path / "hf", tmp_path / "adapter")
    import_checkpoint(open_source(tmp_path / "hf"), tmp_path / "tp2", tensor=2)
    report = export_hf(merged_source(open_source(tmp_path / "tp2"), tmp_path / "adapter"), tmp_path / "out")
    before, after = load_folder(tmp_path / "hf"), load_folder(tmp_path / "out")
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(report.rounding) == 2 * 7
    for logical, told in report.rounding.items():
        name = hf_name(logical)
        key = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = factors[f"{key}.lora_A.weight"].double(), factors[f"{key}.lora_B.weight"].double()
        update = 5 / 3 * b @ a
        exact = before.pop(name).double() + update
        stored = after.pop(name)
        assert stored.dtype == dtype
        unit = torch.finfo(dtype).eps / 2 + 4e-7  # half a step, and fp32 sums of products
        assert ((stored.double() - exact).abs() <= unit * exact.abs() + 4e-7).all(), name
        error = stored.double() - exact
        assert told["max_error"] == pytest.approx(float(error.abs().max()), rel=1e-2, abs=1e-6)
        assert told["relative_error"] == pytest.approx(float(error.norm() / exact.norm()), rel=1e-2, abs=1e-6)
        assert told["update_norm"] == pytest.approx(float(update.norm()), rel=1e-5)
        assert told["error_of_update"] == pytest.approx(float(error.norm() / update.norm()), rel=1e-2, abs=1e-6)
        if dtype == torch.float32:
            assert told["max_error"] == 0
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    written = json.loads((tmp_path / "out" / "merge_report.json").read_text())
    assert written["tensors"] == report.rounding and written["scale"] == pytest.approx(5 / 3)
    text = summary(report.rounding)
    worst = max(each["max_error"] for each in report.rounding.values())
    told = f"{worst:.2e}" if worst else "merged exactly"
    assert text.startswith("14 tensors merged") and told in text and "\n" not in text
    # the report is about this folder, and does not travel with the model
    import_checkpoint(open_source(tmp_path / "out"), tmp_path / "again", tensor=1)
    assert not (tmp_path / "again" / "merge_report.json").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_trained_beside_the_adapter_is_merged(tmp_path: Path, tied: bool) -> None:
    tiny_llama(tmp_path / "hf", tied=tied)
    peft = stock_adapter(tmp_path / "hf", tmp_path / "adapter", modules_to_save=["lm_head"])
    base = open_source(tmp_path / "hf")
    with pytest.raises(UserError, match="modules_to_save"):
        AdapterSource(tmp_path / "adapter", names=base.model.names, decoder=base.model.decoder)
    source = merged_source(base, tmp_path / "adapter")
    report = export_hf(source, tmp_path / "out", proof=lambda folder: prove_model(folder, source))
    assert "checked with transformers" in report.notes[-1] and (len(report.notes) == 2) == tied
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(logits(model.eval()), logits(peft), rtol=0, atol=1e-4)
    trained = load_folder(tmp_path / "out")["lm_head.weight"]
    assert not torch.equal(trained, load_folder(tmp_path / "hf")[hf_name("embed_tokens.weight")])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not config["tie_word_embeddings"]


@pytest.mark.parametrize("name", ENCODING_NAMES)
@pytest.mark.parametrize("partitioned", [False, True])
def test_an_encoded_base_is_merged_as_it_was_trained(tmp_path: Path, name: str, partitioned: bool) -> None:
    tiny_llama(tmp_path / "hf")
    stock_adapter(tmp_path / "hf", tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    folder = tmp_path / "hf"
    if partitioned:
        folder = tmp_path / "tp2"
        import_checkpoint(open_source(tmp_path / "hf"), folder, tensor=2)
    base = open_source(folder)
    names = encoded_names(base.model.decoder, name)
    assert len(names) == 2 * 7 and "layers.1.mlp.gate_proj.weight" in names
    decoded = DecodedSource(base, name)
    source = merged_source(decoded, tmp_path / "adapter")
    export_hf(source, tmp_path / "out", proof=lambda folder: prove_model(folder, source))
    before, after = load_folder(tmp_path / "hf"), load_folder(tmp_path / "out")
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    codec, shapes = encoding(name), {logical: base.shape(logical) for logical in names}
    for logical in base.tensor_names():
        expected = before[hf_name(logical)]
        if logical in names:
            weight = expected
            expected = torch.empty_like(weight)
            parts = encoded_whole(codec, logical, shapes, lambda one, shape: before[hf_name(one)])
            codec.decode(parts, expected)  # the whole matrix at once
            assert not torch.equal(expected, weight)
        key = f"base_model.model.{hf_name(logical).removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in factors:
            expected = expected + 5 / 3 * factors[f"{key}B.weight"] @ factors[f"{key}A.weight"]
        torch.testing.assert_close(after[hf_name(logical)], expected, rtol=1e-6, atol=1e-6)


def test_weights_trained_in_full_stay_out_of_the_encoding(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    decoder = open_source(tmp_path / "hf").model.decoder
    some = encoded_names(decoder, "int8", ["layers.0.mlp.down_proj.weight", "norm.weight"])
    assert encoded_names(decoder, "int8").keys() - some.keys() == {"layers.0.mlp.down_proj.weight"}


def test_a_damaged_partition_is_not_merged(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    stock_adapter(tmp_path / "hf", tmp_path / "adapter")
    import_checkpoint(open_source(tmp_path / "hf"), tmp_path / "tp2", tensor=2)
    path = tmp_path / "tp2" / "tensor_01_of_02.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="is damaged"):
        export_hf(merged_source(open_source(tmp_path / "tp2"), tmp_path / "adapter"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_training_made_of_nothing_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    stock_adapter(tmp_path / "hf", tmp_path / "adapter", modules_to_save=["lm_head"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    head = "base_model.model.lm_head.weight"
    for value, words in ((0.0, "is all zero after training"), (math.nan, "is not finite after training")):
        save_file({**tensors, head: torch.full_like(tensors[head], value)}, path, {"format": "pt"})
        with pytest.raises(UserError, match=f"lm_head.weight {words}"):
            export_hf(merged_source(open_source(tmp_path / "hf"), tmp_path / "adapter"), tmp_path / "out")
