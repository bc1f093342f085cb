"""A tiny Llama with drawn weights, quantised to NVFP4 by compressed-tensors, and questions.

    python make_small.py --out FOLDER

writes FOLDER/model as vLLM's and llm-compressor's users have such models (weight_packed, weight_scale and
weight_global_scale for each linear of the layers), and FOLDER/train.json and FOLDER/validation.json. Needs
compressed-tensors, and the repository's root in PYTHONPATH, as run.sh sets it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.drawn_models import QWEN_VOCABULARY, qwen_token, write_as_asked, write_byte_level, write_json

CONFIG = LlamaConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=QWEN_VOCABULARY,
    max_position_embeddings=512,
    eos_token_id=qwen_token("<|im_end|>"),
    bos_token_id=None,
    tie_word_embeddings=False,
    initializer_range=0.08,
)
SCHEME = "NVFP4A16"
"""4-bit weights beside 16-bit activations, as compressed-tensors calls them."""
COLOURS = ("red", "green", "blue", "white", "black", "brown")
THINGS = ("door", "cup", "coat", "lamp", "book", "chair", "clock", "boat")


def records(count: int, numbers: random.Random) -> list[dict[str, object]]:
    """Returns conversations: the colour of a thing, which the question says."""
    made = []
    for _ in range(count):
        colour, thing = numbers.choice(COLOURS), numbers.choice(THINGS)
        turns = (("user", f"I painted the {thing} {colour}."), ("assistant", f"The {thing} is {colour} now."))
        made.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return made


def quantise(model: nn.Module) -> None:
    """Stores the linears of the layers in SCHEME, with the scales that their largest numbers give."""
    apply_quantization_config(model, QuantizationConfig(config_groups={SCHEME: ["Linear"]}, ignore=["lm_head"]))
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        weight, how = module.weight.detach(), scheme.weights
        module.weight_global_scale.data.copy_(generate_gparam(weight.amin(), weight.amax()))
        blocks = weight.unflatten(1, (-1, how.group_size))
        scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), how, global_scale=module.weight_global_scale)
        module.weight_scale.data.copy_(scales)


def write(out: Path) -> None:
    """Writes records and model."""
    folder, numbers = out / "model", random.Random(0)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    quantise(model)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    texts: list[str] = []
    for name, count in (("train", 240), ("validation", 24)):
        made = records(count, numbers)
        texts += [json.dumps(record) for record in made]
        write_json(out / f"{name}.json", made)
    write_byte_level(folder, texts)


if __name__ == "__main__":
    write_as_asked(write, "a tiny Llama in NVFP4, and questions")
