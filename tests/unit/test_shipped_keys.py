"""Keys of `quantization_config`: those that libraries write are known, and others with a value are named."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.model_weights import open_source
from engine.quantization.shipped.config import GROUP_KEYS, GROUP_WEIGHT_KEYS, KNOWN_KEYS, encoding_of
from tests.unit.test_shipped_libraries import nvfp4, replaced

LIBRARIES = {
    "GPTQConfig": "gptq", "AwqConfig": "awq", "CompressedTensorsConfig": "compressed-tensors",
    "FineGrainedFP8Config": "fp8", "Mxfp4Config": "mxfp4",
}  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
def test_keys_that_transformers_writes_are_known(library: str) -> None:
    from transformers.utils import quantization_config

    written = inspect.signature(getattr(quantization_config, library).__init__).parameters.keys()
    assert written - {"self", "kwargs", "quant_method"} <= KNOWN_KEYS[LIBRARIES[library]]


def test_keys_of_groups_are_those_of_compressed_tensors() -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    assert set(QuantizationScheme.model_fields) == GROUP_KEYS
    assert set(QuantizationArgs.model_fields) == GROUP_WEIGHT_KEYS


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt"])
def test_keys_of_a_groups_weights_that_are_not_known_are_named(method: str) -> None:
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "rotation": 4, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "shift": 2, "input_activations": {"more": 1}}}
    config: dict[str, Any] = {"quant_method": method, "config_groups": groups}
    config |= {"quant_algo": "MIXED_PRECISION"} if method == "modelopt" else {"format": "nvfp4-pack-quantized"}
    encoding = encoding_of({"quantization_config": config})
    assert encoding is not None and encoding.unknown is not None
    assert " has config_groups.group_0.shift, config_groups.group_0.weights.rotation, of no" in encoding.unknown
    del weights["rotation"], groups["group_0"]["shift"]
    encoding = encoding_of({"quantization_config": config})
    assert encoding is not None and encoding.unknown is None


def test_an_adapter_that_outputs_have_too_is_named() -> None:
    """GPTQModel's EoRA, which no weight has in it."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "meta": {"x": 1}, "adapter": {"path": "eora"}}
    encoding = encoding_of({"quantization_config": config})
    assert encoding is not None and encoding.unknown is not None and " has adapter, of no" in encoding.unknown


@pytest.mark.parametrize("inside", [False, True])
def test_keys_that_are_not_known_are_named_in_one_line(inside: bool, tmp_path: Path) -> None:
    config = {"quant_algo": "NVFP4", "ignore": ["lm_head"], "rotation": {"size": 4}, "empty": {}}
    replaced(tmp_path, "llama fused", nvfp4, {"quantization": config, "producer": {}} if inside else config)
    note = open_source(tmp_path).encoding_note(decodes=True)
    named = "quantization.rotation" if inside else "rotation"
    assert note is not None and "\n" not in note
    assert note.endswith(f"; quantization_config has {named}, of no meaning here and not read")
