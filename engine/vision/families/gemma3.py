"""Gemma 3 with images: SigLIP in front of its language model, in which tokens of an image see the whole image."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.vision.families.wrapping import Wrapping, spellings
from engine.vision.layers.bidirectional import BidirectionalImages
from engine.vision.layers.fronts import ImageTower


def _complete(text: DecoderConfig, hf: dict[str, Any]) -> DecoderConfig:
    # where no image is looked at, the packages that vision models need may be missing
    from engine.vision.towers.gemma3 import Gemma3VisionConfig

    if text.logits_softcap is not None:
        raise UserError(
            f"config.json has text_config.final_logit_softcapping {text.logits_softcap:g}, which a Gemma 3 with "
            "images does not apply: set it to null."
        )
    vision = Gemma3VisionConfig.from_hf(hf, width=text.hidden)
    return replace(text, fronts=(ImageTower(model=vision),), variants=(BidirectionalImages(),))


def _unused(hf: dict[str, Any]) -> tuple[str, ...]:
    """Returns patterns of the tower's pooling head, which checkpoints may have."""
    return ("*vision_tower.head.*", "*vision_tower.vision_model.head.*", "*vision_tower.*position_ids")


GEMMA3 = Wrapping(
    complete=_complete,
    spellings=spellings(("vision_tower", "multi_modal_projector"), inner={"vision_tower": "vision_model"}),
    texts={"gemma3_text": "gemma3_text"},
    text="gemma3_text",
    unused=_unused,
)
