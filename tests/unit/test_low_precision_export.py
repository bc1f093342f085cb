"""Exports in few bits: against compressed-tensors' own compression, by stock transformers, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine.batch import Batch
from engine.checkpoint.copying.direct_io import Scratch
from engine.checkpoint.held_tensors import HeldTensors
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.reshard import Box, box_spec
from engine.checkpoint.weight_source import WeightSource
from engine.choices import ExportDType, QuantMethod
from engine.conversion.commands import Options
from engine.conversion.decoded_base import DecodedSource
from engine.conversion.import_export import Work, export_hf, import_checkpoint
from engine.conversion.live_rows import InputMoments, mean_loss
from engine.conversion.low_precision import matrices
from engine.conversion.low_precision.export import LowOptions, low_export
from engine.conversion.low_precision.kept_format import stored_format
from engine.conversion.low_precision.linears import low_precision, matrix_of
from engine.conversion.low_precision.matrices import Coded, Coder, Matrix
from engine.conversion.low_precision.proof import prove_low
from engine.conversion.low_precision.scales import ScaleCoder
from engine.conversion.low_precision.spellings import spelling_in, spelling_of
from engine.conversion.merged_model import MergedSource
from engine.conversion.peft_read import AdapterSource
from engine.conversion.proof import live_of
from engine.errors import UserError
from engine.kernels.formats import Format
from engine.kernels.reference_formats import block_decode, requantise
from engine.telemetry.format import format_bytes
from engine.telemetry.log import Log
from tests.support.shipped_models import rewritten
from tests.unit.checkpoint_models import hf_name, tiny_llama
from tests.unit.test_checkpoint_source import load_folder

WAYS: list[tuple[ExportDType, QuantMethod | None]] = [
    ("nvfp4", None), ("mxfp4", None), ("mxfp8", None), ("int4", None), ("int8", None),
    ("fp8_block", None), ("fp8_block", "fp8"),
]  # fmt: skip
HIDDEN, INNER = 128, 256
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def llama(folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.bfloat16, **more: Any) -> LlamaForCausalLM:
    """A model whose linears have whole groups of every format."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=37, tie_word_embeddings=tied, **more,
        )
    )  # fmt: skip
    model.to(dtype).save_pretrained(folder)
    return model


def mixture(folder: Path) -> None:
    torch.manual_seed(2)
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, moe_intermediate_size=HIDDEN, num_experts=3,
        num_experts_per_tok=2, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        vocab_size=37, decoder_sparse_step=1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def write(source: WeightSource, out: Path, dtype: ExportDType, method: QuantMethod | None = None, **more: Any) -> str:
    """Exports, and returns the proof's sentence."""
    low = low_precision(source, dtype, method)
    report = export_hf(source, out, low=low, proof=lambda folder: prove_low(folder, source, low), **more)
    return report.notes[-1]


def blocks_of(weight: Tensor, scheme: QuantizationScheme) -> Tensor:
    """The largest magnitudes of the blocks, in the shape of the scales."""
    args = scheme.weights
    if args.strategy == "block":
        high, wide = args.block_structure
        rows, columns = -(-weight.shape[0] // high), -(-weight.shape[1] // wide)
        padded = torch.zeros(rows * high, columns * wide)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        return padded.view(rows, high, columns, wide).abs().amax((1, 3))
    if args.strategy == "channel":
        return weight.abs().amax(1, keepdim=True)
    return weight.view(weight.shape[0], -1, args.group_size).abs().amax(-1)


def compressed(weight: Tensor, together: list[Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """A weight in fp32 as compressed-tensors compresses it with its own scales by the largest magnitudes."""
    parsed = QuantizationConfig.model_validate(config)
    scheme = parsed.config_groups["group_0"]
    largest = blocks_of(weight, scheme)
    state = {"weight": weight}
    if scheme.weights.strategy == "tensor_group":
        whole = torch.stack([one.abs().max() for one in together]).max()
        state["weight_global_scale"] = generate_gparam(-whole[None], whole[None])
    scale, _ = calculate_qparams(-largest, largest, scheme.weights, state.get("weight_global_scale"))
    if scheme.weights.num_bits == 8 and scheme.weights.type == "int":
        scale = largest / 127  # the engine's int8 has as many codes below 0 as above
    elif config["format"] == "pack-quantized":
        scale = scale.bfloat16()
    state["weight_scale"] = scale
    return BaseCompressor.get_value_from_registry(config["format"]).compress(state, scheme)


@pytest.mark.parametrize(("dtype", "method"), [way for way in WAYS if way[1] is None])
def test_the_tensors_are_those_of_compressed_tensors(
    tmp_path: Path, dtype: ExportDType, method: QuantMethod | None
) -> None:
    llama(tmp_path / "hf")
    write(open_source(tmp_path / "hf"), tmp_path / "out", dtype, method, max_shard_bytes=50_000)
    before, after = load_folder(tmp_path / "hf"), load_folder(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    for name, weight in before.items():
        module, leaf = name.removesuffix(".weight"), name.split(".")[-2]
        if ".layers." not in name or "norm" in name:
            assert torch.equal(after.pop(name), weight)
            assert "norm" in name or module in config["ignore"]
            continue
        group = next((group for group in FUSED if leaf in group), (leaf,))
        together = [before[name.replace(leaf, other)].float() for other in group]
        for ending, expected in compressed(weight.float(), together, config).items():
            found = after.pop(f"{module}.{ending}")
            if found.dtype == torch.float8_e4m3fn:
                found, expected = found.view(torch.uint8), expected.view(torch.uint8)
            assert torch.equal(found.flatten(), expected.to(found.dtype).flatten()), f"{module}.{ending}"
    assert not after and "lm_head" in config["ignore"]


@pytest.mark.parametrize(("dtype", "method"), WAYS)
@pytest.mark.parametrize("tied", [False, True])
def test_stock_transformers_reads_what_the_engine_decodes(
    tmp_path: Path, dtype: ExportDType, method: QuantMethod | None, tied: bool
) -> None:
    llama(tmp_path / "hf", tied=tied)
    said = write(open_source(tmp_path / "hf"), tmp_path / "out", dtype, method)
    assert said.startswith("checked with transformers, decoding: logits of 32 tokens agree to"), said
    assert f"rounding to {dtype} moves logits by" in said
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == (method or "compressed-tensors")
    report = json.loads((tmp_path / "out" / "merge_report.json").read_text())["tensors"]
    assert len(report) == 14 and all(0 < one["relative_error"] < 0.2 for one in report.values())
    again = open_source(tmp_path / "out")
    import_checkpoint(again, tmp_path / "tp2", tensor=2)  # a base of further work like any other


@pytest.mark.parametrize("dtype", ["nvfp4", "int4"])
def test_a_model_in_float32_is_decoded_to_16_bits_by_its_reader(tmp_path: Path, dtype: ExportDType) -> None:
    """By compressed-tensors, whose logits then are those of rounded weights."""
    llama(tmp_path / "hf", dtype=torch.float32)
    said = write(open_source(tmp_path / "hf"), tmp_path / "out", dtype)
    agreed = float(said.partition("agree to ")[2].split()[0])
    assert 1e-4 < agreed < 2e-2, said


@pytest.mark.parametrize(("dtype", "method"), WAYS)
def test_experts_are_stored_one_by_one(tmp_path: Path, dtype: ExportDType, method: QuantMethod | None) -> None:
    mixture(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    said = write(source, tmp_path / "out", dtype, method)
    read = dtype in ("mxfp4", "int4") or method == "fp8"
    assert ("checked with transformers" in said) == read, said
    assert read or "logits not compared with a stock reader's: transformers" in said
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16  # the router
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.gate" in (config.get("ignore") or config["modules_to_not_convert"])
    written = open_source(tmp_path / "out")
    for name in written.tensor_names():
        if ".experts." in name:
            whole, found = source.read_whole(name).float(), written.read_whole(name).float()
            assert (found - whole).norm() < 0.15 * whole.norm(), name
    if dtype == "nvfp4":  # a server keeps one scale of gate and up, and of query, key and value
        for expert in range(3):
            pair = [stored[f"model.layers.0.mlp.experts.{expert}.{leaf}.weight_global_scale"] for leaf in FUSED[1]]
            assert torch.equal(*pair)
        scales = {float(stored[f"model.layers.0.self_attn.{leaf}.weight_global_scale"]) for leaf in FUSED[0]}
        assert len(scales) == 1


def test_a_trained_expert_goes_back_into_the_bases_format(tmp_path: Path) -> None:
    mixture(tmp_path / "hf")
    plain = open_source(tmp_path / "hf")
    export_hf(plain, tmp_path / "base", low=low_precision(plain, "nvfp4", None))
    base = open_source(tmp_path / "base")
    name = "layers.0.mlp.experts.1.down_proj.weight"
    trained = HeldTensors({name: 1.25 * base.read_whole(name).float()}, "trained")
    source = MergedSource(base.model, base, trained, scale=0.0)
    low = stored_format(source, torch.float32)
    assert low.notes == (
        "trained in full, in numbers, and rounded to the base's format: layers.0.mlp.experts.1.down_proj",
    )
    report = export_hf(source, tmp_path / "out", low=low, proof=lambda folder: prove_low(folder, source, low))
    assert "rounding to the base's format moves logits by" in report.notes[-1]
    before, after = load_folder(tmp_path / "base"), load_folder(tmp_path / "out")
    changed = {
        key for key, one in before.items() if not torch.equal(one.view(torch.uint8), after[key].view(torch.uint8))
    }
    module = "model.layers.0.mlp.experts.1.down_proj"
    assert before.keys() == after.keys() and changed == {f"{module}.weight_packed", f"{module}.weight_scale"}
    assert 0.8 < report.rounding[name]["update_kept"] < 1.2


def exact_adapter(base: Path, out: Path) -> dict[str, Tensor]:
    """An adapter whose sums with the weights are exact in fp32 in any order, saved as PEFT does; module -> s B A."""
    generator, tensors, updates = torch.Generator().manual_seed(4), {}, {}
    for name, weight in load_folder(base).items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            rows, columns = weight.shape
            a = torch.randint(-2, 3, (2, columns), generator=generator).float() / 32
            b = torch.randint(-2, 3, (rows, 2), generator=generator).float() / 32
            key = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            updates[name] = 2 * b @ a
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    (out / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return updates


@pytest.mark.parametrize("dtype", ["nvfp4", "int8"])
def test_a_merge_is_rounded_once(tmp_path: Path, dtype: ExportDType) -> None:
    """Not first to 16 bits: codes are those of the sum in fp32."""
    llama(tmp_path / "hf")
    updates = exact_adapter(tmp_path / "hf", tmp_path / "adapter")
    base = open_source(tmp_path / "hf")
    adapter = AdapterSource(tmp_path / "adapter", names=base.model.names, decoder=base.model.decoder)
    source = MergedSource(base.model, base, adapter, scale=adapter.scale)
    said = write(source, tmp_path / "out", dtype)
    assert said.startswith("checked with transformers"), said
    before, after = load_folder(tmp_path / "hf"), load_folder(tmp_path / "out")
    report = json.loads((tmp_path / "out" / "merge_report.json").read_text())["tensors"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    merged = {name: weight.float() + updates.get(name, 0.0) for name, weight in before.items()}
    for logical, told in report.items():
        name = hf_name(logical)
        leaf = name.split(".")[-2]
        group = next((group for group in FUSED if leaf in group), (leaf,))
        expected = compressed(merged[name], [merged[name.replace(leaf, other)] for other in group], config)
        module = name.removesuffix(".weight")
        codes = "weight_packed" if dtype == "nvfp4" else "weight"
        assert torch.equal(after[f"{module}.{codes}"], expected[codes]), name
        decoded = BaseCompressor.get_value_from_registry(config["format"]).decompress(
            expected, QuantizationConfig.model_validate(config).config_groups["group_0"]
        )["weight"]
        error = (decoded.float() - merged[name]).norm()
        assert told["relative_error"] == pytest.approx(float(error / merged[name].norm()), rel=3e-2)
        if name in updates:
            assert told["error_of_update"] == pytest.approx(float(error / updates[name].norm()), rel=3e-2)


def test_what_does_not_fit_is_left_and_named(tmp_path: Path) -> None:
    llama(tmp_path / "hf", head_dim=24)  # o_proj has 96 columns
    source = open_source(tmp_path / "hf")
    low = low_precision(source, "int4", None)
    assert "2 linears: layers.0.attention.o_proj, layers.1.attention.o_proj" in low.notes[0]
    assert write(source, tmp_path / "out", "int4").startswith("checked with transformers")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.self_attn.o_proj" in config["ignore"]
    tiny_llama(tmp_path / "tiny")
    with pytest.raises(UserError, match="none of the model's linears can be stored as int4, whose groups are 128"):
        low_precision(open_source(tmp_path / "tiny"), "int4", None)


def test_a_merge_aware_run_is_told_of_another_model(tmp_path: Path) -> None:
    """In a format that it did not compute in."""
    llama(tmp_path / "hf")
    exact_adapter(tmp_path / "hf", tmp_path / "adapter")
    base = open_source(tmp_path / "hf")
    adapter = AdapterSource(tmp_path / "adapter", names=base.model.names, decoder=base.model.decoder)
    decoded = DecodedSource(base, "int4")
    source = MergedSource(base.model, decoded, adapter, scale=adapter.scale)
    for factors in (None, torch.bfloat16):
        other = low_export(source, LowOptions(dtype="int8"), None, Log(), proof=False, factors=factors)
        assert any("merge-aware run computed" in one for one in other.low.notes) == (factors is not None)


def test_progress_counts_the_bytes_that_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    with Options(verify=True).work(Log(), "exporting") as work:
        report = export_hf(source, tmp_path / "out", low=low_precision(source, "nvfp4", None), work=work)
    last = "".join(capsys.readouterr()).strip().splitlines()[-1]
    size = format_bytes(2 * report.num_bytes)
    assert last.startswith(f"exporting: {size} / {size} (100%)"), last


def test_a_blocks_rows_may_end_anywhere(tmp_path: Path) -> None:
    llama(tmp_path / "hf", head_dim=24)
    for method in (None, "fp8"):
        said = write(open_source(tmp_path / "hf"), tmp_path / f"out {method}", "fp8_block", method)
        assert said.startswith("checked with transformers"), said


def test_scales_may_have_another_precision_than_the_model(tmp_path: Path) -> None:
    """compressed-tensors decodes to that of the scales, whose float16 is finer than the model's bfloat16."""
    llama(tmp_path / "hf")
    write(open_source(tmp_path / "hf"), tmp_path / "base", "int4")

    def halve(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: one.half() * 1.01 for name, one in tensors.items() if name.endswith("weight_scale")})

    base = open_source(rewritten(tmp_path / "base", halve))
    low = stored_format(base, None)
    report = export_hf(base, tmp_path / "out", low=low, proof=lambda folder: prove_low(folder, base, low))
    assert report.notes[-1].startswith("checked with transformers"), report.notes


def test_a_reader_that_divides_evenly_is_not_asked(tmp_path: Path) -> None:
    """transformers takes 160 rows in two blocks as blocks of 80, whatever the config says."""
    llama(tmp_path / "hf", head_dim=40)
    said = [write(open_source(tmp_path / "hf"), tmp_path / f"out {way}", "fp8_block", way) for way in (None, "fp8")]
    assert said[0].startswith("checked with transformers"), said[0]
    assert said[1].startswith("logits not compared with a stock reader's: transformers takes all blocks"), said[1]
    assert "model.layers.0.self_attn.o_proj.weight ends inside one" in said[1]


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8_block"])
def test_an_interrupted_export_leaves_nothing_and_is_resumed(
    tmp_path: Path, dtype: ExportDType, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    low = low_precision(source, dtype, None)
    export_hf(source, tmp_path / "whole", low=low, max_shard_bytes=100_000)
    write_matrix, left = matrices.PackedMatrix._write, iter(range(9))

    def stops(packed: Any, scratch: Scratch) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return write_matrix(packed, scratch)

    monkeypatch.setattr(matrices.PackedMatrix, "_write", stops)
    with pytest.raises(KeyboardInterrupt):
        export_hf(source, tmp_path / "out", low=low, max_shard_bytes=100_000, work=Work(threads=1))
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    report = export_hf(source, tmp_path / "out", low=low, max_shard_bytes=100_000)
    assert report.kept_bytes
    for file in sorted((tmp_path / "whole").iterdir()):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    model = llama(tmp_path / "hf")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.inf
    model.save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    for dtype in ("nvfp4", "int8"):
        with pytest.raises(UserError, match=r"layers\.1\.mlp\.(up|gate)_proj.*not finite"):
            export_hf(source, tmp_path / "out", low=low_precision(source, dtype, None))
        assert not (tmp_path / "out").exists()


def rows(count: int, length: int = 24) -> Iterator[tuple[Tensor, Batch]]:
    """Tokens [1, length + 1], and the batch that predicts each from those before it."""
    generator = torch.Generator().manual_seed(6)
    for _ in range(count):
        tokens = torch.randint(37, (1, length + 1), generator=generator)
        places = torch.arange(length)[None]
        yield (
            tokens,
            Batch(
                tokens_BS=tokens[:, :-1],
                labels_BS=tokens[:, 1:],
                positions_BS=places,
                token_index_BS=places,
                loss_weights_BS=torch.ones(1, length),
                document_offsets=torch.tensor([0, length], dtype=torch.int32),
                document_lengths=(length,),
            ),
        )


def test_losses_and_moments_are_those_of_transformers(tmp_path: Path) -> None:
    model = llama(tmp_path / "hf", dtype=torch.float32)
    live, moments, seen = live_of(open_source(tmp_path / "hf")), InputMoments(16), dict[str, list[Tensor]]()
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, given, name=name: seen.setdefault(name, []).append(given[0][0]))
    pairs = list(rows(3))
    with torch.no_grad():
        logits = torch.cat([model(input_ids=tokens[:, :-1]).logits for tokens, _ in pairs])
    labels = torch.cat([tokens[:, 1:] for tokens, _ in pairs])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    found = mean_loss(live, [batch for _, batch in pairs], moments.watch)
    assert found == pytest.approx(float(expected), rel=1e-5)
    for name, inputs in seen.items():
        x = torch.cat(inputs)
        products = torch.stack([part.T @ part / len(x) for part in x.split(16, 1)])
        logical = name.removeprefix("model.").replace("self_attn", "attention")
        torch.testing.assert_close(moments.of(f"{logical}.weight"), products, rtol=1e-4, atol=1e-6)
    assert len(seen) == 14


@pytest.mark.parametrize(("dtype", "least"), [("nvfp4", 0.85), ("mxfp4", 0.97), ("int4", 0.85), ("fp8_block", 1.0)])
def test_calibrated_scales_move_outputs_less(tmp_path: Path, dtype: ExportDType, least: float) -> None:
    llama(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    generator = torch.Generator().manual_seed(8)
    mixing = torch.randn(HIDDEN, HIDDEN, generator=generator) / 8 + torch.eye(HIDDEN)
    x = torch.randn(512, HIDDEN, generator=generator) @ mixing + torch.randn(HIDDEN, generator=generator)
    name = "layers.0.mlp.up_proj.weight"
    kind = spelling_of(dtype, "compressed-tensors").format
    moments = InputMoments(kind.group)
    blocks = torch.stack([part.T @ part for part in x.split(kind.group, 1)])
    moments._sums, moments._tokens, moments._first = {name: blocks}, {name: len(x)}, {name: name}
    weight, moved = source.read_whole(name).float(), []
    shared = low_precision(source, dtype, None).coder.shared
    for known in (None, moments):
        coder = ScaleCoder(kind=kind, moments=known, shared=shared)
        coded = coder.code(matrix_of(source, name, [name]), Scratch())
        out = torch.empty_like(weight)
        block_decode(kind, coded.parts, out)
        moved.append(float((x @ (out - weight).T).square().mean()))
    assert moved[1] <= least * moved[0], moved


@dataclass(frozen=True)
class Fresh(Coder):
    """Scales, and zero points where a format has them, made for the numbers themselves."""

    kind: Format

    def format(self, matrix: Matrix) -> Format:
        return self.kind

    def code(self, matrix: Matrix, scratch: Scratch) -> Coded:
        nothing = {name: torch.zeros_like(part) for name, part in self.empty(matrix).items()}
        if "tensor_scale" in nothing:
            nothing["tensor_scale"] += 0.001
        if self.kind.name in ("int8", "fp8_channel"):
            nothing["scales"] += 0.002
        whole = torch.cat([rows.clone() for _, rows in matrix.blocks(scratch)])
        return Coded(requantise(self.kind, nothing, whole), {}, True)


SHIPPED: dict[str, dict[str, Any]] = {
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
    "fp8": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
    "gptq zeros": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    "ue8m0": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_a_bases_own_format_is_kept(tmp_path: Path, name: str) -> None:
    """Unchanged weights byte for byte, scales of activations too; changed ones by the base's scales."""
    llama(tmp_path / "hf")
    plain, spelling = open_source(tmp_path / "hf"), spelling_in(SHIPPED[name])
    if name == "ue8m0":
        spelling = replace(spelling, kind=replace(spelling.kind, scale_dtype=torch.uint8))
        spelling = replace(spelling, stored_scales=torch.float8_e8m0fnu)
    low = replace(
        low_precision(plain, "int8", None),
        spelling=lambda weight: spelling if weight.startswith("layers.") and "norm" not in weight else None,
        coder=Fresh(spelling.format),
        config=lambda ignored: SHIPPED[name],
        beside={"model.layers.0.mlp.up_proj.input_scale": torch.tensor(0.25)} if name == "fp8" else {},
    )
    export_hf(plain, tmp_path / "base", low=low)
    base = open_source(tmp_path / "base")
    kept = stored_format(base, None)
    export_hf(base, tmp_path / "again", low=kept)
    before, after = load_folder(tmp_path / "base"), load_folder(tmp_path / "again")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        same = (one.reshape(-1).view(torch.uint8) for one in (tensor, after[key]))
        assert torch.equal(*same), key
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("base", "again")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"] == SHIPPED[name]
    updates = exact_adapter(tmp_path / "hf", tmp_path / "adapter")
    adapter = AdapterSource(tmp_path / "adapter", names=base.model.names, decoder=base.model.decoder)
    source = MergedSource(base.model, base, adapter, scale=adapter.scale)
    low = stored_format(source, torch.float32)
    export_hf(source, tmp_path / "out", low=low)
    written = open_source(tmp_path / "out")
    for weight in base.tensor_names():
        stored, found = base.read_whole(weight), written.read_whole(weight)
        if (update := updates.get(hf_name(weight))) is None:
            assert torch.equal(stored, found), weight
            continue
        kind = base.format(weight)
        assert kind is not None
        parts = base.read_parts(weight, box_spec(base.shape(weight), Box()), kind)
        exact = torch.empty(base.shape(weight))
        block_decode(kind, parts, exact)
        expected = torch.empty_like(found)
        block_decode(kind, requantise(kind, parts, exact + update), expected)
        assert torch.equal(found, expected) and not torch.equal(found, stored), weight
