"""Models in few bits as compressed-tensors and transformers write them, read as transformers reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.checkpoint.model_folder import open_model
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.safetensors_file import checksum
from engine.checkpoint.verification import checked_together
from engine.checkpoint.weight_source import WeightSource
from engine.conversion.inspection import run_inspect
from engine.distributed.mesh import Axis
from engine.distributed.sharding import Piece, ShardSpec, runs_spec, split_spec
from engine.errors import UserError
from engine.kernels.formats import Format, part_shapes
from engine.kernels.reference_formats import block_decode
from tests.support.shipped_models import compressed_model, rewritten
from tests.support.sweeps import sampled

PRESETS = (
    "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP8A16", "W4A16", "W4A16_ASYM", "W8A16", "INT8", "FP8", "FP8_DYNAMIC",
    "FP8_BLOCK",
)  # fmt: skip
NAMES = ("nvfp4", "nvfp4", "mxfp4", "mxfp8", "int4", "int4", "", "int8", "fp8_channel", "fp8_channel", "fp8_block")


def stock_weights(folder: Path, **more: Any) -> dict[str, Tensor]:
    """A model's weights in bfloat16, as transformers decodes them."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    kind = more.get("quantization_config", CompressedTensorsConfig(dequantize=True))
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=kind, dtype=torch.bfloat16).state_dict()


def same_as_stock(source: WeightSource, stock: dict[str, Tensor]) -> None:
    """Asserts that every weight has the bits that transformers has."""
    for name in source.tensor_names():
        stored = source.model.names.to_hf(name)
        if stored.name not in stock:  # transformers' modules have all experts in one tensor
            stored = source.model.names.stack().to_hf(name)
        expected = stock[stored.name]
        if stored.expert is not None:
            expected = stored.expert.of(expected)
        elif stored.num_rows is not None:
            expected = expected.narrow(0, stored.row_offset, stored.num_rows)
        assert torch.equal(source.read_whole(name), expected), name


def whole(source: WeightSource, name: str) -> ShardSpec:
    shape = source.shape(name)
    return ShardSpec(global_shape=shape, local_shape=shape)


def decoded(kind: Format, parts: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """A matrix from its parts, whose shapes and dtypes are the format's."""
    for part, (size, dtype) in part_shapes(kind, *shape).items():
        assert (tuple(parts[part].shape), parts[part].dtype) == (size, dtype), part
    out = torch.empty(shape, dtype=torch.bfloat16)
    block_decode(kind, parts, out)
    return out


@pytest.mark.parametrize("preset", sampled(PRESETS, ["NVFP4", "W4A16_ASYM", "FP8_BLOCK", "MXFP8A16"]))
def test_presets_of_compressed_tensors_have_transformers_bits(preset: str, tmp_path: Path) -> None:
    compressed_model(tmp_path, "llama fused", {preset: ["Linear"]})
    source, expected = open_source(tmp_path), NAMES[PRESETS.index(preset)]
    same_as_stock(source, stock_weights(tmp_path))
    assert "quantization_config" not in source.model.hf_config and "were decoded" in source.notes[0]
    if not expected:
        return
    for name in source.tensor_names():
        kind = source.format(name)
        assert (kind is None) == (".layers." not in f".{name}" or "norm" in name), name
        if kind is not None:
            assert kind.name == expected
            parts = source.read_parts(name, whole(source, name), kind)
            assert torch.equal(decoded(kind, parts, source.shape(name)), source.read_whole(name)), name


def shards(shape: tuple[int, ...], size: int) -> list[ShardSpec]:
    """The even cuts of a matrix over ranks, by rows and by columns."""
    return [split_spec(shape, dim, rank=rank, size=size, what="a matrix") for dim in (0, 1) for rank in range(size)]


def assert_cuts_join(source: WeightSource, name: str, size: int) -> None:
    """Asserts that the ranks' parts of a weight mean the cuts of the whole, and that cut numbers are read the same."""
    kind, expected = source.format(name), source.read_whole(name)
    assert kind is not None, name
    shape, single = source.shape(name), replace(kind, granule=1)
    some = runs_spec(shape, [(21, 10), (3, 7)])  # inside of blocks and of what one int32 holds
    rows = torch.cat((expected[21:31], expected[3:10]))
    assert torch.equal(decoded(single, source.read_parts(name, some, single), some.local_shape), rows), name
    assert torch.equal(source.read(name, some), rows), name
    wide = source.read(name, some, torch.empty(some.local_shape))
    assert torch.equal(wide, rows.float()), f"{name} is rounded to the checkpoint's dtype first"
    odd = ShardSpec(global_shape=shape, local_shape=(shape[0], 9), dim=1, pieces=(Piece(13, 1, 8),))
    assert torch.equal(source.read(name, odd)[:, 1:], expected[:, 13:21]), name
    for spec in shards(source.shape(name), size):
        (piece,) = spec.pieces
        cut = expected.narrow(spec.dim, piece.global_offset, piece.length)
        assert torch.equal(source.read(name, spec), cut), (name, spec)
        block = kind.group if spec.dim else 1
        if block and piece.length % block:
            with pytest.raises(UserError, match=r"stores .* columns .*, and a cut of columns"):
                source.read_parts(name, spec, kind)
            continue
        granule = math.gcd(kind.granule, piece.length) if spec.dim == 0 else kind.granule
        own = replace(kind, granule=granule)
        parts = source.read_parts(name, spec, own)
        assert torch.equal(decoded(own, parts, spec.local_shape), cut), (name, spec)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("preset", sampled(PRESETS[:6] + PRESETS[7:], ["NVFP4A16", "W4A16_ASYM", "FP8_BLOCK"]))
def test_parts_of_ranks_are_cuts_of_the_whole(preset: str, size: int, tmp_path: Path) -> None:
    """Rows of q, fewer than a block of k, and columns of o; cuts inside a block are refused."""
    compressed_model(tmp_path, "llama fused", {preset: ["Linear"]})
    source = open_source(tmp_path)
    for module in ("attention.q_proj", "attention.k_proj", "attention.o_proj", "mlp.down_proj"):
        assert_cuts_join(source, f"layers.1.{module}.weight", size)


@pytest.mark.parametrize("preset", sampled(PRESETS[:6] + PRESETS[7:], ["NVFP4", "MXFP8A16", "W4A16_ASYM", "FP8"]))
def test_stored_tensors_come_back(preset: str, tmp_path: Path) -> None:
    compressed_model(tmp_path, "llama fused", {preset: ["Linear"]})
    source, stored = open_source(tmp_path), load_file(tmp_path / "model.safetensors")
    assert_stores(source, stored)


def assert_stores(source: WeightSource, stored: dict[str, Tensor]) -> None:
    """Asserts that the parts of every weight make the tensors that were read, in their shapes and dtypes."""
    number = 0
    for name in source.tensor_names():
        spelling, place = source.spelling(name), source.model.names.to_hf(name)
        if spelling is None or place.num_rows is not None or place.expert is not None:
            continue
        parts = source.read_parts(name, whole(source, name), spelling.format)
        module = place.name.removesuffix(spelling.weight)
        for ending, tensor in spelling.store(parts, source.shape(name)[1]).items():
            before = stored[module + ending]
            assert tensor.dtype == before.dtype and tensor.shape == before.shape, (module, ending)
            assert torch.equal(tensor.flatten().view(torch.uint8), before.flatten().view(torch.uint8)), (module, ending)
            number += 1
    assert number


MIXED = {
    "group_0": {
        "targets": ["re:.*self_attn.*"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]},
        "format": "float-quantized",
    },
    "group_1": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        "format": "pack-quantized",
    },
}


def test_groups_are_matched_as_compressed_tensors_matches_them(tmp_path: Path) -> None:
    """By pattern before class, whatever their order; what is ignored and the head are numbers."""
    ignored = ["lm_head", "model.layers.1.mlp.down_proj"]
    compressed_model(tmp_path, "qwen3", MIXED, ignored)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    groups = dict(reversed(written["config_groups"].items()))
    rewritten(tmp_path, lambda tensors: None, quantization_config={**written, "config_groups": groups})
    source = open_source(tmp_path)
    names = {name: getattr(source.format(name), "name", "") for name in source.tensor_names()}
    assert names["layers.1.attention.q_proj.weight"] == "fp8_block" and names["lm_head.weight"] == ""
    assert names["layers.0.mlp.down_proj.weight"] == "int4" and names["layers.1.mlp.down_proj.weight"] == ""
    by_config = source_free_formats(tmp_path)
    assert {name: getattr(by_config(name), "name", "") for name in names if "proj" in name or "head" in name} == {
        name: kind for name, kind in names.items() if "proj" in name or "head" in name
    }
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    stored = load_file(tmp_path / "model.safetensors")
    for name, group in (("self_attn.k_proj", "group_0"), ("mlp.up_proj", "group_1")):
        module = f"model.layers.0.{name}."
        state = {key.removeprefix(module): value for key, value in stored.items() if key.startswith(module)}
        scheme = QuantizationScheme(**MIXED[group])
        expected = BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]
        logical = next(key for key in names if source.model.names.to_hf(key).name == f"{module}weight")
        assert torch.equal(source.read_whole(logical), expected)


def source_free_formats(folder: Path) -> Callable[[str], Format | None]:
    """What a plan knows of formats, without weights."""
    return open_model(folder).formats()


def test_fused_projections_are_cut_from_one_matrix(tmp_path: Path) -> None:
    """Phi's q, k and v share blocks of rows where heads are few, and each keeps its own."""
    for preset, granule in (("FP8_BLOCK", 64), ("NVFP4A16", 1)):
        folder = tmp_path / preset
        compressed_model(folder, "phi3", {preset: ["Linear"]}, sliding_window=None)
        source = open_source(folder)
        same_as_stock(source, stock_weights(folder))
        for part, value in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
            name = f"layers.0.attention.{part}.weight"
            kind = replace(source.format(name), granule=granule)
            assert source.shape(name)[0] == value
            parts = source.read_parts(name, whole(source, name), kind)
            assert torch.equal(decoded(kind, parts, source.shape(name)), source.read_whole(name)), name


def test_an_inspection_says_what_is_encoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compressed_model(tmp_path, "qwen3", MIXED)
    capsys.readouterr()
    run_inspect(tmp_path, step=None, verify=False)
    rows = capsys.readouterr().out.splitlines()
    assert "encoding       weights are stored in few bits (8 tensors in FP8 in blocks, 6 tensors in INT4)" in rows


def test_sums_of_decoded_numbers_need_no_decoded_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that keep the codes sum what they mean, as an import of it is summed, a few rows at a time."""
    compressed_model(tmp_path, "llama fused", {"NVFP4A16": ["Linear"]})
    source, plain = open_source(tmp_path), open_source(tmp_path)
    monkeypatch.setattr("engine.checkpoint.matrix_reading._SUMMED_AT_ONCE", 1000)
    monkeypatch.setattr(source, "_decoded", None)
    with checked_together([source.checks], Axis("world"), learn=True):
        for name in source.tensor_names():
            kind = source.format(name)
            _ = source.read_whole(name) if kind is None else source.read_parts(name, whole(source, name), kind)
    assert source.sums() == {name: checksum(plain.read_whole(name)) for name in plain.tensor_names()}
    name = "layers.0.mlp.up_proj.weight"
    plain.expect({name: "00000000"}, "a run")
    with pytest.raises(UserError, match="has changed: .*up_proj.weight has checksum .* had 00000000 when a run"):
        plain.read_parts(name, whole(plain, name), plain.format(name))
