"""A document with an image, made of a model's config alone."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.adopted.images.arguments import image_token
from engine.adopted.images.inputs import ImageInputs

_TEXT = 12


class MadeUpImages(NamedTuple):
    """A document with images.

    Args:
        tokens: int64 ids, [L].
        images: those of the document.
    """

    tokens: Tensor
    images: ImageInputs


def made_up_images(hf_config: dict[str, Any], model: nn.Module, *, seed: int = 0) -> MadeUpImages:
    """Returns a document with an image for a model of a `config.json`.

    Args:
        model: of transformers, whose features are counted.
    """
    drawn, tower = torch.Generator().manual_seed(seed), model.config.vision_config
    if (merged := getattr(tower, "spatial_merge_size", None)) is not None:
        width = 3 * getattr(tower, "temporal_patch_size", 1) * tower.patch_size**2
        grid = (1, 2 * merged, 4 * merged)
        tensors = torch.randn(8 * merged**2, width, generator=drawn), torch.tensor([grid])
        count, images = 8, ImageInputs(names=("pixel_values", "image_grid_thw"), tensors=tensors)
    else:
        pixels = torch.randn(1, 3, tower.image_size, tower.image_size, generator=drawn)
        given = {"pixel_values": pixels}
        sizes = inspect.signature(model.model.get_image_features).parameters.get("image_sizes")
        if sizes is not None and sizes.default is sizes.empty:
            given["image_sizes"] = torch.tensor([[tower.image_size, tower.image_size]])
        features = model.model.get_image_features(**given).pooler_output
        whole = torch.cat([*features]) if isinstance(features, (list, tuple)) else features
        count, images = whole[..., 0].numel(), ImageInputs(names=tuple(given), tensors=tuple(given.values()))
    text = torch.randint(15, model.get_input_embeddings().num_embeddings, (_TEXT,), generator=drawn)
    return MadeUpImages(torch.cat([text[:3], torch.full((count,), image_token(model.config)), text[3:]]), images)
