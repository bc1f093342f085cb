"""Small models in few bits beside stock ones with the numbers that their codes mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.quantization.encoding import encoding
from engine.quantization.shipped.config import encoding_of
from engine.quantization.shipped.spelling import Spelling

STACKS = (".experts.gate_up_proj", ".experts.down_proj")


def group(
    targets: list[str], kind: str, bits: int, strategy: str, size: int | None = None, **more: Any
) -> dict[str, Any]:
    """A group of compressed-tensors' `config_groups`."""
    weights = {"type": kind, "num_bits": bits, "strategy": strategy, "group_size": size, "symmetric": True}
    return {"targets": targets, "weights": weights, **more}


def compressed(
    form: str, *groups: dict[str, Any], ignore: tuple[str, ...] = ("lm_head", "re:.*mlp[.]gate$")
) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors."""
    each = {f"group_{place}": one for place, one in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "format": form,
        "config_groups": each, "ignore": list(ignore),
    }  # fmt: skip


NVFP4 = group(["Linear"], "float", 4, "tensor_group", 16)
CONFIGS: dict[str, dict[str, Any]] = {
    "nvfp4": compressed("nvfp4-pack-quantized", NVFP4),
    "mxfp4": compressed("mxfp4-pack-quantized", group(["Linear"], "float", 4, "group", 32)),
    "mxfp8": compressed("mxfp8-quantized", group(["Linear"], "float", 8, "group", 32)),
    "fp8_block": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "gate"],
    },
    "fp8_channel": compressed("float-quantized", group(["Linear"], "float", 8, "channel")),
    "int8": compressed("int-quantized", group(["Linear"], "int", 8, "channel")),
    "int4": compressed("pack-quantized", group(["Linear"], "int", 4, "group", 32)),
    "mixed": compressed(
        "mixed-precision",
        group(["re:.*self_attn.*"], "float", 8, "channel", format="float-quantized"),
        {**NVFP4, "targets": ["re:.*mlp.*"], "format": "nvfp4-pack-quantized"},
    ),
    "gpt oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}
"""Name of a format -> a `quantization_config` that has it."""


def in_few_bits(plain: Path, folder: Path, config: dict[str, Any]) -> None:
    """Writes a plain model's weights in few bits to `folder`/hf, and what these mean, in fp32, to `folder`/decoded."""
    shipped = encoding_of({"quantization_config": config})
    assert shipped is not None
    stored, decoded = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        spelling = shipped.spelling(module) if tensor.dim() >= 2 and "embed" not in name else None
        if spelling is None:
            stored[name], decoded[name] = tensor.bfloat16(), tensor.bfloat16().float()
        elif name.endswith(STACKS):  # of gpt-oss, inputs first
            each = [_encoded(spelling, expert.t().contiguous()) for expert in tensor]
            decoded[name] = torch.stack([numbers.t() for _, numbers in each]).contiguous()
            for ending in each[0][0]:
                stored[module + ending] = torch.stack([tensors[ending] for tensors, _ in each])
        else:
            tensors, decoded[name] = _encoded(spelling, tensor)
            stored |= {module + ending: one for ending, one in tensors.items()}
    text = json.loads((plain / "config.json").read_text())
    for place, tensors, more in (("hf", stored, {"quantization_config": config}), ("decoded", decoded, {})):
        (folder / place).mkdir(parents=True)
        save_file(
            {name: one.contiguous() for name, one in tensors.items()},
            folder / place / "model.safetensors",
            {"format": "pt"},
        )
        (folder / place / "config.json").write_text(json.dumps({**text, **more}))


def _encoded(spelling: Spelling, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix's stored tensors by the endings of their names, and its numbers."""
    codec, numbers = encoding(spelling.format), torch.empty(weight.shape)
    parts = codec.encode(weight.float())
    codec.decode(parts, numbers)
    return spelling.store(parts, weight.shape[1]), numbers


def draw_in_few_bits(folder: Path, name: str) -> None:
    """Gives the config.json in a folder random weights in a format, written there."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder / "plain")
    in_few_bits(folder / "plain", folder / "few", CONFIGS[name])
    for file in (folder / "few" / "hf").iterdir():
        file.replace(folder / file.name)
