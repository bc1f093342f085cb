"""Folders of small MiniCPM-V 4.6 and 4.7 models, and transformers' processor for them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.shared_data import shared

KINDS = ("minicpmv4_6", "minicpmv4_7")
PATCH = 14
SLICES = {"minicpmv4_6": 112, "minicpmv4_7": 84}
"""Pixels on a side of a slice, with which test images have cells and have none."""
TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
    "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|image_pad|>BEHIND{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def written(kind: str, folder: Path, *, behind: str = "\n", more: dict[str, Any] | None = None, **options: Any) -> Any:
    """Writes a model's folder without its weights; returns transformers' processor.

    Args:
        behind: what the chat template writes behind an image.
        more: further entries of config.json.
        options: of the image processor.
    """
    pytest.importorskip("transformers.models.minicpmv4_7", reason="this transformers has no MiniCPM-V 4.7")
    from transformers import PreTrainedTokenizerFast
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
    from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
    from transformers.models.minicpmv4_7.processing_minicpmv4_7 import MiniCPMV4_7Processor

    tokenizer = PreTrainedTokenizerFast.from_pretrained(shared("tokenizers/minimind"))
    tokenizer.add_tokens([*TOKENS.values()], special_tokens=True)
    for name, token in TOKENS.items():
        tokenizer.__dict__[name] = token
        tokenizer.__dict__[f"{name}_id"] = tokenizer.convert_tokens_to_ids(token)
    tokenizer.chat_template = TEMPLATE.replace("BEHIND", behind)
    tokenizer.save_pretrained(folder)
    options = {"patch_size": PATCH, "scale_resolution": SLICES["minicpmv4_6"], "max_slice_nums": 9, **options}
    images = MiniCPMV4_6ImageProcessorPil(**options)
    images.save_pretrained(folder)
    config = {
        "model_type": kind, "downsample_mode": images.downsample_mode,
        "vision_config": {"patch_size": PATCH, "image_size": 10 * PATCH}, **token_ids(tokenizer), **(more or {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    make: Any = MiniCPMV4_7Processor if kind == "minicpmv4_7" else MiniCPMV4_6Processor
    kept = make.check_argument_for_proper_class
    make.check_argument_for_proper_class = lambda *arguments: None
    videos = SimpleNamespace(slice_mode=images.slice_mode, downsample_mode=images.downsample_mode)
    try:  # that for videos needs torchvision
        return make(
            image_processor=images, video_processor=videos, tokenizer=tokenizer, chat_template=tokenizer.chat_template
        )
    finally:
        make.check_argument_for_proper_class = kept


def token_ids(tokenizer: Any) -> dict[str, int]:
    """The ids that a config.json has."""
    named = {
        "image_token_id": "image_token", "video_token_id": "video_token", "image_start_id": "image_start_token",
        "image_end_id": "image_end_token", "slice_start_id": "slice_start_token", "slice_end_id": "slice_end_token",
    }  # fmt: skip
    (newline,) = tokenizer.encode("\n", add_special_tokens=False)
    return {key: tokenizer.convert_tokens_to_ids(TOKENS[name]) for key, name in named.items()} | {"newline_id": newline}
