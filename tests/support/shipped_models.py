"""Small models in few bits, written by the libraries that ship them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.family_models import make_model

SIZES = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
PLAIN = {"attention_bias": False, "mlp_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 900.0}}


def small_model(name: str, **more: Any) -> torch.nn.Module:
    """A model of a family whose sizes are multiples of blocks, in bfloat16."""
    changes = PLAIN if name.startswith("llama") else {}
    return make_model(name, **{**SIZES, **changes, **more}).to(torch.bfloat16)


def compressed_model(
    folder: Path, name: str, groups: Mapping[str, Any], ignore: list[str] | None = None, **more: Any
) -> None:
    """A model that compressed-tensors has quantised by largest magnitudes and written.

    Args:
        groups: as `config_groups` of its config, or a preset's name -> its targets.
        ignore: names of modules that are left out; the head by default.
        more: of the model's config.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = small_model(name, **more)
    config = QuantizationConfig(config_groups=dict(groups), ignore=["lm_head"] if ignore is None else ignore)
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(getattr(module, "quantization_scheme", None), "weights", None) is not None:
            _set_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def _set_scales(module: torch.nn.Module) -> None:
    """Sets scales and zero points of a linear to those of its weight's extremes, as compressed-tensors computes
    them."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args, weight = module.quantization_scheme.weights, module.weight.data
    rows, columns = weight.shape
    if args.strategy in ("group", "tensor_group"):
        blocks = weight.view(rows, -1, args.group_size)
        least, most = blocks.amin(-1), blocks.amax(-1)
    elif args.strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        blocks = padded.view(-(-rows // height), height, -(-columns // width), width)
        least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif args.strategy == "channel":
        least, most = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        least, most = weight.min().view(1), weight.max().view(1)
    whole = None
    if args.strategy == "tensor_group":
        whole = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(whole)
    scales, zeros = calculate_qparams(least, most, args, global_scale=whole)
    module.weight_scale.data = scales.to(module.weight_scale.dtype)
    if getattr(module, "weight_zero_point", None) is not None:
        module.weight_zero_point.data = zeros.to(module.weight_zero_point.dtype)


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], None], **config: Any) -> Path:
    """Changes the tensors of a model's only file, and values of its config."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder
