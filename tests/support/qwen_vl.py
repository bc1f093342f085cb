"""Small random Qwen2.5-VL, Qwen3-VL, Qwen3.5 and MiniCPM-V 4.6 models as stock transformers saves them, with records
about images.

Everything goes the way of a run: the folder has the model's tokenizer and image processor, the records are read by the
engine's data side, and stock transformers computes the same documents one by one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from engine.batch import IGNORE_LABEL, Batch
from engine.data.collate import rank_batch
from engine.data.dataset import TokenDataset
from engine.data.row_shape import RowShape
from engine.data.text_reader import build_texts
from engine.data.tokenizer import load_tokenizer
from engine.vision.batch_parts import Images
from engine.vision.data.families import read_vision_family
from engine.vision.data.reader import ImageReader
from tests.support import minicpm_v4_6 as minicpm
from tests.unit.test_vision_data_processors import MESSAGES, saved_images, written

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", *minicpm.KINDS)
PAD = "<|image_pad|>"
_TEXT = {
    "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 300.0}
_TOWER = {
    "depth": 4, "hidden_size": 24, "intermediate_size": 20, "num_heads": 3, "patch_size": 14, "spatial_merge_size": 2,
    "out_hidden_size": 48,
}  # fmt: skip
_DELTA = {
    "rms_norm_eps": 0.1,  # a document's first output is a multiple of one value, which the norm after it takes away
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 28,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "rope_parameters": {**_ROPE, "mrope_section": [3, 2, 2], "partial_rotary_factor": 0.5},
}  # fmt: skip
"""A quarter of the features is not enough to have pairs of all three kinds."""
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 3,
    "patch_size": minicpm.PATCH, "image_size": 10 * minicpm.PATCH,
}  # fmt: skip
RECORDS: list[dict[str, Any]] = [
    {"images": ["0.png", "1.png"], "messages": MESSAGES},
    {"messages": MESSAGES[2:]},
    {"images": ["1.png"], "messages": [{"role": "user", "content": "<image>Who?"}, MESSAGES[1]]},
]


def make_model(kind: str, folder: Path) -> Any:
    """The model, every parameter drawn, saved in `folder` with its tokenizer, its processor, images and records."""
    import transformers

    if kind in minicpm.KINDS:
        tokenizer = minicpm.written(kind, folder, scale_resolution=minicpm.SLICES[kind]).tokenizer
    else:
        tokenizer, _ = written(kind, folder)
    saved_images(folder)
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }  # fmt: skip
    text = {**_TEXT, "vocab_size": len(tokenizer)}
    if kind == "qwen2_5_vl":
        config = transformers.Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": {**_ROPE, "mrope_section": [1, 2, 3]}},
            vision_config={**_TOWER, "window_size": 56, "fullatt_block_indexes": [1, 3]},
            **ids,
        )
        make = transformers.Qwen2_5_VLForConditionalGeneration
    elif kind in minicpm.KINDS:
        ids = minicpm.token_ids(tokenizer) if kind == "minicpmv4_7" else {"image_token_id": ids["image_token_id"]}
        name = "MiniCPMV4_7" if kind == "minicpmv4_7" else "MiniCPMV4_6"
        config = getattr(transformers, f"{name}Config")(
            text_config={**text, **_DELTA, "model_type": "qwen3_5_text"},
            vision_config=_SIGLIP,
            insert_layer_id=1,
            **ids,
        )
        make = getattr(transformers, f"{name}ForConditionalGeneration")
    elif kind.startswith("qwen3_5"):
        routed = kind == "qwen3_5_moe"
        name = "Qwen3_5Moe" if routed else "Qwen3_5"
        config = getattr(transformers, f"{name}Config")(
            text_config={**text, **_DELTA, **(_EXPERTS if routed else {})},
            vision_config={**_TOWER, "patch_size": 16, "num_position_embeddings": 25},
            **ids,
        )
        make = getattr(transformers, f"{name}ForConditionalGeneration")
    else:
        config = transformers.Qwen3VLConfig(
            text_config={**text, "head_dim": 14, "rope_parameters": {**_ROPE, "mrope_section": [3, 2, 2]}},
            vision_config={
                **_TOWER,
                "patch_size": 16,
                "num_position_embeddings": 25,
                "deepstack_visual_indexes": [2, 0, 1],
            },
            tie_word_embeddings=True,
            **ids,
        )
        make = transformers.Qwen3VLForConditionalGeneration
    torch.manual_seed(len(kind))
    model = make(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # sums of decays along a chunk stay small, and so does their rounding
                mean = -1.5 if key.endswith("A_log") else 1.0 if "norm" in key and "bias" not in key else 0.0
                nn.init.normal_(parameter, mean=mean, std=0.2)
            else:
                # token embeddings that a head is not tied to are large, so that texts differ in what follows them
                large = "embed_tokens" in key and not config.tie_word_embeddings
                nn.init.normal_(parameter, std=1.0 if large else 0.8 * parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    return model


def dataset_of(folder: Path, *, packing: bool, seq_length: int = 256) -> TokenDataset:
    tokenizer = load_tokenizer(folder)
    family = read_vision_family(folder, tokenizer)
    assert family is not None
    return build_texts(
        folder / "records.jsonl", tokenizer=tokenizer, seq_length=seq_length, packing=packing,
        images=ImageReader(family),
    )  # fmt: skip


def batch_of(folder: Path, *, packing: bool) -> Batch:
    """All records in one micro-batch: a row each, or packed in one."""
    dataset = dataset_of(folder, packing=packing)
    rows = list(range(len(dataset)))
    assert len(rows) == (1 if packing else len(RECORDS))
    return rank_batch(dataset, rows, rows, RowShape(pad_multiple=4))


def stock_images(
    model: Any, ids: Tensor, tiles: Sequence[Tensor], grids: Sequence[tuple[int, ...]], pad: int
) -> dict[str, Tensor]:
    """What transformers' model has to know of the images of a document with these token ids [1, S].

    Args:
        tiles: the patches of each tile, as the engine's tower takes them.
    """
    if not tiles:
        return {}
    kind, patches = model.config.model_type, torch.cat(list(tiles)).to(model.dtype)
    types = {} if kind == "minicpmv4_6" else {"mm_token_type_ids": (ids == pad).int()}
    if kind in minicpm.KINDS:
        packed = rearrange(patches, "l (c y x) -> c y (l x)", c=3, y=minicpm.PATCH)[None]
        return {"pixel_values": packed, "target_sizes": torch.tensor(grids), **types}
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([(1, *grid) for grid in grids]), **types}


def stock_outputs(model: Any, batch: Batch, pad: int) -> list[tuple[slice, Tensor, Tensor]]:
    """For each document its tokens in the flat batch, transformers' logits, and the labels.

    Args:
        pad: the token that stands for a feature.
    """
    assert batch.part(Images) is not None
    images, found, start, patch = batch.part(Images), [], 0, 0
    patches = list(images.patches_PF.split([rows * columns for rows, columns in images.grids]))
    for number, length in enumerate(batch.document_lengths):
        ids = batch.tokens_BS.flatten()[start : start + length][None]
        own = [index for index, owner in enumerate(images.documents) if owner == number]
        tiles = [patches[index] for index in own]
        more = stock_images(model, ids, tiles, [images.grids[index] for index in own], pad)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more).logits[0]
        span = slice(start, start + length)
        found.append((span, logits, batch.labels_BS.flatten()[span]))
        start, patch = start + length, patch + len(own)
    return found


def stock_loss(model: Any, batch: Batch, pad: int) -> Tensor:
    """The mean loss of all targets."""
    losses = [
        nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_LABEL)
        for _, logits, labels in stock_outputs(model, batch, pad)
    ]
    return torch.stack(losses).sum() / batch.loss_weights_BS.sum()
