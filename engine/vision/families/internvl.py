"""InternVL3: a language model with InternViT in front of it, as transformers' `internvl` stores it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.vision.families.wrapping import Wrapping, spellings

if TYPE_CHECKING:
    from engine.vision.towers.internvl import InternVLVisionConfig


def _unused(vision: InternVLVisionConfig) -> tuple[str, ...]:
    """Returns patterns of the tower's tensors behind the features that are taken."""
    layers = tuple(f"*vision_tower.*layer.{index}.*" for index in range(vision.num_layers, vision.stored_layers))
    norm = () if vision.last_norm else ("*vision_tower.layernorm.*",)
    return (*layers, *norm, "*vision_tower.*mask_token")


INTERNVL = Wrapping(
    tower="engine.vision.towers.internvl:InternVLVisionConfig",
    spellings=spellings(("vision_tower", "multi_modal_projector")),
    text="qwen2",
    unused=_unused,
)
