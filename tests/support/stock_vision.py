"""Small random vision-language models that stock transformers has, saved as it saves them, and what is asked of them.

Shapes are awkward on purpose. transformers takes seconds to import, so that happens inside the functions: ranks import
this module and need none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.batch import IGNORE_LABEL, Batch
from engine.vision.batch_parts import Images
from engine.vision.data.anyres import anyres_grid
from engine.vision.layers.encoder import VisionConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT = {
    "vocab_size": 67, "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
TOWER = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 21,
    "patch_size": 7,
}  # fmt: skip
IMAGE = 66
"""The token that stands for a feature."""


def _llava(text: str, vocab: int, image: int, side: int, **changes: Any) -> PreTrainedModel:
    import transformers

    tower = transformers.CLIPVisionConfig(**{**TOWER, "image_size": side})
    config = transformers.LlavaConfig(
        vision_config=tower, text_config=_text(text, vocab), image_token_index=image, **changes
    )
    return transformers.LlavaForConditionalGeneration(config)


def _internvl(text: str, tower: dict[str, Any], vocab: int, image: int, side: int, **changes: Any) -> PreTrainedModel:
    import transformers

    sizes = {**TOWER, "image_size": [side, side], "patch_size": [7, 7], **tower}
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(**sizes), text_config=_text(text, vocab), image_token_id=image,
        **{"tie_word_embeddings": False, **changes},
    )  # fmt: skip
    return transformers.InternVLForConditionalGeneration(config)


def _next(text: str, vocab: int, image: int, side: int, **changes: Any) -> PreTrainedModel:
    import transformers

    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**{**TOWER, "image_size": side}), text_config=_text(text, vocab),
        image_token_index=image, image_grid_pinpoints=pinpoints(side), **changes,
    )  # fmt: skip
    return transformers.LlavaNextForConditionalGeneration(config)


def _onevision(text: str, vocab: int, image: int, side: int, **changes: Any) -> PreTrainedModel:
    import transformers

    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**{**TOWER, "image_size": side}), text_config=_text(text, vocab),
        image_token_index=image, image_grid_pinpoints=pinpoints(side), vision_aspect_ratio="anyres_max_2", **changes,
    )  # fmt: skip
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def pinpoints(side: int) -> list[list[int]]:
    """What images are padded to."""
    return [[side * down, side * across] for down, across in ((1, 1), (1, 2), (2, 2), (3, 1))]


def _text(kind: str, vocab: int) -> Any:
    import transformers

    more = {"Qwen3": {"head_dim": 6}, "Mistral": {"sliding_window": 7}}.get(kind, {})
    return getattr(transformers, f"{kind}Config")(**{**TEXT, "vocab_size": vocab}, **more)


MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "llava": partial(_llava, "Llama"),
    "llava mistral": partial(_llava, "Mistral", vision_feature_layer=-1, multimodal_projector_bias=False),
    "llava qwen2": partial(_llava, "Qwen2", vision_feature_layer=[-3, 2, 0], projector_hidden_act="gelu_pytorch_tanh"),
    "llava qwen3": partial(_llava, "Qwen3", vision_feature_select_strategy="full"),
    "internvl": partial(_internvl, "Qwen2", {}),
    "internvl qwen3": partial(
        _internvl,
        "Qwen3",
        {"use_mean_pooling": False, "attention_bias": True, "use_qk_norm": True, "norm_type": "rms_norm"},
        tie_word_embeddings=True,
    ),
    "internvl llama": partial(
        _internvl, "Llama", {"use_absolute_position_embeddings": False, "use_mask_token": True}, vision_feature_layer=-2
    ),
    "llava_next": partial(_next, "Llama"),
    "llava_next mistral": partial(_next, "Mistral", vision_feature_layer=[-2, 1]),
    "llava_onevision": partial(_onevision, "Qwen2"),
    "llava_onevision llama": partial(_onevision, "Llama", vision_feature_layer=[-2, 1]),
}
"""Model -> makes it."""

SIDES = {"internvl": 28, "llava_next": 23, "llava_onevision": 23}
"""Pixels on a side of a tile, where that is not 21."""


def side_of(name: str) -> int:
    return SIDES.get(name.partition(" ")[0], 21)


def make_model(
    name: str, folder: Path | None = None, *, vocab: int = 67, image: int = IMAGE, side: int | None = None
) -> PreTrainedModel:
    """The model, every parameter drawn, and saved in `folder`.

    Args:
        vocab: tokens.
        image: that of them which stands for a feature.
        side: pixels on a side of a tile.
    """
    torch.manual_seed(len(name))
    model = MODELS[name](vocab=vocab, image=image, side=side or side_of(name)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=1.0 if "norm" in key and "bias" not in key else 0.0, std=0.2)
            else:
                nn.init.normal_(parameter, std=0.8 * parameter[0].numel() ** -0.5)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def pixels(count: int, side: int = 21, seed: int = 0) -> Tensor:
    """Normalised images [count, 3, side, side]."""
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def patches(pixels_NCHW: Tensor, patch: int = 7) -> Tensor:
    """Patches [P, 3 * patch ** 2] of images, as towers read them."""
    rows, columns = (length // patch * patch for length in pixels_NCHW.shape[-2:])
    return rearrange(pixels_NCHW[..., :rows, :columns], "n c (h p) (w q) -> (n h w) (c p q)", p=patch, q=patch)


def batch_of(ids_BS: Tensor, images: Images, *, lengths: tuple[int, ...] | None = None) -> Batch:
    """Whole rows, packed with documents of these lengths; every next token is a target that is no image's."""
    rows, length = ids_BS.shape
    lengths = lengths or (length,) * rows
    labels = torch.cat([ids_BS[:, 1:], torch.full((rows, 1), IGNORE_LABEL)], dim=1)
    ends = torch.tensor(lengths).cumsum(0) - 1
    labels.view(-1)[ends] = IGNORE_LABEL
    labels[labels == IMAGE] = IGNORE_LABEL
    return Batch(
        tokens_BS=ids_BS,
        labels_BS=labels,
        positions_BS=torch.cat([torch.arange(count) for count in lengths]).view_as(ids_BS),
        token_index_BS=torch.arange(ids_BS.numel()).view_as(ids_BS),
        loss_weights_BS=(labels != IGNORE_LABEL).float(),
        document_offsets=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        document_lengths=lengths,
        parts=(images,),
    )


DOCUMENTS = (106, 22, 70, 58)
"""Lengths of the documents, two in a row."""
IMAGES = ((0, 1), (), (2,), (3,))
"""The images of each document."""
SIZES = ((30, 25), (20, 61), (50, 41), (31, 80))
"""Widths and heights of the images, where these matter."""
Document = tuple[Tensor, dict[str, Tensor]]
"""Token ids, and what a stock model has to know of the images."""


def packed(name: str, vision: VisionConfig, *, seed: int = 0) -> tuple[Batch, list[Document]]:
    """Rows with documents of none, one and two images."""
    generator = torch.Generator().manual_seed(5 + seed)
    side = side_of(name)
    shown, documents, places, owners, grids, start = [], [], [], [], [], 0
    for number, (length, numbers) in enumerate(zip(DOCUMENTS, IMAGES, strict=True)):
        ids = torch.randint(0, IMAGE, (length,), generator=generator)
        own, at = [], 3
        for image in numbers:
            grid = _grid(name, side, SIZES[image], alone=len(numbers) == 1)
            count = vision.num_features(grid)
            ids[at : at + count] = IMAGE
            places += range(start + at, start + at + count)
            at += count + 4
            own.append(pixels(grid[0] // (side // 7), side, 10 * seed + image))
            grids.append(grid)
        documents.append((ids, _given(name, own, [SIZES[image] for image in numbers])))
        shown += own
        owners += [number] * len(own)
        start += length
    images = Images(
        patches_PF=patches(torch.cat(shown)), grids=tuple(grids), documents=tuple(owners), places_K=torch.tensor(places)
    )
    return batch_of(torch.cat([ids for ids, _ in documents]).view(2, -1), images, lengths=DOCUMENTS), documents


def _grid(name: str, side: int, size: tuple[int, int], *, alone: bool) -> tuple[int, ...]:
    tiled, onevision = name.startswith(("llava_next", "llava_onevision")), name.startswith("llava_onevision")
    if not tiled or (onevision and not alone):
        return side // 7, side // 7
    return anyres_grid(size, pinpoints(side), tile=side, side=side // 7, most=2 if onevision else None)


def _given(name: str, tiles: list[Tensor], sizes: list[tuple[int, int]]) -> dict[str, Tensor]:
    if not tiles:
        return {}
    if not name.startswith(("llava_next", "llava_onevision")):
        return {"pixel_values": torch.cat(tiles)}
    most = max(map(len, tiles))
    given = {
        "pixel_values": torch.stack([pad(one, (0, 0) * 3 + (0, most - len(one))) for one in tiles]),
        "image_sizes": torch.tensor([[height, width] for width, height in sizes]),
    }
    return given | ({} if name.startswith("llava_next") else {"batch_num_images": torch.tensor([len(tiles)])})


def stock_losses(model: nn.Module, batch: Batch, documents: list[Document]) -> tuple[Tensor, Tensor]:
    """Logits and token losses of stock transformers, every document alone."""
    dtype = next(model.parameters()).dtype
    logits = []
    for ids, given in documents:
        more = {key: one.to(dtype) if key == "pixel_values" else one for key, one in given.items()}
        logits.append(model(input_ids=ids[None], use_cache=False, **more).logits[0])
    losses = torch.nn.functional.cross_entropy(
        torch.cat(logits), batch.labels_BS.flatten(), reduction="none", ignore_index=IGNORE_LABEL
    )
    return torch.cat(logits), losses
