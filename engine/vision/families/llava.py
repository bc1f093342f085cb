"""LLaVA, LLaVA-NeXT and LLaVA-OneVision: a language model with a CLIP or SigLIP tower and two linears in front."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.vision.families.wrapping import Wrapping, spellings

if TYPE_CHECKING:
    from engine.vision.towers.llava import LlavaVisionConfig
    from engine.vision.towers.llava_tiles import TiledLlavaConfig

_ROOTS, _INNER = ("vision_tower", "multi_modal_projector"), {"vision_tower": "vision_model"}


def _unused(vision: LlavaVisionConfig | TiledLlavaConfig) -> tuple[str, ...]:
    """Returns patterns of the tower's tensors behind the features that are taken."""
    tower = vision.tower
    layers = (f"*vision_tower.*layers.{index}.*" for index in range(tower.num_layers, tower.stored_layers))
    return (*layers, *(f"*vision_tower.*{name}" for name in ("post_layernorm.*", "head.*", "position_ids")))


LLAVA = Wrapping(
    tower="engine.vision.towers.llava:LlavaVisionConfig",
    spellings=spellings(_ROOTS, inner=_INNER),
    unused=_unused,
    either_ties=True,
)
NEXT = Wrapping(
    tower="engine.vision.towers.llava_tiles:TiledLlavaConfig",
    spellings=spellings((*_ROOTS, "image_newline"), inner=_INNER),
    unused=_unused,
    parameters=("image_newline",),
    either_ties=True,
)
ONEVISION = NEXT._replace(text="qwen2")
