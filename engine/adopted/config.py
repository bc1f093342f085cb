"""The record of an adopted model, and where its tensors lie in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from math import gcd
from typing import Any, ClassVar, Literal

from engine.adopted.arrangement import Arrangement
from engine.adopted.disk_names import arrangement_of, expert_leaves, saved_shapes
from engine.adopted.experts import expert_share, met_weights, stack_leaves, stack_shapes
from engine.adopted.forms import forms_of
from engine.adopted.images.inputs import ImageInputs
from engine.adopted.rows import Rows
from engine.adopted.structure import (
    FAULTS,
    Structure,
    hidden_size,
    layer_shapes,
    read_config,
    structure_of,
    whole_module,
)
from engine.adopted.tensor_plan import ExpertPlan
from engine.batch import Batch
from engine.choices import VISION, Recompute
from engine.errors import UserError
from engine.layers.plain_module import linear_names
from engine.models.decoder_config import DecoderConfig, LayerVariant
from engine.models.families import ADOPTED_IMAGE_FAMILY
from engine.models.families.family import Family
from engine.models.layer_records import Multipliers
from engine.models.names import HfLocation, NameMap
from engine.models.ropes import Rope
from engine.ops.attention.context_parallel import Method
from engine.ops.attention.token_context import ContextPart
from engine.seams import resolve

Attention = Literal["engine", "own", "counted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedLayers(LayerVariant):
    """Layers of one kind that are transformers' own modules.

    Args:
        indices: of these layers in the whole model.
        linear_names: of a layer's linears, inside it.
        linear_parameters: weights of a layer that a token is multiplied by, the mean over all layers of the model.
        expert_share: of the stacked experts of a layer, the share that a token meets; 0 without any.
    """

    indices: tuple[int, ...]
    linear_names: tuple[str, ...]
    linear_parameters: int
    expert_share: float = 0.0

    def applies(self, index: int) -> bool:
        return index in self.indices

    def context_part(self, batch: Batch) -> ContextPart | None:
        if 0 not in self.indices:
            return None
        images = batch.part(ImageInputs)
        return Rows(tokens_BS=batch.tokens_BS, positions_BS=batch.positions_BS, images=images)

    def attention_parameters(self, config: DecoderConfig) -> int:
        return self.linear_parameters

    @property
    def merges_attention(self) -> bool:
        return True  # where a module has sinks

    def further_linears(self) -> tuple[str, ...]:
        return self.linear_names

    def graph_obstacle(self, family: str) -> str:
        return f"layers of {family} models are transformers' own modules"

    def plain_torch(self) -> tuple[str, ...]:
        return ("of transformers' own modules, all but linears, frozen RMSNorms, gated MLPs and packed attention",)


_RECOMPUTED = "activations of gated MLPs are recomputed; norms and all else are kept, in transformers' own modules"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedConfig(DecoderConfig):
    """Sizes of a model whose layers are transformers' own modules.

    Args:
        hf_config: its `config.json`, as text.
        attention: "engine" behind transformers' attention interface, or the modules' "own", which sees rows of one
            document; "counted" is its own where modules are not told positions but count a row's tokens.
        has_stem: whether the head takes what the structure's stem makes of the last layer's output.
    """

    body: ClassVar[str] = "engine.adopted.body:AdoptedBody"
    splits_tokens: ClassVar[bool] = False
    recomputed_regions: ClassVar[tuple[str, ...]] = ("full",)
    recomputations: ClassVar[dict[Recompute, str]] = {
        "none": f"as selective, {_RECOMPUTED}",
        "selective": _RECOMPUTED,
    }
    images: ClassVar[str] = ADOPTED_IMAGE_FAMILY
    proof: ClassVar[str | None] = "engine.adopted.run_proof:prove"
    hf_config: str
    attention: Attention
    has_stem: bool = False

    @property
    def structure(self) -> Structure:
        """The parts of transformers' module."""
        return structure_of(self.hf_config)

    @property
    def table_shape(self) -> tuple[int, int]:
        return _weight_shape(self.hf_config, self.structure.embedding_path)

    @property
    def head_shape(self) -> tuple[int, int]:
        return _weight_shape(self.hf_config, self.structure.head)

    @property
    def sees_images(self) -> bool:
        return self.structure.images is not None

    def vision_linears(self) -> tuple[str, ...]:
        parts = self.structure
        if parts.images is None or parts.images == parts.body:
            return ()
        above, inside = (f"{place}." if place else "" for place in (parts.images, parts.body))
        names = linear_names(whole_module(self.hf_config))
        return tuple(
            f"{VISION}{name[len(above) :]}"
            for name in names
            if name.startswith(above) and not name.startswith(inside) and name != parts.head
        )

    @property
    def unread_modules(self) -> tuple[str, ...]:
        if not self.vision_linears():
            return ()
        above = len(f"{self.structure.images}." if self.structure.images else "")
        found = resolve("engine.adopted.images.unread:unread_modules")(self.hf_config)
        return tuple(f"{VISION}{name[above:]}" for name in found)

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether a row may hold several documents."""
        return self.attention == "engine"

    @property
    def made_by(self) -> str:
        rows = "rows pack documents" if self.keeps_documents_apart else "a row is one document"
        return f"transformers {version('transformers')}, found to compute the same on a small model of its make; {rows}"

    @property
    def own_attention(self) -> str | None:
        return None if self.keeps_documents_apart else "transformers' own (sdpa), in rows of one document"

    @property
    def all_linears(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for variant in self.variants for name in variant.further_linears()))

    def branch_obstacle(self) -> str:
        return f"layers of {self.family} models are transformers' own modules, which are proven on documents alone"

    def check_packing(self) -> None:
        if not self.keeps_documents_apart:
            found = resolve("engine.adopted.proof:attention_proof")(self.hf_config)
            raise UserError(
                f"data.packing puts several documents into a row, but a small {self.family} model does not keep them "
                f"apart: {found.why_own()}; set data.packing to false."
            )

    def check_context(self, size: int, method: Method) -> None:
        if not self.keeps_documents_apart:
            raise UserError(
                f"parallel.context is {size}, but layers of {self.family} models remember tokens in a way of their "
                "own, which does not reach other ranks: set parallel.context to 1."
            )
        if (layer := resolve("engine.adopted.proof:unseen_layer")(self.hf_config)) is not None:
            raise UserError(
                f"parallel.context is {size}, but {layer} of a small {self.family} model has an attention of its own, "
                "which does not reach other ranks: set parallel.context to 1."
            )
        if self.sees_images:
            raise UserError(
                f"parallel.context is {size}, but features of images of {self.family} models are not divided over "
                "context ranks: set parallel.context to 1."
            )
        masked = resolve("engine.adopted.proof:masked_attention")(self.hf_config) if method == "ring" else None
        if masked is not None:
            raise UserError(
                f"the attention of this {self.family} model has {masked}, which ring attention over parallel.context "
                f"{size} does not compute: set parallel.context_method to ulysses, or parallel.context to 1."
            )

    @property
    def layers_stand_alone(self) -> bool:
        return bool(resolve("engine.adopted.proof:layers_stand_alone")(self.hf_config))

    @property
    def divided_experts(self) -> int:
        return divided_experts(self.hf_config)

    @property
    def expert_share(self) -> float:
        return max(variant.expert_share for variant in self.variants if isinstance(variant, AdoptedLayers))

    def to_dict(self) -> dict[str, Any]:
        return {"family": self.family, "implementation": "adopted"}


def adopted_config(hf_config: dict[str, Any], attention: Attention | None = None) -> AdoptedConfig:
    """Returns the record of a model that transformers has.

    Args:
        attention: None proves which one computes what transformers does; see `engine.adopted.proof`.

    Raises:
        UserError: transformers refuses its config, or it cannot be adopted.
    """
    text = json.dumps(hf_config, sort_keys=True)
    forms = forms_of(text)
    config = read_config(hf_config).get_text_config()
    parts = structure_of(text)
    table, head = _weight_shape(text, parts.embedding_path), _weight_shape(text, parts.head)
    tied = f"{parts.head}.weight" in (getattr(whole_module(text), "all_tied_weights_keys", None) or {})
    hidden, heads = (
        hidden_size(config, table[1]),
        int(_first(config, "num_attention_heads", "n_head", "num_heads", "n_heads") or 1),
    )
    kv_heads = _first(config, "num_key_value_heads", "multi_query_group_num", "num_kv_heads") or heads
    return AdoptedConfig(
        family=hf_config["model_type"],
        hidden=hidden,
        intermediate=0,
        num_layers=parts.count,
        num_heads=heads,
        num_kv_heads=int(kv_heads) if isinstance(kv_heads, int) else heads,
        head_dim=int(_first(config, "head_dim", "attention_head_size") or hidden // heads),
        vocab_size=head[0],
        norm_eps=1e-6,
        ropes=(Rope(theta=None),),
        tied_embeddings=tied,
        max_row_length=_row_limit(config),
        max_length=int(_first(config, "max_position_embeddings", "n_positions", "max_seq_len") or 2048),
        multipliers=Multipliers(embedding=forms.embedding, logits_divisor=1 / forms.logits),
        logits_softcap=forms.softcap,
        variants=_kinds_of_layers(text),
        hf_config=text,
        has_stem=forms.has_stem,
        attention=attention or resolve("engine.adopted.proof:proven_attention")(text),
    )


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := _size(config, name)) is not None), None)


def _size(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except FAULTS:  # it differs from layer to layer
        return None


def _row_limit(config: Any) -> int | None:
    """Returns the most tokens of a row, where rotations depend on the longest document in it; None for any."""
    rope = getattr(config, "rope_parameters", None) or {}
    limits = []
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if one.get("rope_type") == "longrope":
            limits.append(one.get("original_max_position_embeddings") or config.max_position_embeddings)
        elif one.get("rope_type") == "dynamic":
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)


def _weight_shape(text: str, module: str) -> tuple[int, int]:
    rows, columns = whole_module(text).get_submodule(module).weight.shape
    return rows, columns


@lru_cache(maxsize=4)
def divided_experts(config_text: str) -> int:
    """Returns how many experts ranks may have apart, in each layer that has any, or a number that divides all of them;
    0 where transformers' expert plan names none.

    Args:
        config_text: the `config.json`, as text.
    """
    body = whole_module(config_text).get_submodule(structure_of(config_text).body)
    plan = ExpertPlan.of(body.config)
    apart = [module for name, module in body.named_modules() if plan.divides(name)]
    return gcd(*(module.get_parameter(leaf).shape[0] for module in apart for leaf in stack_leaves(module)))


def _kinds_of_layers(text: str) -> tuple[AdoptedLayers, ...]:
    kinds: dict[Any, list[int]] = {}
    names: dict[Any, tuple[str, ...]] = {}
    layers = whole_module(text).get_submodule(structure_of(text).layers_path)
    shares: dict[Any, float] = {}
    record = read_config(json.loads(text)).get_text_config()
    total = count = 0
    for count, layer in enumerate(layers.children(), 1):
        kind, linears = layer_shapes(layer), linear_names(layer)
        kinds.setdefault(kind, []).append(count - 1)
        names[kind] = tuple(linears)
        shares[kind] = expert_share(layer, record)
        total += met_weights(layer, record)
    return tuple(
        AdoptedLayers(
            indices=tuple(indices),
            linear_names=names[kind],
            linear_parameters=total // count,
            expert_share=shares[kind],
        )
        for kind, indices in kinds.items()
    )


INSIDE = "module."
"""Stands in an engine name between a layer and what transformers calls a module inside it, which so is taken for no
module of the engine's own layers."""


STEM = "before_head"
"""The engine's name of the module whose output the head takes, where a model has one behind its body."""


class _Same(dict[str, str]):
    """Every module inside a layer has the name that transformers gives it."""

    def __missing__(self, name: str) -> str:
        return name


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedNames(NameMap):
    """Names of an adopted model: transformers' own, with the two ends and the layers under the engine's names.

    Args:
        structure: the parts of the module.
        config_text: the model's `config.json`, as text.
        arrangement: of the checkpoint's tensors; None where they are not known.
    """

    source: ClassVar[str] = "engine.adopted.source:ArrangedSource"
    pieces: ClassVar[str] = "engine.adopted.export:arranged_pieces"
    structure: Structure
    config_text: str
    arrangement: Arrangement | None = None

    def means_experts(self, hf_module: str) -> bool:
        return hf_module.rpartition(".")[2] in expert_leaves(self.config_text)

    def record(self) -> dict[str, Any]:
        return {} if self.arrangement is None else self.arrangement.record()

    def recorded(self, record: Mapping[str, Any], label: str) -> AdoptedNames:
        shapes = Arrangement.recorded_shapes(record, label)
        return self if shapes is None else self.arranged(shapes, label)

    def arranged(self, stored: Mapping[str, tuple[int, ...]] | None, label: str) -> AdoptedNames:
        """Returns the map of a checkpoint with these tensors.

        Args:
            stored: name -> shape; None for those of a checkpoint that transformers would write.
            label: of the checkpoint, for errors.

        Raises:
            UserError: the model cannot be made of them by rearrangement.
        """
        if stored is None:
            stored = saved_shapes(self.config_text)
        found = arrangement_of(self.config_text, stored, self._from_hf, label=label)
        return replace(self, arrangement=found)

    def _from_hf(self, name: str) -> str:
        """Returns the logical name of a parameter of transformers' model."""
        module, _, leaf = name.rpartition(".")
        if module == self.body.rstrip("."):
            return leaf
        if name in stack_shapes(self.config_text):
            return f"{self.module_from_hf(name)}.weight"
        return f"{self.module_from_hf(module) or module}.{leaf}"

    def module_to_hf(self, module: str) -> str:
        parts = self.structure
        first, dot, rest = module.partition(".")
        if first == "lm_head":
            return self.head
        if module == "embed_tokens":
            return f"{self.body}{parts.embedding}"
        if first == "layers":
            inside = f"{rest}.".replace(f".{INSIDE}", ".", 1).rstrip(".")
            return f"{self.body}{parts.layers}{dot}{inside}"
        if first == VISION.rstrip("."):
            return f"{parts.images}.{rest}".strip(".")
        if first == STEM:
            return f"{parts.stem}{dot}{rest}"
        return self.body + module

    def module_from_hf(self, hf_module: str) -> str | None:
        if hf_module == self.head:
            return "lm_head"
        if self.structure.stem is not None and f"{hf_module}.".startswith(f"{self.structure.stem}."):
            return STEM + hf_module[len(self.structure.stem) :]
        if not hf_module.startswith(self.body):
            return self._around_body(hf_module)
        rest = hf_module[len(self.body) :]
        if rest == self.structure.embedding:
            return "embed_tokens"
        if rest.startswith(f"{self.structure.layers}."):
            index, _, inside = rest[len(self.structure.layers) + 1 :].partition(".")
            return f"layers.{index}.{INSIDE}{inside}".rstrip(".")
        return rest

    def _around_body(self, hf_module: str) -> str | None:
        images = self.structure.images
        if images is None or not (images == "" or f"{hf_module}.".startswith(f"{images}.")):
            return None
        return f"{VISION}{hf_module[len(images) :].lstrip('.')}".rstrip(".")

    def stack_shapes(self) -> Mapping[str, tuple[int, int, int]]:
        return stack_shapes(self.config_text)

    def is_parameter(self, module: str) -> bool:
        return self.module_to_hf(module) in stack_shapes(self.config_text)

    def to_hf(self, name: str) -> HfLocation:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and self.is_parameter(module):
            return HfLocation(self.module_to_hf(module))
        if not module:
            return HfLocation(self.body + leaf)
        return HfLocation(f"{self.module_to_hf(module)}.{leaf}".lstrip("."))

    def fuse(self, modules: Any) -> AdoptedNames:
        return self

    def stack(self) -> AdoptedNames:
        return self


def adopted_names(config_text: str) -> AdoptedNames:
    """Returns where transformers' module of a `config.json`, given as text, has its tensors."""
    structure = structure_of(config_text)
    table: Mapping[str, str] = _Same()
    return AdoptedNames(
        layer_modules=table,
        body=f"{structure.body}.",
        head=structure.head,
        structure=structure,
        config_text=config_text,
    )


def adopted_family(hf_config: dict[str, Any]) -> Family:
    """Returns the family of a model that transformers has."""
    names = adopted_names(json.dumps(hf_config, sort_keys=True))
    return Family(config_from_hf=adopted_config, names=names, is_adopted=True)
