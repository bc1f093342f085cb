"""Gemma 3 with images: SigLIP in front of its language model, in which tokens of an image see the whole image."""

from __future__ import annotations

from dataclasses import replace

from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.vision.families.wrapping import Wrapping, spellings, with_tower
from engine.vision.layers.bidirectional import BidirectionalImages
from engine.vision.layers.encoder import VisionConfig


def _complete(text: DecoderConfig, vision: VisionConfig) -> DecoderConfig:
    if text.logits_softcap is not None:
        raise UserError(
            f"config.json has text_config.final_logit_softcapping {text.logits_softcap:g}, which a Gemma 3 with "
            "images does not apply: set it to null."
        )
    return replace(with_tower(text, vision), variants=(BidirectionalImages(),))


def _unused(vision: VisionConfig) -> tuple[str, ...]:
    """Returns patterns of the tower's pooling head, which checkpoints may have."""
    return ("*vision_tower.head.*", "*vision_tower.vision_model.head.*", "*vision_tower.*position_ids")


GEMMA3 = Wrapping(
    tower="engine.vision.towers.gemma3:Gemma3VisionConfig",
    spellings=spellings(("vision_tower", "multi_modal_projector"), inner={"vision_tower": "vision_model"}),
    texts={"gemma3_text": "gemma3_text"},
    text="gemma3_text",
    complete=_complete,
    unused=_unused,
)
