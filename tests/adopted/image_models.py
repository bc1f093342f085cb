"""Small random models of images and text, saved in folders with tokenizer, chat template and processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 2048, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = {
    "qwen3_vl_moe": "<|vision_start|><|image_pad|><|vision_end|>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "smolvlm": "<image>",
    "llava": "<image>",
    "llava_next": "<image>",
}
"""What a chat template writes for an image."""
TOKENS = {
    "qwen3_vl_moe": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "glm4v": (
        "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    ),
    "smolvlm": (
        "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    ),
    "llava": ("<image>",),
    "llava_next": ("<image>",),
}  # fmt: skip
_FIRST = 262
"""The id of the first of them."""


def save_image_model(model_type: str, folder: Path, std: float = 0.05) -> nn.Module:
    """Saves a model of a type with all files that a user's folder has; returns it, in float32."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(_config(model_type)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder)
    _tokenizer(model_type).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARK", MARKS[model_type]))
    kind, settings = PROCESSORS[model_type]
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "processor_class": kind}))
    if model_type in TEXT_SETTINGS:
        (folder / "processor_config.json").write_text(json.dumps(TEXT_SETTINGS[model_type]))
    return model


def _tokenizer(model_type: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<unk>"]
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in [*special, *TOKENS[model_type]]])
    assert tokenizer.token_to_id(TOKENS[model_type][0]) == _FIRST
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="<|im_end|>", unk_token="<unk>"
    )


def _config(model_type: str) -> Any:
    import transformers

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if model_type == "qwen3_vl_moe":
        text = {
            **TEXT, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "rope_parameters": {**rope, "mrope_section": [2, 3, 3], "mrope_interleaved": True},
        }  # fmt: skip
        tower = {
            "hidden_size": 32, "intermediate_size": 64, "depth": 3, "num_heads": 2, "patch_size": 14,
            "spatial_merge_size": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 64,
        }  # fmt: skip
        return transformers.Qwen3VLMoeConfig(
            vision_config=tower, text_config=text, image_token_id=_FIRST, video_token_id=_FIRST + 1,
            vision_start_token_id=_FIRST + 2, vision_end_token_id=_FIRST + 3,
        )  # fmt: skip
    if model_type == "glm4v":
        text = {**TEXT, "rope_parameters": {**rope, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
        tower = {
            "hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 2, "patch_size": 14,
            "spatial_merge_size": 2, "out_hidden_size": 64, "image_size": 56,
        }  # fmt: skip
        names = ("image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id")
        ids = {name: _FIRST + at for at, name in enumerate((*names, "video_start_token_id", "video_end_token_id"))}
        return transformers.Glm4vConfig(vision_config=tower, text_config=text, **ids)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    if model_type == "smolvlm":
        tower = {**sizes, "image_size": 56, "patch_size": 14}
        return transformers.SmolVLMConfig(
            vision_config=tower, text_config={**TEXT, "model_type": "llama"}, image_token_id=_FIRST, scale_factor=2
        )
    tower = {**sizes, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 32}
    if model_type == "llava":
        return transformers.LlavaConfig(
            vision_config=tower, text_config={**TEXT, "model_type": "stablelm"}, image_token_id=_FIRST
        )
    return transformers.LlavaNextConfig(
        vision_config=tower, text_config={**TEXT, "model_type": "stablelm"}, image_token_id=_FIRST,
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
    )  # fmt: skip


_QWEN = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 8, "patch_size": 14, "merge_size": 2}
PROCESSORS = {
    "qwen3_vl_moe": ("Qwen3VLProcessor", {"image_processor_type": "Qwen2VLImageProcessor", **_QWEN}),
    "glm4v": (
        "Glm4vProcessor",
        {
            "image_processor_type": "Glm4vImageProcessor", "patch_size": 14, "merge_size": 2,
            "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 8},
        },
    ),
    "smolvlm": (
        "SmolVLMProcessor",
        {
            "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 56}, "do_image_splitting": True,
        },
    ),
    "llava": (
        "LlavaProcessor",
        {
            "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
        },
    ),
    "llava_next": (
        "LlavaNextProcessor",
        {
            "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28}, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
    ),
}  # fmt: skip
"""The processor's class, and settings of its image processor."""
_LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
TEXT_SETTINGS = {"llava": _LLAVA, "llava_next": _LLAVA, "smolvlm": {"image_seq_len": 4}}
"""Settings of the processor itself."""
