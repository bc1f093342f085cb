"""Models in few bits as compressed-tensors and transformers write them, read as transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.checkpoint.model_weights import open_source
from engine.checkpoint.weight_source import WeightSource
from engine.distributed.sharding import ShardSpec
from engine.kernels.formats import Format, part_shapes
from engine.kernels.reference_formats import block_decode
from tests.support.shipped_models import compressed_model
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
