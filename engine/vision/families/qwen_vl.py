"""Qwen2.5-VL, Qwen3-VL and Qwen3.5: Qwen2, Qwen3 and Qwen3.5's language models, whose tokens of images are rotated by
time, height and width.

A head's pairs of features are shared out between the three: Qwen2.5-VL has them one after the other, Qwen3-VL in turn,
so that each has high and low frequencies. Qwen3-VL's tower has features for its first layers too, Qwen3.5's is the same
without these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.families import qwen2, qwen3
from engine.models.families.checking import part_of
from engine.models.families.family import Family
from engine.models.families.reading import axes_in_turns, checked_sections
from engine.models.names import Spelling
from engine.vision.families.wrapping import Wrapping, with_tower
from engine.vision.layers.fronts import ImageTower

if TYPE_CHECKING:
    from engine.vision.towers.qwen3_vl import Qwen3VisionConfig

_DEFAULTS_2_5 = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
}  # fmt: skip
_DEFAULTS_3 = {"max_position_embeddings": 128000, "rope_theta": 500000.0}
"""What transformers' classes have where config.json says nothing, and Qwen2's and Qwen3's have otherwise."""

_ROPE_KEYS = ("rope_scaling", "rope_parameters")


def _sections(hf: Mapping[str, Any], default: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Returns the config with an ordinary rotary embedding, and how many pairs turn by time, height and width.

    Raises:
        UserError: the three numbers are something else.
    """
    changed, sections = dict(hf), default
    for key in _ROPE_KEYS:
        rope = part_of(hf, key)
        if rope is None:
            continue
        sections = rope.get("mrope_section", sections)
        if rope.get("rope_type", rope.get("type")) == "mrope":
            changed[key] = {**rope, "rope_type": "default", "type": "default"}
    return changed, checked_sections(sections)


def config_2_5(hf: dict[str, Any]) -> DecoderConfig:
    """Reads the language model of Qwen2.5-VL.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    changed, sections = _sections(hf, [16, 24, 24])
    text = qwen2.config_from_hf({**_DEFAULTS_2_5, **changed})
    pairs = text.head_dim // 2
    if sum(sections) != pairs:
        raise UserError(
            f"config.json has mrope_section {sections} for heads of {pairs} pairs of features, which it should share "
            "out: correct it or copy it again."
        )
    axes = tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return replace(text, family="qwen2_5_vl_text", ropes=(replace(text.ropes[0], axes=axes),))


def config_3(hf: dict[str, Any]) -> DecoderConfig:
    """Reads the language model of Qwen3-VL.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    changed, sections = _sections(hf, [24, 20, 20])
    text = qwen3.config_from_hf({**_DEFAULTS_3, **changed})
    axes = axes_in_turns(text.head_dim // 2, sections)
    return replace(text, family="qwen3_vl_text", ropes=(replace(text.ropes[0], axes=axes),))


def _complete_3(text: DecoderConfig, vision: Qwen3VisionConfig) -> DecoderConfig:
    if len(vision.deepstack) > text.num_layers:
        raise UserError(
            f"config.json has {len(vision.deepstack)} vision_config.deepstack_visual_indexes, whose features "
            f"{text.num_layers} layers cannot all take: correct it or copy it again."
        )
    return replace(text, fronts=(ImageTower(model=vision, deepstack=len(vision.deepstack)),))


def _complete_3_5(text: DecoderConfig, vision: Qwen3VisionConfig) -> DecoderConfig:
    if vision.deepstack:
        raise UserError(
            f"config.json has vision_config.deepstack_visual_indexes {list(vision.deepstack)}, but a Qwen3.5 takes "
            "features of images in its embeddings alone: set it to [] or use a Qwen3-VL."
        )
    return with_tower(text, vision)


_SPELLINGS = (
    Spelling("model.language_model.", "lm_head", {"visual": "model.visual"}),
    Spelling("model.", "lm_head", {"visual": "visual"}),
)
QWEN2_5_VL = Wrapping(
    tower="engine.vision.towers.qwen2_5_vl:Qwen25VisionConfig",
    spellings=_SPELLINGS,
    texts=dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_text"), "qwen2_5_vl_text"),
    text="qwen2_5_vl_text",
    either_ties=True,
)
QWEN3_VL = Wrapping(
    tower="engine.vision.towers.qwen3_vl:Qwen3VisionConfig",
    complete=_complete_3,
    spellings=_SPELLINGS,
    texts=dict.fromkeys(("qwen3_vl", "qwen3_vl_text"), "qwen3_vl_text"),
    text="qwen3_vl_text",
)
QWEN3_5 = Wrapping(
    tower="engine.vision.towers.qwen3_vl:Qwen3VisionConfig",
    complete=_complete_3_5,
    spellings=_SPELLINGS,
    texts=dict.fromkeys(("qwen3_5", "qwen3_5_text"), "qwen3_5_text"),
    text="qwen3_5_text",
)
QWEN3_5_MOE = QWEN3_5._replace(
    texts=dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), "qwen3_5_moe_text"), text="qwen3_5_moe_text"
)


QWEN2_5_VL_TEXT = Family(config_2_5)
QWEN3_VL_TEXT = Family(config_3)
