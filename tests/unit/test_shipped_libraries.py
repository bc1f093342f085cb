"""Models in few bits as transformers, ModelOpt, GPTQ and AWQ store them, and what is refused in them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.conversion.low_precision.kept_format import stored_format
from engine.errors import UserError
from engine.quantization.shipped.config import encoding_of
from engine.quantization.shipped.floats import Floats
from tests.support.family_models import batch_of, engine_model, stock_losses
from tests.support.format_parts import SPELLINGS, drawn_parts
from tests.support.shipped_models import compressed_model, fp8_model, rewritten, small_model, stored_words
from tests.unit.test_shipped_encodings import (
    assert_cuts_join,
    assert_stores,
    decoded,
    same_as_stock,
    shards,
    stock_weights,
    whole,
)

MOE = {"moe_intermediate_size": 128, "num_experts": 4}
LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 96, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "moe_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3", "qwen3 moe", "deepseek v3"])
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_fp8_in_blocks_has_transformers_bits(name: str, scale_fmt: str, tmp_path: Path) -> None:
    from transformers import FineGrainedFP8Config

    more: dict[str, Any] = {"qwen3 moe": MOE, "deepseek v3": {**LATENT, "head_dim": None}}.get(name, {})
    fp8_model(tmp_path, name, block=32, scale_fmt=scale_fmt, **more)
    source, stored = open_source(tmp_path), load_file(tmp_path / "model.safetensors")
    config = FineGrainedFP8Config(weight_block_size=(32, 32), scale_fmt=scale_fmt, dequantize=True)
    same_as_stock(source, stock_weights(tmp_path, quantization_config=config))
    assert_stores(source, stored)
    names = [key for key in source.tensor_names() if source.format(key) is not None]
    scales = {source.format(key).scale_dtype for key in names}
    assert scales == {torch.uint8 if scale_fmt == "ue8m0" else torch.float32}
    for key in names[-3:]:
        assert_cuts_join(source, key, 2)


def drawn(*shape: int, most: int = 16) -> Tensor:
    return torch.randint(0, most, shape, dtype=torch.uint8)


def replaced(folder: Path, name: str, make: Any, config: dict[str, Any], **more: Any) -> dict[str, Tensor]:
    """Writes a model whose linears are what `make` returns for [O, I]: stored tensors by ending, and their numbers.

    Returns:
        The numbers by the names of weights.
    """
    torch.manual_seed(5)
    small_model(name, **more).save_pretrained(folder)
    expected = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("proj.weight")]:
            stored, expected[key] = make(*tensors.pop(key).shape)
            tensors.update({key.removesuffix(".weight") + ending: value for ending, value in stored.items()})

    rewritten(folder, change, quantization_config=config)
    return expected


def assert_numbers(folder: Path, expected: dict[str, Tensor], *, cuts: bool = True) -> None:
    """Asserts that a model's linears are the numbers of arithmetic, and its parts those of the files."""
    source, stored = open_source(folder), load_file(folder / "model.safetensors")
    for name in source.tensor_names():
        own = source.model.names.to_hf(name).name
        assert torch.equal(source.read_whole(name), expected[own] if own in expected else stored[own]), name
    if cuts:
        assert_stores(source, stored)
        assert_cuts_join(source, "layers.1.attention.k_proj.weight", 2)
        assert_cuts_join(source, "layers.1.mlp.down_proj.weight", 4)


def gptq(rows: int, columns: int, *, group: int, v2: bool, sym: bool, shuffled: bool = False) -> Any:
    """GPTQ's tensors and numbers, both from codes: q less z, times s."""
    groups = columns // group
    codes, scales = drawn(rows, columns), torch.rand(rows, groups).half()
    zeros = torch.full((rows, groups), 8) if sym else drawn(rows, groups, most=15) + 1
    of = torch.arange(columns) // group
    of = of[torch.randperm(columns)] if shuffled else of
    stored = {
        ".qweight": stored_words(codes).t(), ".scales": scales.t(), ".g_idx": of.int(),
        ".qzeros": stored_words((zeros if v2 else zeros - 1).t()),
    }  # fmt: skip
    return stored, ((codes.float() - zeros[:, of]) * scales.float()[:, of]).bfloat16()


@pytest.mark.parametrize(("v2", "sym"), [(False, True), (False, False), (True, False)])
def test_gptq(v2: bool, sym: bool, tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": sym, "desc_act": False}
    config |= {"checkpoint_format": "gptq_v2"} if v2 else {}
    numbers = replaced(tmp_path, "llama fused", lambda o, i: gptq(o, i, group=32, v2=v2, sym=sym), config)
    assert_numbers(tmp_path, numbers)


def test_gptq_in_shuffled_groups_is_decoded(tmp_path: Path) -> None:
    """What act-order leaves; no format has it, so that it cannot stay encoded."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    assert_numbers(
        tmp_path,
        replaced(tmp_path, "qwen3", lambda o, i: gptq(o, i, group=32, v2=False, sym=False, shuffled=True), config),
        cuts=False,
    )
    with pytest.raises(UserError, match=r"q_proj.weight: columns are in groups in another order .*desc_act"):
        open_source(tmp_path).format("layers.0.attention.q_proj.weight")


def awq(rows: int, columns: int) -> Any:
    """AWQ's tensors and numbers, from codes: rows 0 2 4 6 1 3 5 7 of each eight lie in an int32."""
    groups, order = columns // 64, (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros, scales = drawn(rows, columns), drawn(rows, groups), torch.rand(rows, groups).half()
    stored = {
        ".qweight": stored_words(codes.t(), order), ".qzeros": stored_words(zeros.t(), order), ".scales": scales.t()
    }  # fmt: skip
    shift = codes.float() - zeros.float().repeat_interleave(64, 1)
    return stored, (shift * scales.float().repeat_interleave(64, 1)).bfloat16()


def test_awq(tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    assert_numbers(tmp_path, replaced(tmp_path, "llama fused", awq, config))


def static_fp8(ending: str) -> Any:
    """FP8 with a scalar beside the weight, as Mistral (`weight_scale_inv`) and vLLM's quantiser store it."""

    def make(rows: int, columns: int) -> Any:
        stored, numbers = fp8(rows, columns)
        return {
            ".weight": stored[".weight"],
            ending: stored[".weight_scale"],
            ".activation_scale": torch.ones(()),
        }, numbers

    return make


@pytest.mark.parametrize("ending", [".weight_scale", ".weight_scale_inv"])
def test_fp8_without_blocks(ending: str, tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    assert_numbers(tmp_path, replaced(tmp_path, "qwen3", static_fp8(ending), config))


def test_biases_of_zeros_that_gptq_adds_are_named(tmp_path: Path) -> None:
    """Its packed linears have one each; one that is no zeros is a tensor that nothing reads."""
    config, bias = {"quant_method": "gptq", "bits": 4, "group_size": 32}, "model.layers.1.mlp.up_proj.bias"
    replaced(tmp_path, "qwen3", lambda o, i: gptq(o, i, group=32, v2=False, sym=True), config)
    rewritten(tmp_path, lambda tensors: tensors.update({bias: torch.zeros(256)}))
    assert f"1 tensor of no effect not read: {bias}" in (open_source(tmp_path).encoding_note(decodes=False) or "")
    rewritten(tmp_path, lambda tensors: tensors.update({bias: torch.ones(256)}))
    with pytest.raises(UserError, match=f"has {bias}, which a qwen3 model"):
        open_source(tmp_path)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def nvfp4(rows: int, columns: int) -> Any:
    """ModelOpt's NVFP4: the first of two codes in the lower half, scales that a scalar multiplies."""
    codes = drawn(rows, columns)
    scales, whole_scale = (torch.rand(rows, columns // 16) * 100).to(torch.float8_e4m3fn), torch.rand(()) / 100
    stored = {
        ".weight": codes[:, ::2] | codes[:, 1::2] << 4, ".weight_scale": scales, ".weight_scale_2": whole_scale,
        ".input_scale": torch.rand(()),
    }  # fmt: skip
    return stored, (E2M1[codes.long()] * (scales.float() * whole_scale).repeat_interleave(16, 1)).bfloat16()


def fp8(rows: int, columns: int) -> Any:
    """ModelOpt's FP8: a scalar, and one for the activations."""
    codes, scale = torch.randn(rows, columns).to(torch.float8_e4m3fn), torch.rand(())
    stored = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.rand(())}
    return stored, (codes.float() * scale).bfloat16()


def fp8_per_channel_per_token(rows: int, columns: int) -> Any:
    """ModelOpt's FP8 with a scale a row, in one dimension."""
    codes, scales = torch.randn(rows, columns).to(torch.float8_e4m3fn), torch.rand(rows)
    return {".weight": codes, ".weight_scale": scales}, (codes.float() * scales[:, None]).bfloat16()


def fp8_pb_wo(rows: int, columns: int) -> Any:
    """ModelOpt's FP8 in blocks, whose scales have four dimensions."""
    codes, scales = torch.randn(rows, columns).to(torch.float8_e4m3fn), torch.rand(rows // 128, 1, columns // 128, 1)
    wide = scales[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {".weight": codes, ".weight_scale": scales}, (codes.float() * wide).bfloat16()


def mxfp4(rows: int, columns: int) -> Any:
    """ModelOpt's MXFP4: NVFP4's codes, a power of two for 32."""
    codes, exponents = drawn(rows, columns), drawn(rows, columns // 32, most=9) + 123
    numbers = E2M1[codes.long()] * (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 1)
    stored = {".weight": codes[:, ::2] | codes[:, 1::2] << 4, ".weight_scale": exponents}
    return stored, numbers.bfloat16()


@pytest.mark.parametrize("make", [fp8_per_channel_per_token, fp8_pb_wo, mxfp4])
def test_modelopts_scales_keep_their_dimensions(make: Any, tmp_path: Path) -> None:
    """ModelOpt 0.47 writes them so, the names of two algorithms in lower case, and vLLM asks for these shapes."""
    algorithm = make.__name__ if make is not fp8_per_channel_per_token else make.__name__.upper()
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    numbers = replaced(tmp_path, "qwen3", make, config, hidden_size=256, head_dim=64)
    assert_numbers(tmp_path, numbers, cuts=False)
    assert_stores(open_source(tmp_path), load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("make", [nvfp4, fp8])
def test_modelopt_by_its_own_file(make: Any, tmp_path: Path) -> None:
    """Where config.json has no quantization_config; scales of the cache and of activations are named."""
    algorithm = {"quant_algo": make.__name__.upper(), "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
    numbers = replaced(tmp_path, "qwen3", make, {"quant_algo": algorithm["quant_algo"], "ignore": ["lm_head"]})
    rewritten(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.k_scale": torch.ones(())}))
    written = json.loads((tmp_path / "config.json").read_text())
    del written["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": algorithm}))
    assert_numbers(tmp_path, numbers)
    note = open_source(tmp_path).encoding_note(decodes=True) or ""
    assert "15 tensors of no effect not read: model.layers.0.mlp.down_proj.input_scale" in note
    assert "hf_quant_config.json" not in [file.name for file in open_source(tmp_path).model.companions().files]


def test_modelopt_mixes_formats_by_layer(tmp_path: Path) -> None:
    layers: dict[str, Any] = {}

    def make(rows: int, columns: int) -> Any:
        return nvfp4(rows, columns) if rows == columns else fp8(rows, columns)

    for layer in range(2):
        for module in ("self_attn.q_proj", "self_attn.o_proj"):
            layers[f"model.layers.{layer}.{module}"] = {"quant_algo": "NVFP4", "group_size": 16}
        for module in ("self_attn.k_proj", "self_attn.v_proj", "mlp"):
            layers[f"model.layers.{layer}.{module}"] = {"quant_algo": "FP8"}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert_numbers(tmp_path, replaced(tmp_path, "llama fused", make, config))
    by_config, source = open_source(tmp_path).model, open_source(tmp_path)
    assert by_config.hf_config.get("quantization_config") is None
    assert source.format("layers.0.attention.q_proj.weight").name == "nvfp4"
    assert source.format("layers.0.mlp.up_proj.weight").name == "fp8_channel"


def deepseek(rows: int, columns: int) -> Any:
    """Blocks of 48 x 80, of which the last ones are short, with scales in bfloat16 as Qwen has them."""
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 48), -(-columns // 80)).bfloat16()
    every = scales.float().repeat_interleave(48, 0)[:rows].repeat_interleave(80, 1)[:, :columns]
    return {".weight": codes, ".weight_scale_inv": scales}, (codes.float() * every).bfloat16()


def test_short_blocks(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [48, 80], "modules_to_not_convert": ["lm_head"]}
    numbers = replaced(tmp_path, "llama fused", deepseek, config)
    assert_numbers(tmp_path, numbers, cuts=False)
    source = open_source(tmp_path)
    assert_stores(source, load_file(tmp_path / "model.safetensors"))
    name = "layers.0.mlp.up_proj.weight"
    kind = source.format(name)
    spec = shards(source.shape(name), 4)[1]  # rows 64 to 128, which begin 16 rows before a block does
    own = replace(kind, granule=16)
    assert torch.equal(decoded(own, source.read_parts(name, spec, own), (64, 128)), source.read_whole(name)[64:128])
    with pytest.raises(UserError, match="one scale for 48 rows, and a cut at row 64 divides such a block"):
        source.read_parts(name, spec, replace(kind, granule=48))


def test_experts_of_gpt_oss_stay_encoded(tmp_path: Path) -> None:
    """Gate and up alternate in one tensor of codes; parts and cuts of each expert are its own rows."""
    small_model("gpt oss", intermediate_size=64, num_local_experts=3).save_pretrained(tmp_path)

    def change(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.endswith(("gate_up_proj", "experts.down_proj"))]:
            experts, inputs, outputs = tensors.pop(key).shape
            tensors[f"{key}_blocks"] = drawn(experts, outputs, inputs // 32, 16, most=256)
            tensors[f"{key}_scales"] = drawn(experts, outputs, inputs // 32, most=10) + 120

    rewritten(tmp_path, change, quantization_config={"quant_method": "mxfp4"})
    source, stored = open_source(tmp_path), load_file(tmp_path / "model.safetensors")
    assert source.format("layers.0.attention.q_proj.weight") is None
    for expert in range(3):
        for module in ("gate_proj", "up_proj", "down_proj"):
            assert_cuts_join(source, f"layers.0.mlp.experts.{expert}.{module}.weight", 2)
    halves = [f"layers.1.mlp.experts.2.{part}_proj.weight" for part in ("gate", "up")]
    spelling = source.spelling(halves[0])
    gate, up = (source.read_parts(name, whole(source, name), spelling.format) for name in halves)
    together = {part: torch.stack((gate[part], up[part]), 1).flatten(0, 1) for part in gate}
    for ending, value in spelling.store(together, 128).items():
        assert torch.equal(value, stored[f"model.layers.1.mlp.experts.gate_up_proj{ending}"][2]), ending


def pack_quantized(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32, **weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "bits": ({"quant_method": "gptq", "bits": 3}, "quantization_config.bits 3, but 4 or 8 is read"),
    "marlin": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin', but gptq or"
    ),
    "group": ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size 'x', but a whole number above 0"),
    "dynamic": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down": {"bits": 8}}}, "patterns that begin with -:"
    ),
    "gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv', but gemm is read"),
    "no zeros": ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point false, but true is read"),
    "block": ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size .128., but two whole numbers"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2', but e4m3 is read"),
    "fp4 experts": ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4', but fp8 is read"),
    "awq of modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ', but NVFP4"),
    "six bits": (
        {
            "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
            "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 6}}},
        },
        "a.weights.num_bits 6, but 4 or 8 is read",
    ),
    "no groups": ({"quant_method": "compressed-tensors"}, "quantization_config.config_groups null, but a mapping"),
    "two bits": (pack_quantized(num_bits=2), "group_0.weights.num_bits 2, but 4 or 8 is read"),
    "act order": (pack_quantized(actorder="group"), "weights.actorder 'group', but null, weight or static"),
    "format": ({**pack_quantized(), "format": "marlin-24"}, "format 'marlin-24', but one of nvfp4-pack-quantized"),
    "sparse": ({**pack_quantized(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config .*none"),
    "rotated": ({**pack_quantized(), "transform_config": {"config_groups": {"R1": {}}}}, "transform_config .*none"),
    "pattern": (
        {**pack_quantized(), "ignore": ["re:("]}, r"with the regular expression '\(', which is none .*: correct it"
    ),
    "target": (
        {**pack_quantized(), "config_groups": {"a": {"targets": "Linear"}}}, "a.targets 'Linear', but a list of texts"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_configs_that_are_not_read_are_refused_by_key(case: str, tmp_path: Path) -> None:
    config, words = WRONG[case]
    small_model("llama fused").save_pretrained(tmp_path)
    rewritten(tmp_path, lambda tensors: None, quantization_config=config)
    with pytest.raises(UserError, match=words) as error:
        open_source(tmp_path)
    assert str(error.value).count("\n") == 0 and str(error.value).endswith(".")


def test_blocks_are_written_in_two_ways() -> None:
    """`128x64` is older compressed-tensors'."""
    found = []
    for written in ([128, 64], "128x64"):
        config = pack_quantized(num_bits=8, type="float", strategy="block", block_structure=written)
        encoding = encoding_of({"quantization_config": {**config, "format": "float-quantized"}})
        found.append(encoding.format("model.layers.0.mlp.up_proj"))
    assert found[0] == found[1] and (found[0].rows, found[0].group) == (128, 64)


Q = "model.layers.0.self_attn.q_proj"
TENSORS: dict[str, tuple[Any, str]] = {
    "no scales": (lambda t: t.pop(f"{Q}.weight_scale"), f"lacks {Q}.weight_scale, which its quantization_config"),
    "short scales": (
        lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, :4]}),
        r"weight_scale with shape \[128, 4\], but its quantization_config calls for \[128, 8\]",
    ),
    "scales of another dtype": (
        lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].to(torch.int8)}), "as int8, which is not what"
    ),
    "fewer rows": (
        lambda t: t.update({key: t[key][:64] for key in (f"{Q}.weight", f"{Q}.weight_scale")}),
        r"q_proj.weight with shape \[64, 128\], but its config.json calls for \[128, 128\]",
    ),
    "packed": (
        lambda t: t.update({f"{Q}.weight_packed": t.pop(f"{Q}.weight").view(torch.int32)}),
        f"stores packed numbers, {Q}.weight_packed, but its quantization_config calls for {Q}.weight: correct",
    ),
    "smoothed": (lambda t: t.update({f"{Q}.pre_quant_scale": torch.ones(128)}), "pre_quant_scale, which a llama model"),
    "codes of an ignored module": (
        lambda t: t.update({"lm_head.weight": torch.ones(96, 128).to(torch.float8_e4m3fn)}),
        "lm_head in few bits, but quantization_config in config.json does not say how",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    change, words = TENSORS[case]
    replaced(tmp_path, "llama fused", nvfp4, {"quant_algo": "NVFP4", "ignore": ["lm_head"]})
    rewritten(tmp_path, change)
    with pytest.raises(UserError, match=words):
        open_source(tmp_path)


def test_packed_codes_of_another_format_are_refused(tmp_path: Path) -> None:
    compressed_model(tmp_path, "llama", {"W4A16": ["Linear"]})
    config = pack_quantized(num_bits=8, type="int", strategy="channel")
    rewritten(tmp_path, lambda tensors: None, quantization_config={**config, "format": "int-quantized"})
    words = "weight_packed, but its quantization_config of format 'int-quantized' calls for .*_proj.weight: correct"
    with pytest.raises(UserError, match=words):
        open_source(tmp_path)


def test_numbers_beside_codes_are_refused(tmp_path: Path) -> None:
    """compressed-tensors' codes have names of their own, so that a file may have a matrix twice."""
    compressed_model(tmp_path, "llama", {"NVFP4A16": ["Linear"]})
    name = "model.layers.0.mlp.up_proj.weight"
    rewritten(tmp_path, lambda tensors: tensors.update({name: torch.zeros(4, 4)}))
    with pytest.raises(UserError, match=f"has {name} both as numbers and in NVFP4: use a copy with one"):
        open_source(tmp_path)


def test_a_matrix_with_several_scales_is_not_stored_with_one() -> None:
    """As of two linears that were rounded by themselves and lie in one matrix of the checkpoint."""
    of = SPELLINGS["nvfp4 divided"]
    first, second = (drawn_parts(of, 4, 32, seed) for seed in (0, 1))
    both = {name: torch.cat((first[name].view(torch.uint8), second[name].view(torch.uint8))) for name in first}
    parts = {name: part.view(first[name].dtype) for name, part in both.items()}
    spelling = Floats(kind=of, codes=".weight_packed", tensor_scale=".weight_global_scale")
    assert spelling.store(first, 32)[".weight_global_scale"].tolist() == first["tensor_scale"][:1].tolist()
    with pytest.raises(UserError, match="each with a scale of its own, and NVFP4 has one for a matrix"):
        spelling.store(parts, 32)


HOSTILE = (None, -1, 0, 3, 10**30, 1.5, float("nan"), True, "x", "re:(", [], [None], ["x"], {}, {"x": 1}, {"x": {}})
CONFIGS: dict[str, dict[str, Any]] = {
    "compressed": {
        **pack_quantized(symmetric=True, strategy="group"), "ignore": ["lm_head"], "sparsity_config": {},
        "transform_config": {},
    },
    "naive": {
        **pack_quantized(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        "format": "float-quantized",
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
    "mixed": {
        "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}},
        "quant_method": "modelopt",
    },
    "mixed groups": {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "config_groups": {"group_0": {"targets": ["a"], "weights": {"num_bits": 8, "type": "float"}}},
    },
    "fp8": {
        "quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["gate"], "fmt": "e4m3",
        "scale_fmt": "ue8m0", "expert_dtype": "fp8",
    },
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "lm_head": False, "dynamic": {"-:x": {}},
        "checkpoint_format": "gptq",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested mappings and lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield (*path, key)
        yield from places(one, (*path, key))


@pytest.mark.parametrize("case", CONFIGS)
def test_any_value_is_read_or_refused_in_one_sentence(case: str) -> None:
    for path in places(CONFIGS[case]):
        for value in HOSTILE:
            config = copy.deepcopy(CONFIGS[case])
            inside = config
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = value
            try:
                encoding = encoding_of({"quantization_config": config})
                if encoding is not None:
                    encoding.format("model.layers.0.mlp.up_proj")
            except UserError as error:
                assert str(error).count("\n") == 0 and str(error).endswith("."), error


@pytest.mark.parametrize("name", ["qwen3", "qwen3 moe"])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    fp8_model(tmp_path, name, block=64, vocab_size=67, **(MOE if name == "qwen3 moe" else {}))
    config = FineGrainedFP8Config(weight_block_size=(64, 64), dequantize=True)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, attn_implementation="eager")
    if name == "qwen3 moe":
        stock.set_experts_implementation("eager")
    built, batch = engine_model(tmp_path), batch_of()
    with torch.no_grad():
        context = built.model.context(batch, built.stage.step, training=False)
        logits = built.model.logits(built.model.run_layers(built.model.embed(batch), context), context)
        expected, _ = stock_losses(stock.eval().float(), batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_layers_that_nothing_is_computed_with_are_passed_on(tmp_path: Path) -> None:
    """DeepSeek's for a further token are in FP8 too: an export of numbers has no scales for them, and one that keeps
    the format has their own codes."""
    folder, extra = tmp_path / "model", "model.layers.2.mlp.experts.0.up_proj.weight"
    fp8_model(folder, "deepseek v3", block=32, **LATENT, head_dim=None, num_nextn_predict_layers=1)
    codes, scales = torch.randn(64, 128).to(torch.float8_e4m3fn), torch.rand(2, 4)
    rewritten(folder, lambda tensors: tensors.update({extra: codes, f"{extra}_scale_inv": scales}))
    source = open_source(folder)
    assert source.outside_names() == [extra]
    export_hf(source, tmp_path / "kept", low=stored_format(source, None))
    before, kept = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "kept"))
    assert {name: tensor.dtype for name, tensor in kept.items()} == {key: one.dtype for key, one in before.items()}
    assert torch.equal(kept[extra].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(kept[f"{extra}_scale_inv"], scales)
    import_checkpoint(source, tmp_path / "parts", tensor=2)
    export_hf(open_source(tmp_path / "parts"), tmp_path / "back")
    after = load_file(tmp_path / "back" / "model.safetensors")
    numbers = codes.float() * scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(after[extra], numbers.bfloat16()) and f"{extra}_scale_inv" not in after
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def gptq_of(rows: int, columns: int, *, bits: int, group: int) -> Any:
    """GPTQ's tensors of 4 or 8 bits, with one group a row or several, and their numbers."""
    groups, per_word = columns // (group or columns), 32 // bits
    codes, scales = drawn(rows, columns, most=1 << bits), torch.rand(rows, groups).half()
    zeros = drawn(rows, groups, most=(1 << bits) - 1).int() + 1

    def words(values: Tensor) -> Tensor:
        shifted = values.to(torch.int64).view(values.shape[0], -1, per_word) << torch.arange(0, 32, bits)
        return shifted.sum(-1).to(torch.int32)

    every = torch.arange(columns) // (group or columns)
    stored = {
        ".qweight": words(codes).t(), ".qzeros": words((zeros - 1).t()), ".scales": scales.t(), ".g_idx": every.int()
    }  # fmt: skip
    return stored, ((codes.float() - zeros.float()[:, every]) * scales.float()[:, every]).bfloat16()


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 0), (4, 0)])
def test_gptq_of_8_bits_and_of_whole_rows(bits: int, group: int, tmp_path: Path) -> None:
    """Integers of 8 bits are decoded, by whole weights and by cuts, and cannot stay as they are."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": False}
    numbers = replaced(tmp_path, "llama fused", lambda o, i: gptq_of(o, i, bits=bits, group=group), config)
    assert_numbers(tmp_path, numbers, cuts=bits == 4)
    source, name = open_source(tmp_path), "layers.1.attention.o_proj.weight"
    expected = source.read_whole(name)
    for spec in shards(source.shape(name), 4):
        (piece,) = spec.pieces
        assert torch.equal(source.read(name, spec), expected.narrow(spec.dim, piece.global_offset, piece.length))
    if bits == 8:
        with pytest.raises(UserError, match="integers of 8 bits with scales for groups or zero points are in no"):
            source.format(name)
