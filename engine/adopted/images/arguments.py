"""What the forward of a model with images takes beside its tokens: pixels, and what is told of the tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine.adopted.images.inputs import ImageInputs
from engine.batch import IGNORE_LABEL
from engine.errors import UserError

_NAMES = ("image_token_id", "image_token_index", "img_context_token_id", "image_patch_id")
"""Under which configs have the token that stands for a row of an image's features."""


def image_token(config: Any) -> int:
    """Returns the token that stands for a row of an image's features.

    Args:
        config: transformers' record of a model, the outer one.

    Raises:
        UserError: the config has none.
    """
    for record in (config, config.get_text_config()):
        for name in _NAMES:
            if isinstance(found := getattr(record, name, None), int):
                return found
    raise UserError(
        f"config.json of this {config.model_type} model has no image_token_id: give the token that stands for a row of "
        "an image's features."
    )


def forward_arguments(
    model: nn.Module, tokens_BS: Tensor, images: ImageInputs | None, labels_BS: Tensor | None = None
) -> dict[str, Tensor]:
    """Returns what `model`'s forward takes of images beside the tokens.

    Args:
        model: of transformers, the whole or the one below its head.
        tokens_BS: int64.
        images: None for rows without any.
        labels_BS: int64, of the next token; for models whose tokens without loss see each other. None takes those up to
            the last image for such.

    Raises:
        UserError: the forward does not take an argument of `images`.
    """
    takes = inspect.signature(model.forward).parameters
    found = {} if images is None else dict(zip(images.names, images.tensors, strict=True))
    unknown = [name for name in found if name not in takes]
    if unknown:
        raise UserError(
            f"images of this {_config(model).model_type} model come with {unknown[0]}, which its forward does not "
            "take: use the processor that the model was saved with."
        )
    for name, told in _TOLD.items():
        if name in takes and (value := told(_config(model), tokens_BS, labels_BS)) is not None:
            found[name] = value
    return found


def _config(model: nn.Module) -> Any:
    return model.config


def _kinds(config: Any, tokens_BS: Tensor, labels_BS: Tensor | None) -> Tensor:
    """Returns 1 where a token is of an image and 0 elsewhere."""
    own = [getattr(config, name, None) for name in _MORE.get(config.model_type, ())]
    tokens = [image_token(config), *(token for token in own if token is not None)]
    return torch.isin(tokens_BS, torch.tensor(tokens, device=tokens_BS.device)).long()


def _kinds_of_experts(config: Any, tokens_BS: Tensor, labels_BS: Tensor | None) -> Tensor:
    """Returns the kinds with the tokens around an image among its own."""
    around = [config.image_start_token_id, config.image_end_token_id]
    return _kinds(config, tokens_BS, None) | torch.isin(tokens_BS, torch.tensor(around, device=tokens_BS.device))


def _sides(config: Any, tokens_BS: Tensor, labels_BS: Tensor | None) -> Tensor | None:
    """Returns the kinds; where a model has a prefix whose tokens see each other, 0 in it and 1 behind it."""
    if config.model_type not in _WITH_PREFIX:
        return _kinds(config, tokens_BS, None)
    is_prefix = tokens_BS == image_token(config)
    if not bool(is_prefix.any()):
        return None  # no image: each token sees those before it
    if labels_BS is None:
        in_front = is_prefix.long().flip(-1).cummax(-1).values.flip(-1)
        return 1 - in_front
    answered = (labels_BS != IGNORE_LABEL).long()
    return (answered.cumsum(-1) > answered).long()


_WITH_PREFIX = ("paligemma",)
"""Types whose tokens in front of the answer see each other."""
_MORE: dict[str, tuple[str, ...]] = {
    "molmo2": ("image_start_token_id", "image_end_token_id", "image_col_id", "low_res_image_start_token_id")
}
"""By type, keys of the tokens around images that its processor counts among theirs."""
_TOLD: dict[str, Callable[[Any, Tensor, Tensor | None], Tensor | None]] = {
    "mm_token_type_ids": _kinds,
    "moe_mm_token_type_ids": _kinds_of_experts,
    "token_type_ids": _sides,
}
"""By argument of a forward, what it is told of the tokens."""
