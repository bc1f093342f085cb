"""Models that put a vision model in front of another family's language model.

Their `config.json` has the language model's in `text_config` and the tower's in `vision_config`, and their checkpoints
name the same modules in several ways: those that were released before transformers 5, and those that have the names of
its modules. Here is what they share; a family of them is a `Wrapping`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.families.checking import part_of
from engine.models.families.family import Family
from engine.models.names import Spelling
from engine.seams import resolve
from engine.vision.layers.encoder import VisionConfig
from engine.vision.layers.fronts import ImageTower

_USUAL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_QWEN = {**_USUAL, "intermediate_size": 22016, "vocab_size": 151936}
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_USUAL, "intermediate_size": 11008, "vocab_size": 32000},
    "mistral": {**_USUAL, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 131072},
    "qwen2": {**_QWEN, "max_position_embeddings": 32768},
    "qwen3": {**_QWEN, "max_position_embeddings": 32768},
    "gemma3_text": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    "qwen2_5_vl_text": {
        "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
        "vocab_size": 152064,
    },
    "qwen3_vl_text": _QWEN,
    "qwen3_5_text": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "vocab_size": 248320,
    },
    "qwen3_5_moe_text": {
        "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "vocab_size": 248320,
    },
}  # fmt: skip
"""By family: what `text_config` leaves out where it is what transformers' class has."""

TEXTS = {name: name for name in ("llama", "mistral", "qwen2", "qwen3")}
"""The language models that most of them may have: model_type of `text_config` -> key of the family table."""


def with_tower(text: DecoderConfig, vision: VisionConfig) -> DecoderConfig:
    """Returns the language model's config with a vision model whose features take the places of tokens."""
    return replace(text, fronts=(ImageTower(model=vision),))


class Wrapping(NamedTuple):
    """One `model_type` of such models.

    Args:
        tower: "module:NAME" of the vision model's configuration, whose `from_hf` takes config.json and the language
            model's width. Where no image is looked at, the packages that vision models need may be missing.
        spellings: the names that its checkpoints have, those of transformers' modules first.
        texts: model_type of `text_config` -> the family that reads it; of those whose sizes stand at the top of
            config.json, the model's own.
        text: model_type of a `text_config` that does not say.
        complete: the language model's config and the vision model's -> that with both.
        unused: the vision model's config -> which tensors of a checkpoint nothing is computed with, beside the language
            model's; see `NameMap.unused`.
        parameters: beside the language model's; see `NameMap.parameters`.
        either_ties: whether embeddings are tied where config.json or its `text_config` says so; else config.json
            decides, where it says anything.
    """

    tower: str
    spellings: tuple[Spelling, ...]
    texts: Mapping[str, str] = TEXTS
    text: str = "llama"
    complete: Callable[[DecoderConfig, Any], DecoderConfig] = with_tower
    unused: Callable[[Any], tuple[str, ...]] | None = None
    parameters: tuple[str, ...] = ()
    either_ties: bool = False

    def knows_text(self, hf: dict[str, Any]) -> bool:
        """Returns whether the language model of a config is of a type that these models are supported with."""
        given = part_of(hf, "text_config")
        return given is None or given.get("model_type", self.text) in tuple(self.texts)  # which may be no text

    def text_config(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Returns the language model's config, with the `model_type` that the family table knows.

        Raises:
            UserError: it is of a kind that these models are not supported with.
        """
        given = part_of(hf, "text_config")
        if given is None:
            if hf.get("model_type") not in self.texts:
                raise UserError("config.json lacks text_config, which describes the language model: copy it again.")
            given = hf
        kind = given.get("model_type", self.text)
        if not isinstance(kind, str) or kind not in self.texts:
            raise UserError(
                f"config.json has a language model of type {kind!r} in a {hf.get('model_type')} model, which is "
                f"supported with {', '.join(sorted(self.texts))}: use a model with one of these."
            )
        family = self.texts[kind]
        text = {**_TEXT_DEFAULTS.get(family, {}), **given, "model_type": family}
        own, inner = hf.get("tie_word_embeddings"), given.get("tie_word_embeddings")
        tied = inner if own is None or (self.either_ties and inner) else own
        return text if tied is None else {**text, "tie_word_embeddings": tied}

    def family(self, inner: Family, hf: dict[str, Any]) -> Family:
        """Returns the family of the language model `inner` with the vision model that config.json describes."""

        def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
            text = inner.config_from_hf(self.text_config(hf))
            return self.complete(text, resolve(self.tower).from_hf(hf, text.hidden))

        names = inner.names
        names = replace(names, spellings=self.spellings, parameters=(*names.parameters, *self.parameters))
        if self.unused is not None:
            names = replace(names, unused=(*names.unused, *self.unused(resolve(self.tower).from_hf(hf, 1))))
        return inner._replace(config_from_hf=config_from_hf, names=names.live)


def spellings(roots: tuple[str, ...], *, inner: Mapping[str, str] | None = None) -> tuple[Spelling, ...]:
    """Returns the names used by transformers 5, in memory and in its checkpoints, and those of earlier releases.

    Args:
        roots: the modules beside the language model.
        inner: root -> the module around its parameters that some versions of transformers have.
    """
    found = []
    for (body, head, base), has_inner in product(
        (("model.language_model.", "lm_head", "model."), ("language_model.model.", "language_model.lm_head", "")),
        (False, True) if inner else (False,),
    ):
        around = {root: f".{name}" for root, name in (inner or {}).items()} if has_inner else {}
        found.append(Spelling(body, head, {root: f"{base}{root}{around.get(root, '')}" for root in roots}))
    return tuple(found)
