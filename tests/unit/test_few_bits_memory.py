"""Bytes of bases in the vendors' formats, at the widths of published models: nothing beside codes and scales."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from engine.kernels.formats import FORMATS
from engine.layers.encoded_storage import encoded_entries, encoded_memories
from engine.models.decoder_config import DecoderConfig
from engine.models.describe import meta_model
from engine.models.families import family_of
from engine.ops.encoded_weight import BaseEncoding

MODELS = Path(__file__).resolve().parents[2] / "examples" / "memory" / "models"
BITS = {
    "nvfp4": 4 + 8 / 16,
    "mxfp4": 4 + 8 / 32,
    "mxfp8": 8 + 8 / 32,
    "fp8_block": 8 + 32 / 128**2,
    "fp8_channel": 8.0,
    "int8": 8.0,
    "int4": 4 + 16 / 128,
}
"""Of a number, with the scales of its block; a row's or a matrix's are counted as nothing."""
MOST = 1.03


def _config(name: str) -> DecoderConfig:
    text = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    family, text = family_of({**text, "num_hidden_layers": 2, "layer_types": None, "max_window_layers": None}, "auto")
    return family.config_from_hf(text)


@pytest.mark.parametrize(
    ("model", "tensor"), [("llama-3-8b", 1), ("llama-3-8b", 8), ("qwen3-30b-a3b", 1), ("qwen3-30b-a3b", 2)]
)
@pytest.mark.parametrize("name", BITS)
def test_a_base_takes_the_formats_bits(name: str, model: str, tensor: int) -> None:
    base = BaseEncoding(formats=lambda weight_name: FORMATS[name])
    built = meta_model(_config(model), tensor_size=tensor, base=base)
    entries = list(encoded_entries(built))
    numbers = sum(prod(entry.spec.local_shape) for entry in entries)
    held = sum(entry.parameter.nbytes for entry in encoded_memories(built))
    assert numbers > 2e7
    assert BITS[name] <= 8 * held / numbers < MOST * BITS[name]
    # all linears of the layers, experts among them
    assert {one.name.rpartition("layers.1.")[2].split(".")[0] for one in entries} >= {"attention", "mlp"}
