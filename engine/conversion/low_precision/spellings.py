"""The part of config.json that says how linears are stored in few bits, for each format that an export offers.

The tensors follow from it: what reads such a config writes them too, see `engine.quantization.shipped`. The schemes
are compressed-tensors' own, NVFP4A16, MXFP4A16, MXFP8A16, FP8_BLOCK, W4A16 and INT8 among its presets, and DeepSeek's
blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.choices import ExportDType, QuantMethod
from engine.quantization.shipped.config import KEY, encoding_of
from engine.quantization.shipped.spelling import Spelling

COMPRESSED_TENSORS: QuantMethod = "compressed-tensors"
DEEPSEEK: QuantMethod = "fp8"
_BLOCK = 128

_FORMATS = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
    "fp8_block": "float-quantized",
    "int4": "pack-quantized",
    "int8": "int-quantized",
}
_WEIGHTS: dict[str, dict[str, Any]] = {
    "nvfp4": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    },
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    "mxfp8": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    "fp8_block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [_BLOCK, _BLOCK]},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
}
_INPUTS: dict[str, dict[str, Any]] = {
    "fp8_block": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": _BLOCK},
    "int8": {"num_bits": 8, "type": "int", "strategy": "token"},
}
"""Servers round a linear's inputs to these while they run, for the formats that they multiply in 8 bits."""


def rounds_inputs(dtype: ExportDType) -> bool:
    """Returns whether servers compute with inputs of 8 bits too."""
    return dtype in _INPUTS


def quantization_config(dtype: ExportDType, method: QuantMethod, ignored: Sequence[str]) -> dict[str, Any]:
    """Returns what config.json says of the weights.

    Args:
        dtype: the format.
        method: in whose words.
        ignored: modules whose weights are numbers.
    """
    if method == DEEPSEEK:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
            "modules_to_not_convert": list(ignored),
        }
    inputs, name = _INPUTS.get(dtype), _FORMATS[dtype]
    group = {
        "targets": ["Linear"],
        "weights": {**_WEIGHTS[dtype], "symmetric": True, "dynamic": False},
        "input_activations": None if inputs is None else {**inputs, "symmetric": True, "dynamic": True},
        "output_activations": None,
        "format": name,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def modelopt_config(ignored: Sequence[str]) -> dict[str, Any]:
    """Returns ModelOpt's config of NVFP4, whose scales of scales multiply, as those do that training makes.

    Args:
        ignored: modules whose weights are numbers.
    """
    return {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "ignore": list(ignored),
        "producer": {"name": "modelopt"},
    }


def spelling_in(config: Mapping[str, Any]) -> Spelling:
    """Returns the spelling of a linear's tensors that a quantization_config gives all linears."""
    encoding = encoding_of({KEY: config})
    spelling = None if encoding is None else encoding.spelling("layers.0.linear")
    assert spelling is not None, config
    return spelling


def spelling_of(dtype: ExportDType, method: QuantMethod) -> Spelling:
    """Returns the spelling of a linear's tensors."""
    return spelling_in(quantization_config(dtype, method, ()))
