"""A small Gemma 3 with images as its users have it, made by stock transformers, and rows of records for it.

An image has four tokens and windows are of three, so that an image's last token does not see its first one in half of
the layers. transformers takes seconds to import, so that happens inside the functions: ranks import this module and
need none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PATCH = 7
LENGTH = 160
"""Tokens of a row."""
_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
TEXT: dict[str, Any] = {
    "vocab_size": 6411, "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 256, "sliding_window": 3,
    "sliding_window_pattern": 2, "query_pre_attn_scalar": 11, "rope_parameters": _ROPES, "pad_token_id": None,
}  # fmt: skip
VISION = {
    "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 3, "patch_size": PATCH,
    "image_size": 4 * PATCH, "vision_use_head": False,
}  # fmt: skip
_WORDS = ("A cat on a mat.", "Two dogs, and a bird that sings.", "Nothing much.", "Rain, wind, and a red umbrella.")


def _turns(question: str, number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": _WORDS[number % len(_WORDS)]}]


RECORDS: tuple[dict[str, Any], ...] = (
    {"images": ["0.png", "1.png"], "messages": _turns("<image>What is this, and <image>this?", 0)},
    {"messages": _turns("Say something.", 1)},
    {"images": ["1.png"], "messages": _turns("Look: <image>", 2)},
    {"images": ["0.png"], "messages": _turns("<image>", 3)},
    {"messages": _turns("And without any image?", 0)},
    {"messages": _turns("Again, in a row of its own, which has no image at all, and is rather long, or not.", 1)},
)


def draw(model: nn.Module) -> None:
    """Draws every parameter; norms' weights are next to what leaves things as they are."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                is_factor = "vision_tower" in name and "norm" in name and name.endswith("weight")
                nn.init.normal_(parameter, mean=1.0 if is_factor else 0.0, std=0.2)
            else:
                nn.init.normal_(parameter, std=0.8 * parameter[0].numel() ** -0.5)


def make_folder(folder: Path, **text: Any) -> PreTrainedModel:
    """The model, saved in `folder` with its tokenizer, its processor's settings, images and records."""
    import transformers

    from tests.unit.test_vision_data_processors import saved_images, written

    tokenizer, _ = written("gemma3", folder)
    saved_images(folder)
    tokens = {name: getattr(tokenizer, f"{name}_token_id") for name in ("image", "boi", "eoi")}
    config = transformers.Gemma3Config(
        text_config={**TEXT, **text},
        vision_config={"model_type": "siglip_vision_model", **VISION},
        mm_tokens_per_image=4,
        attn_implementation="eager",
        **{f"{name}_token_index": token for name, token in tokens.items()},
    )
    torch.manual_seed(5)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    draw(model)
    model.save_pretrained(folder)
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return model


def dataset(folder: Path, *, packing: bool = True) -> TokenDataset:
    tokenizer = load_tokenizer(folder)
    family = read_vision_family(folder, tokenizer)
    assert family is not None
    return build_texts(
        folder / "records.jsonl",
        tokenizer=tokenizer,
        seq_length=LENGTH,
        packing=packing,
        images=ImageReader(family),
    )


def batch_of(
    folder: Path, rows: Sequence[int] | None = None, *, packing: bool = True, cp: tuple[int, int] = (1, 0)
) -> Batch:
    """Rows of the records, all of them where none are named, or the columns of them that a context rank holds."""
    data = dataset(folder, packing=packing)
    rows = range(data.rows.offsets.shape[0] - 1) if rows is None else rows
    size, rank = cp
    return rank_batch(data, rows, rows, RowShape(pad_multiple=4, pad_token=5, context_size=size, context_rank=rank))


def stock_pixels(images: Images, document: int) -> Tensor | None:
    """[n, 3, H, W] of a document's images."""
    tiles = images.patches_PF.split([rows * columns for rows, columns in images.grids])
    own = [tile for tile, owner in zip(tiles, images.documents, strict=True) if owner == document]
    if not own:
        return None
    return rearrange(torch.stack(own), "n (h w) (c p q) -> n c (h p) (w q)", h=4, p=PATCH, q=PATCH)


def stock_losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits and token losses with every document run alone, from position 0."""
    assert batch.part(Images) is not None
    logits, losses = [], []
    tokens, labels = batch.tokens_BS.flatten(), batch.labels_BS.flatten()
    lengths = batch.document_lengths
    dtype = next(model.parameters()).dtype
    for number, (ids, targets) in enumerate(zip(tokens.split(lengths), labels.split(lengths), strict=True)):
        pixels = stock_pixels(batch.part(Images), number)
        out = model(
            input_ids=ids[None],
            pixel_values=None if pixels is None else pixels.to(dtype),
            token_type_ids=(ids == model.config.image_token_id).long()[None],
            use_cache=False,
        )
        logits.append(out.logits[0])
        losses.append(nn.functional.cross_entropy(logits[-1], targets, reduction="none", ignore_index=IGNORE_LABEL))
    return torch.cat(logits), torch.cat(losses)
