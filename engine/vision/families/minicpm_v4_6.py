"""MiniCPM-V 4.6 and 4.7: Qwen3.5's language model with a SigLIP tower that merges patches twice.

4.6 counts all tokens by one position each; 4.7 rotates those of an image by their places on its canvas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.models.decoder_config import DecoderConfig
from engine.vision.families.wrapping import Wrapping, spellings, with_tower

if TYPE_CHECKING:
    from engine.vision.towers.minicpm_v4_6 import MiniCPMV46VisionConfig

_ROOTS = ("vision_tower", "merger")


def _complete_4_6(text: DecoderConfig, vision: MiniCPMV46VisionConfig) -> DecoderConfig:
    """Returns the config with the tower, and with positions of one kind."""
    ropes = tuple(replace(rope, axes=()) for rope in text.ropes)
    return replace(with_tower(text, vision), ropes=ropes)


def _unused(vision: MiniCPMV46VisionConfig) -> tuple[str, ...]:
    """Returns patterns of the merger that is passed by where windows are not merged."""
    return () if vision.window_behind is not None else ("*vision_tower.vit_merger.*",)


MINICPM_V4_7 = Wrapping(
    tower="engine.vision.towers.minicpm_v4_6:MiniCPMV46VisionConfig",
    spellings=spellings(_ROOTS),
    texts={"qwen3_5_text": "qwen3_5_text"},
    text="qwen3_5_text",
    unused=_unused,
)
MINICPM_V4_6 = MINICPM_V4_7._replace(complete=_complete_4_6)
