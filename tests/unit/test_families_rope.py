"""Rotary embeddings of every family against stock transformers', for each place where a config may say what they are.

Either frequencies and scale are transformers' own, or the config is refused by a sentence.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.errors import UserError
from engine.models.decoder import rotary_frequencies
from engine.models.families import family_of

FAMILIES = {
    "ernie4_5": "Ernie4_5", "gemma2": "Gemma2", "gemma3_text": "Gemma3", "glm4": "Glm4", "granite": "Granite",
    "hunyuan_v1_dense": "HunYuanDenseV1", "llama": "Llama", "mistral": "Mistral", "olmo2": "Olmo2",
    "phi3": "Phi3", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3",
}  # fmt: skip
SIZES = {
    "vocab_size": 67, "hidden_size": 48, "intermediate_size": 52, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 12, "query_pre_attn_scalar": 12}
LENGTH = "original_max_position_embeddings"
SHORT = [1.0, 1.2, 1.5, 2.0, 3.0, 5.0]
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0},
    "proportional": {"factor": 2.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0},
    "longrope": {"short_factor": SHORT, "long_factor": SHORT},
    "longrope, factor": {"short_factor": SHORT, "long_factor": SHORT, "factor": 8.0},
    "longrope, scale": {"short_factor": SHORT, "long_factor": SHORT, "attention_factor": 1.5},
    "su": {"short_factor": SHORT, "long_factor": SHORT},
}
LENGTHS: dict[str, tuple[int | None, int | None]] = {
    "absent": (None, None), "inside": (50, None), "beside": (None, 50), "the same": (50, 50), "differing": (50, 70)
}  # fmt: skip
"""Length of pretraining: in the mapping, and beside it."""
BASES: dict[str, tuple[float | None, float | None]] = {
    "absent": (None, None), "inside": (500.0, None), "beside": (None, 900.0), "differing": (500.0, 900.0)
}  # fmt: skip


def _config(family: str, kind: str, mapping: str, key: str, length: str, base: str, share: str) -> dict[str, Any]:
    """A config.json.

    Args:
        mapping: what the mapping is called.
        key: what the kind is called inside.
        length, base: of LENGTHS and BASES.
        share: where a part of each head is rotated: "inside", "beside" or "".
    """
    gemma = family.startswith("gemma")
    config: dict[str, Any] = {"model_type": family, **SIZES, **(GEMMA if gemma else {})}
    config |= {"head_dim": 12} if family in ("ernie4_5", "glm4", "hunyuan_v1_dense") else {}
    scaling = {key: kind.partition(",")[0], **copy.deepcopy(KINDS[kind])}
    places = [scaling, config]
    for place, value in zip(places, LENGTHS[length], strict=True):
        place.update({} if value is None else {LENGTH: value})
    for place, value in zip(places, BASES[base], strict=True):
        place.update({} if value is None else {"rope_theta": value})
    if share:
        scaling.update(
            {name: factors[:3] for name, factors in scaling.items() if name.endswith("_factor") and factors is SHORT}
        )
        places[("inside", "beside").index(share)]["partial_rotary_factor"] = 0.5
    if family == "gemma3_text":
        config["sliding_window_pattern"] = 2
        if mapping == "rope_parameters":
            scaling = {"full_attention": scaling, "sliding_attention": {"rope_type": "default"}}
    config[mapping] = scaling
    return config


def _theirs(config: dict[str, Any]) -> list[tuple[Tensor, float]] | None:
    """Frequencies and factor of each rotary embedding; None where transformers does not take the config."""
    family = config["model_type"]
    module = family.removesuffix("_text")
    rotary = getattr(
        importlib.import_module(f"transformers.models.{module}.modeling_{module}"), f"{FAMILIES[family]}RotaryEmbedding"
    )
    given = copy.deepcopy({key: value for key, value in config.items() if key != "model_type"})
    try:
        found = rotary(CONFIG_MAPPING[family](**given))
    except (TypeError, ValueError, KeyError, RuntimeError, StrictDataclassClassValidationError):
        return None
    if family == "gemma3_text":
        kinds = ("full_attention", "sliding_attention")
        return [(getattr(found, f"{kind}_inv_freq"), getattr(found, f"{kind}_attention_scaling")) for kind in kinds]
    return [(found.inv_freq, found.attention_scaling)]


def _ours(config: dict[str, Any]) -> list[tuple[Tensor, float]]:
    family, text = family_of(config)
    decoder = family.config_from_hf(text)
    return [
        (
            rotary_frequencies(rope, decoder.rotary_dim or decoder.head_dim),
            rope.scaling.table_scale if rope.scaling else 1.0,
        )
        for rope in decoder.ropes
        if rope.theta is not None
    ]


def _cases(family: str, *, whole: bool) -> Iterator[tuple[str, ...]]:
    """Arguments of `_config` after the family: all, or those of each kind with each length and with each base."""
    every = itertools.product(
        KINDS, ("rope_scaling", "rope_parameters"), ("rope_type", "type"), LENGTHS, BASES, ("", "inside", "beside")
    )
    for kind, mapping, key, length, base, share in every:
        plain = (mapping == "rope_scaling") + (key == "rope_type") + (base == "beside") + (share == "")
        if whole or plain >= 3:
            yield kind, mapping, key, length, base, share


def _check(family: str, case: tuple[str, ...]) -> str:
    config = _config(family, *case)
    theirs = _theirs(config)
    try:
        ours = _ours(config)
    except UserError as error:
        return f"refused: {error}"
    if theirs is None:
        return "refused by transformers alone"
    assert len(ours) == len(theirs), case
    for (frequencies, scale), (expected, expected_scale) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(frequencies, expected, rtol=1e-5, atol=0, msg=lambda text: f"{case}: {text}")
        assert scale == pytest.approx(expected_scale, rel=1e-6), case
    return "equal"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_frequencies_are_those_of_transformers(family: str, whole: bool) -> None:
    found = {case: _check(family, case) for case in _cases(family, whole=whole)}
    own = (
        {"default", "longrope", "longrope, factor", "longrope, scale"}
        if family == "phi3"
        else {"default", "linear", "llama3", "yarn"} | ({"dynamic"} if family != "gemma3_text" else set())
    )
    for case, outcome in found.items():
        kind, _, key, length, _, share = case
        complete = length != "absent" and (length != "beside" or family != "gemma3_text")
        if (
            kind in own
            and not share
            and (kind not in ("llama3", "yarn") or complete)
            and (family, key) != ("gemma3_text", "type")
        ):
            assert outcome == "equal", (case, outcome)
        assert outcome != "refused by transformers alone" or kind == "su", case
        if kind not in {*own, "su"} and (family, kind) != ("phi3", "yarn"):  # older names of longrope
            assert kind.partition(",")[0] in outcome, (case, outcome)


def test_the_length_beside_phi3s_mapping_counts() -> None:
    """The mapping's own is passed over where the config says another, or, having none, means 4096."""
    lengths = {}
    for length in ("inside", "beside", "differing"):
        config = _config("phi3", "longrope", "rope_scaling", "rope_type", length, "beside", "")
        family, text = family_of(config)
        lengths[length] = family.config_from_hf(text).max_row_length
    assert lengths == {"inside": 4096, "beside": 50, "differing": 70}


def test_dynamic_scaling_changes_nothing_up_to_the_last_position() -> None:
    """Rows end where transformers' frequencies begin to change: at max_position_embeddings."""
    text = {**SIZES, "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, "rope_theta": 1e6}
    family, given = family_of({"model_type": "internvl", "vision_config": {}, "text_config": text})
    config = family.config_from_hf(given)
    assert (config.max_length, config.max_row_length, config.ropes[0].scaling) == (160, 160, None)
    rotary = importlib.import_module("transformers.models.qwen2.modeling_qwen2").Qwen2RotaryEmbedding(
        CONFIG_MAPPING["qwen2"](**copy.deepcopy(text))
    )
    for length, equal in ((160, True), (161, False)):
        rotary(torch.zeros(1), torch.arange(length)[None])
        assert torch.equal(rotary.inv_freq, rotary_frequencies(config.ropes[0], config.head_dim)) == equal
