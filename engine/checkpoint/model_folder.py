"""The description of a model without its weights: config, names and tokenizer files, in either of the two formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.folder import CONFIG, ENCODING_FILE, Companions, find_companions
from engine.checkpoint.manifest import MANIFEST, read_manifest
from engine.checkpoint.manifest_records import Manifest
from engine.choices import IMPLEMENTATIONS, Implementation
from engine.config.hub import instead_of
from engine.errors import UserError
from engine.files.documents import read_json
from engine.kernels.formats import Format
from engine.models.decoder_config import DecoderConfig
from engine.models.describe import parameter_specs
from engine.models.dtypes import TORCH_DTYPES
from engine.models.families import WRAPPINGS, family_of
from engine.models.names import NameMap
from engine.models.stored_formats import formats_of
from engine.quantization.shipped.config import KEY
from engine.seams import resolve

CLASSIFIER = "engine.judges.model:read_judge"
"""Reads a config.json of one of transformers' classes for sequence classification."""
_TEXTS = ("text_config", "llm_config")
"""Where config.json may have the language model's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """The description of a model, without its weights.

    Args:
        path: the folder.
        hf_config: config.json as it is.
        decoder: the engine's configuration of it.
        names: where the family, or this checkpoint's nesting, places tensors.
        manifest: of a partitioned base; None for a Hugging Face folder.
        implementation: of its layers, "native" or "adopted".
    """

    path: Path
    hf_config: dict[str, Any]
    decoder: DecoderConfig
    names: NameMap
    manifest: Manifest | None
    implementation: Implementation

    @property
    def hf_path(self) -> Path:
        """The Hugging Face folder: this one, or the one that a partitioned base was made from, if it is still there."""
        origin = self.path if self.manifest is None else Path(str(self.manifest.model["origin"]))
        return origin if origin.is_dir() else self.path

    def companions(self) -> Companions:
        """Returns config, tokenizer and text files that travel with the model; see `find_companions`."""
        return find_companions(self.path)

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns logical name -> global shape of every parameter, in forward order."""
        specs = parameter_specs(self.decoder, tensor_rank=0, tensor_size=1)
        return {name: spec.global_shape for name, spec in specs.items()}

    @property
    def family(self) -> str:
        """The family's name: where a vision model is in front of another family's language model, that of the whole."""
        kind = self.hf_config.get("model_type")
        return str(kind) if kind in WRAPPINGS else self.decoder.family

    def formats(self) -> Callable[[str], Format | None]:
        """Returns what gives the format in which config.json has the weight of a linear, by logical name; None for
        numbers. The stored tensors may say otherwise; see `WeightSource.format`."""
        return formats_of(self.hf_config, self.names)

    def untied(self) -> ModelFolder:
        """Returns the same model with a head of its own, in config.json too."""
        config = {**self.hf_config, "tie_word_embeddings": False}
        for key in _TEXTS:
            if isinstance(config.get(key), dict):
                config[key] = {**config[key], "tie_word_embeddings": False}
        return replace(self, hf_config=config, decoder=replace(self.decoder, tied_embeddings=False))

    def check_tokens(self) -> None:
        """Raises UserError where the model scores texts and gives no tokens."""
        if self.decoder.scores:
            raise UserError(
                f"{self.path} is a reward model, which scores texts and has no head of tokens: give a language model, "
                "or set objective.name to reward to train it."
            )

    @property
    def is_ambiguous(self) -> bool:
        """Whether config.json has embeddings tied in one place and not in another."""
        parts = (self.hf_config, *(self.hf_config.get(key) for key in _TEXTS))
        said = {bool(part["tie_word_embeddings"]) for part in parts if part and "tie_word_embeddings" in part}
        return len(said) == 2

    def config_dtype(self) -> torch.dtype:
        """Returns the dtype that config.json asks for; float32 where it does not say."""
        parts = (family_of(self.hf_config, self.implementation)[1], self.hf_config.get("text_config") or {})
        found = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
        name = str(next((value for value in found if value), "float32")).removeprefix("torch.")
        if name not in TORCH_DTYPES:
            raise UserError(f"{self.path / CONFIG} has dtype {name!r}: expected one of {', '.join(TORCH_DTYPES)}.")
        return TORCH_DTYPES[name]


def open_model(path: str | Path, implementation: Implementation = "auto") -> ModelFolder:
    """Reads the description of the model in a Hugging Face folder or a partitioned base.

    Args:
        implementation: of its layers; a partitioned base has that which it was made with.

    Raises:
        UserError: there is none, its family is not supported, or it is partitioned for another implementation.
    """
    folder = Path(path)
    if not folder.is_dir():
        advice = instead_of(folder, "expected a Hugging Face model or a checkpoint, correct the path")
        raise UserError(f"{folder} is not a folder{advice}.")
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else None
    if manifest is not None and manifest.kind != "base":
        raise UserError(
            f"{folder} is a training checkpoint, which holds no base weights: give the base model, "
            f"which is recorded as {_recorded_base(manifest)}."
        )
    if manifest is not None:
        _check_model_record(folder, manifest)
    hf_config = _read_config(folder) if manifest is None else manifest.model["hf_config"]
    if manifest is not None:
        implementation = _recorded_implementation(folder, manifest, implementation)
    family, text = family_of(hf_config, implementation)
    decoder = family.config_from_hf(_inherit_tying(text, hf_config))
    names = family.names
    if _is_classifier(hf_config):
        decoder, names = resolve(CLASSIFIER)(hf_config, decoder, names)
    if manifest is not None:
        names = replace(names, body=manifest.model["body"], head=manifest.model["head"])
        names = replace(names, vision=manifest.model.get("vision", names.vision))
        names = names.fuse(manifest.model.get("fused", ()))
        names = names.stack() if manifest.model.get("stacked") else names
        names = names.recorded(manifest.model, str(folder / MANIFEST))
    return ModelFolder(
        path=folder,
        hf_config=hf_config,
        decoder=decoder,
        names=names,
        manifest=manifest,
        implementation="adopted" if family.is_adopted else "native",
    )


def _is_classifier(hf_config: dict[str, Any]) -> bool:
    named = hf_config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return isinstance(first, str) and first.endswith("ForSequenceClassification")


def _recorded_implementation(folder: Path, manifest: Manifest, wanted: Implementation) -> Implementation:
    """Returns the implementation that a partitioned base was made with, which decides its tensors' names."""
    recorded: Implementation = manifest.model.get("implementation", "native")  # older ones are all native
    if recorded not in IMPLEMENTATIONS:
        raise UserError(
            f"{folder / MANIFEST} is damaged: model.implementation is {recorded!r}; use another copy of it."
        )
    if wanted not in ("auto", recorded):
        raise UserError(
            f"{folder} was partitioned for implementation {recorded}, but {wanted} is asked for: use {recorded}, or "
            f"import the Hugging Face folder again with --implementation {wanted}."
        )
    return recorded


def _check_model_record(folder: Path, manifest: Manifest) -> None:
    kinds = {"hf_config": dict, "body": str, "head": str, "has_tied_head": bool, "origin": str}
    if "vision" in manifest.model:  # older ones leave it out
        kinds["vision"] = dict
    for key, kind in kinds.items():
        if not isinstance(manifest.model.get(key), kind):
            raise UserError(
                f"{folder / MANIFEST} is damaged: model.{key} is {manifest.model.get(key)!r}; use another copy of it."
            )


def _recorded_base(manifest: Manifest) -> str:
    base = manifest.training.get("base")
    return str(base.get("path")) if isinstance(base, dict) else "unknown"


def _inherit_tying(text: dict[str, Any], hf_config: dict[str, Any]) -> dict[str, Any]:
    # Nested configs often have it once, at the top.
    if "tie_word_embeddings" in text or "tie_word_embeddings" not in hf_config:
        return text
    return {**text, "tie_word_embeddings": hf_config["tie_word_embeddings"]}


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(
            f"{folder} has no {CONFIG}: expected a Hugging Face model or a checkpoint made by rankfold convert."
        )
    return _with_encoding(folder, read_json(path))


def _with_encoding(folder: Path, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json with what ModelOpt wrote beside it, where it does not say how weights are encoded itself."""
    own, path = hf_config.get(KEY), folder / ENCODING_FILE
    if (own is not None and "quantized_layers" not in _missing(own)) or not path.is_file():
        return hf_config
    return {**hf_config, KEY: {"quant_method": "modelopt", **read_json(path)}}


def _missing(encoding: object) -> tuple[str, ...]:
    """Returns the keys that an encoding lacks: in older configs of ModelOpt the formats of layers."""
    if not isinstance(encoding, dict) or encoding.get("quant_algo") != "MIXED_PRECISION":
        return ()
    return () if "quantized_layers" in encoding or "config_groups" in encoding else ("quantized_layers",)
