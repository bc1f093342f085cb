"""A document with an image, made of a model's config alone.

Families of transformers take pixels in a few forms, which the arguments of their forward tell apart; where these leave
open how patches are laid out, the layouts are tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.adopted.images.arguments import image_token
from engine.adopted.images.inputs import ImageInputs
from engine.adopted.structure import FAULTS, find_structure, quiet
from engine.errors import UserError

_TEXT = 12
_FIRST_TOKEN = 15
"""Those before it mean something to many tokenizers."""
_MOST_TILES = 6

Given = dict[str, Tensor]


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

    Raises:
        UserError: the model makes no features of any layout of pixels that is known.
    """
    drawn = torch.Generator().manual_seed(seed)
    place = find_structure(model, hf_config).images
    if place is None:
        raise UserError("no module of it takes pixels.")
    module = model.get_submodule(place)
    maker = _maker(module, model)
    given, count = _features(maker, _layouts(module, maker, model.config, drawn))
    token, own = image_token(model.config), _own_tokens(model.config)
    known = [one for one in range(_FIRST_TOKEN, model.config.get_text_config().vocab_size) if one not in own]
    text = torch.tensor(known)[torch.randint(len(known), (_TEXT,), generator=drawn)]
    images = ImageInputs(names=tuple(given), tensors=tuple(given.values()))
    return MadeUpImages(torch.cat([text[:3], torch.full((count,), token), text[3:]]), images)


def _own_tokens(config: Any) -> set[int]:
    """Returns the tokens that a config names, none of which is text."""
    records = (config, config.get_text_config())
    return {
        one
        for record in records
        for name, value in vars(record).items()
        if "token" in name or name.endswith("_id")
        for one in (value if isinstance(value, list) else [value])
        if isinstance(one, int)
    }


def _maker(module: nn.Module, model: nn.Module) -> Any:
    """Returns the method that makes features of pixels."""
    for owner in (module, model):
        if (found := getattr(owner, "get_image_features", None)) is not None:
            return found
    raise UserError("no method of it makes features of images alone.")


@torch.no_grad()
def _features(maker: Any, layouts: Iterator[Given]) -> tuple[Given, int]:
    """Returns the first layout of which features are made, and how many."""
    first: Exception | None = None
    for given in layouts:
        try:
            with quiet():
                found = _rows(maker(**given))
        except FAULTS as error:
            first = first or error
            continue
        pieces = found if isinstance(found, (list, tuple)) else [found]
        return given, sum(one[..., 0].numel() for one in pieces)
    assert first is not None
    raise first


def _rows(made: Any) -> Any:
    """Returns the features, or as many, in what a model makes of an image; a list of them for each image."""
    if made.pooler_output is not None:
        return made.pooler_output
    for_layers = getattr(made, "deepstack_features", None)
    return made.last_hidden_state if for_layers is None else for_layers[0][1]


def _layouts(module: nn.Module, maker: Any, config: Any, drawn: torch.Generator) -> Iterator[Given]:
    """Yields an image in the ways that pixels may lie, as arguments say of the module and of what makes features."""
    takes = inspect.signature(module.forward).parameters
    if (tower := getattr(config, "vision_config", None)) is None:
        raise UserError("its config has no vision_config.")
    tower = getattr(tower, "sam_config", None) or tower
    patch, tiny = _size(tower, "patch_size", config), _Patches.of(tower, config)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn)

    if "image_grid_thw" in takes or "image_grid_hw" in takes:
        more = {"image_merge_sizes": torch.tensor([tiny.merge])} if "image_merge_sizes" in takes else {}
        name = "image_grid_thw" if "image_grid_thw" in takes else "image_grid_hw"
        sizes = torch.tensor([[1, tiny.rows, tiny.columns]])[:, -(3 if name == "image_grid_thw" else 2) :]
        for shape in tiny.shapes():
            yield {"pixel_values": random(*shape), name: sizes, **more}
        merged = tiny.merge * patch
        tokens = random(tiny.total // tiny.merge**2, merged, merged, 3)
        yield {"pixel_values": tokens, name: torch.tensor([[1, tiny.rows // tiny.merge, tiny.columns // tiny.merge]])}
    elif "spatial_shapes" in takes:
        yield {
            "pixel_values": random(1, tiny.total, 3 * patch**2),
            "spatial_shapes": torch.tensor([[tiny.rows, tiny.columns]]),
            "pixel_attention_mask": torch.ones(1, tiny.total, dtype=torch.int64),
        }
    elif "target_sizes" in takes:
        sizes = torch.tensor([[tiny.rows, tiny.columns]], dtype=torch.int32)
        yield {"pixel_values": random(1, 3, patch, patch * tiny.total), "target_sizes": sizes}
    elif "image_position_ids" in takes:
        places = torch.cartesian_prod(torch.arange(tiny.rows), torch.arange(tiny.columns)).flip(-1)[None]
        for side in (patch, patch * tiny.merge):
            yield {"pixel_values": random(1, tiny.total, 3 * side**2).sigmoid(), "image_position_ids": places}
    elif "image_token_pooling" in takes:
        side = _size(tower, "image_size", config) // patch
        whole = torch.arange(side * side).view(1, -1, 4)
        yield {
            "pixel_values": random(1, side * side, 3 * patch**2),
            "image_token_pooling": whole[0],
            "image_grids": torch.tensor([[0, 0, side, side // 4]]),
        }
    elif _size(tower, "image_size", config, 0) == 0:
        for shape in tiny.shapes():
            yield {"pixel_values": random(*shape)}
    else:
        needs = {name for name, one in inspect.signature(maker).parameters.items() if one.default is one.empty}
        yield from _of_whole_images(takes, needs, _size(tower, "image_size", config), config, random)


def _of_whole_images(takes: Any, needs: set[str], side: int, config: Any, random: Any) -> Iterator[Given]:
    """Yields an image as pixels in rows and columns, in one tile or several."""
    more: Given = {}
    if "high_res_pixel_values" in takes:
        high = _size(config.high_res_vision_config, "image_size", config)
        more["high_res_pixel_values"] = random(1, 3, high, high)
    if "image_sizes" in needs:
        more["image_sizes"] = torch.tensor([[side, side]])
    if not hasattr(config, "image_grid_pinpoints"):
        yield {"pixel_values": random(1, 3, side, side), **more}
    tiles = range(1, _MOST_TILES + 1) if hasattr(config, "image_grid_pinpoints") else (1,)
    for count in tiles:
        pixels = random(1, count, 3, side, side)
        yield {"pixel_values": pixels, **more}
        if "pixel_attention_mask" in takes:
            for shape in ((1, count, side, side), (1, count)):
                yield {"pixel_values": pixels, "pixel_attention_mask": torch.ones(shape, dtype=torch.bool), **more}


class _Patches(NamedTuple):
    """An image in patches.

    Args:
        merge: patches of a side that become one row of features.
        patch, temporal: sizes of one.
        rows, columns: of patches.
    """

    merge: int
    patch: int
    temporal: int
    rows: int
    columns: int

    @classmethod
    def of(cls, tower: Any, config: Any) -> _Patches:
        """Returns an image of few patches that are merged as the model merges them."""
        names = ("spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size", "downsample_factor")
        merge = next((size for name in names if (size := _size(tower, name, config, 0))), 2)
        if hasattr(tower, "insert_layer_id"):
            merge *= 2
        temporal = _size(tower, "temporal_patch_size", config, 0) or _size(tower, "patch_temporal", config, 1)
        return cls(merge, _size(tower, "patch_size", config), temporal, 2 * merge, 4 * merge)

    @property
    def total(self) -> int:
        return self.rows * self.columns

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """Yields the shapes that pixels of patches may have."""
        area = self.patch**2
        for temporal in dict.fromkeys((self.temporal, 1)):
            yield self.total, 3 * temporal * area
            yield self.total, 3, *((temporal,) if temporal > 1 else ()), self.patch, self.patch
            yield self.total, temporal, self.patch, self.patch, 3
        yield 1, self.total, 3 * area


def _size(record: Any, name: str, outer: Any, default: int | None = None) -> int:
    """Returns a size of a tower's config or of the one around it; of a size for each side the first."""
    found = getattr(record, name, None)
    if found is None:
        found = getattr(outer, name, None)
    if found is None:
        if default is None:
            raise UserError(f"its config names no {name} of images.")
        return default
    return int(found[0] if isinstance(found, (list, tuple)) else found)
