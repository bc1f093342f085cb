"""Small models in few bits, written by the libraries that ship them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
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
    compress(small_model(name, **more), folder, groups, ["lm_head"] if ignore is None else ignore)


def compress(model: Any, folder: Path, groups: Mapping[str, Any], ignore: list[str]) -> None:
    """Quantises a model and writes it; see `compressed_model`."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    config = QuantizationConfig(config_groups=dict(groups), ignore=ignore)
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


def fp8_model(folder: Path, name: str, *, block: int = 64, scale_fmt: str = "float", **more: Any) -> None:
    """A model whose linears transformers' own quantiser has turned to FP8 with a scale for each block, as DeepSeek
    and Qwen ship theirs: under each expert's own name, beside a router and a head in bfloat16."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    small_model(name, **more).save_pretrained(folder)
    config = FineGrainedFP8Config(weight_block_size=(block, block), scale_fmt=scale_fmt)
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=config))

    def change(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.endswith(("proj.weight", "proj_with_mqa.weight"))]:
            tensors.update(quantise.convert({key: tensors.pop(key)}))

    rewritten(folder, change, quantization_config={**config.to_dict(), "fmt": "e4m3"})


def stored_words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Integers of 4 bits [n, 8 m] in int32 [n, m]: at place i of each the one that `order` names."""
    eights = values.to(torch.int64).view(values.shape[0], -1, 8)[..., list(order)]
    words = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
