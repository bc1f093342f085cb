"""A tiny Helium, a tiny GLM-4.7-Flash and a tiny Qwen3-VL-MoE with drawn weights: types that the engine has no family
for.

    python make_small.py --out FOLDER

writes FOLDER/model, FOLDER/mixture and FOLDER/images (config.json, model.safetensors, tokenizer and processor), which
transformers makes and saves as it does with released models; FOLDER/train.json and FOLDER/validation.json, questions;
and the same in FOLDER/pictures, about the images there. Needs the repository's root in PYTHONPATH, as run.sh sets it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.drawn_models import QWEN_VOCABULARY, qwen_token, write_as_asked, write_byte_level, write_json
from examples.minicpm_v.make_small import write_records
from examples.qwen3_30b_a3b.make_small import records

HIDDEN, HEADS = 64, 4
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 512,
    "vocab_size": QWEN_VOCABULARY,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": qwen_token("<|im_end|>"),
    "pad_token_id": qwen_token("<|endoftext|>"),
}
MODEL = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": HIDDEN // HEADS}
"""What a helium has beside COMMON: pairs of neighbouring features are rotated."""
MIXTURE = {
    "num_hidden_layers": 3,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
"""The same of a glm4_moe_lite: latent attention and experts."""
PATCH, MERGE = 14, 2
TEXT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN // HEADS,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}
TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
"""The parts of a qwen3_vl_moe."""
PROCESSOR = {
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 112 * 112,
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
}


def write_model(model_type: str, sizes: dict[str, Any], folder: Path, *, sees_images: bool = False) -> None:
    """Writes a model of a type that transformers has."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    made: Any = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
    model = made.from_config(AutoConfig.for_model(model_type, **sizes))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            inputs = parameter.shape[-1] if parameter.dim() <= 3 else parameter[0].numel()  # stacks, convolutions
            nn.init.normal_(parameter, std=0.1 if "embed" in name and parameter.dim() == 2 else inputs**-0.5)
    model.save_pretrained(folder)


def write(out: Path) -> None:
    """Writes records and models."""
    numbers, texts = random.Random(0), []
    for model_type, sizes, name in (("helium", MODEL, "model"), ("glm4_moe_lite", MIXTURE, "mixture")):
        write_model(model_type, {**COMMON, **sizes}, out / name)
    for name, count in (("train", 240), ("validation", 24)):
        made = records(count, numbers)
        texts += [json.dumps(record) for record in made]
        write_json(out / f"{name}.json", made)
    for name in ("model", "mixture"):
        write_byte_level(out / name, texts)
    write_images(out, numbers)


def write_images(out: Path, numbers: random.Random) -> None:
    """Writes images, records and the model that sees them."""
    texts = write_records(out / "pictures", numbers)
    tokens = ("image_pad", "video_pad", "vision_start", "vision_end")
    ids = {f"{name.replace('_pad', '')}_token_id": qwen_token(f"<|{name}|>") for name in tokens}
    sizes = {"text_config": {**COMMON, **TEXT}, "vision_config": TOWER, "tie_word_embeddings": False, **ids}
    write_model("qwen3_vl_moe", sizes, out / "images", sees_images=True)
    write_json(out / "images" / "preprocessor_config.json", PROCESSOR)
    write_byte_level(out / "images", texts)


if __name__ == "__main__":
    write_as_asked(write, "a tiny Helium, a tiny GLM-4.7-Flash and a tiny Qwen3-VL-MoE, and questions")
