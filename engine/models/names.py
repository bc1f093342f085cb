"""Logical parameter names of the decoder, and their places in a Hugging Face checkpoint.

The engine's names:

    embed_tokens.weight
    layers.{i}.input_norm.weight
    layers.{i}.attention.{q_proj,k_proj,v_proj,o_proj}.{weight,bias}
    layers.{i}.attention.{q_norm,k_norm,sinks}.weight
    layers.{i}.post_attention_norm.weight
    layers.{i}.mlp.{gate_proj,up_proj,down_proj}.{weight,bias}
    layers.{i}.{attention_output_norm,mlp_output_norm}.weight    before the outputs join the residual stream
    layers.{i}.attention.{q_a_proj,q_b_proj,kv_a_proj,kv_b_proj}.{weight,bias}   of latent attention
    layers.{i}.attention.{q_a_norm,kv_a_norm}.weight
    norm.weight
    lm_head.weight                         absent when embeddings are tied
    layers.{i}.attention.vision.{q_proj,k_proj,v_proj,o_proj}.{weight,bias}    experts: for tokens of images; the
    layers.{i}.mlp.vision.{gate_proj,up_proj,down_proj}.{weight,bias}          plain names are then those of text
    layers.{i}.mlp.router.{weight,bias,e_score_correction_bias}                a mixture of experts, in place of the
    layers.{i}.mlp.experts.{e}.{gate_proj,up_proj,down_proj}.{weight,bias}     MLP
    layers.{i}.mlp.shared_expert.{gate_proj,up_proj,down_proj}.weight
    layers.{i}.mlp.shared_expert_gate.weight
    layers.{i}.layer_scalar.weight         a number, which the stream that leaves the layer is multiplied by
    layers.{i}.cross_attention_norm.weight
    layers.{i}.cross_attention.{query,key,value,dense}.weight                  to encoded images
    vision.{...}                           of a vision model, the checkpoint's own names below `NameMap.vision`

Adapters add `<module>.lora_A` [rank, in] and `<module>.lora_B` [out, rank]; one adapter over query, key and value
belongs to module `layers.{i}.attention.qkv_proj`, one over gate and up to `layers.{i}.mlp.gate_up_proj`. A factor
that all experts of a layer share is `layers.{i}.mlp.experts.gate_proj.lora_A`, without a number. Layer indices
are those of the whole model, on every rank. `input_norm` and `post_attention_norm` stand before attention and before
the MLP.

A checkpoint may hold query, key and value, or gate and up, as rows of one matrix; here they stay apart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

from engine.choices import VISION
from engine.models.decoder_config import DecoderConfig
from engine.models.stacked_parts import ExpertPart, StackedPart, stacked

_LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"\.experts\.(?:(\d+)\.)?(?=[a-z])")
_EVERY_EXPERT = ".experts.*."
"""In tables of names, the place of an expert's number; what all experts of a layer share has none."""
CORRECTION = "e_score_correction_bias"
"""Name of what is added to scores where experts are compared: a buffer, which is kept as it is and never trains."""
LAYER_SCALAR = "layer_scalar"
"""Name of the number that a layer ends with: a buffer too."""
_BUFFERS = {f".{CORRECTION}": 0.0, f".{LAYER_SCALAR}.weight": 1.0}
_SHARED_FACTOR = re.compile(r"(layers\.\d+\.mlp\.experts)\.([a-z_]+\.lora_[AB])")


class HfLocation(NamedTuple):
    """A logical tensor inside a Hugging Face one: rows [row_offset, +num_rows) of `name`; num_rows None means all.

    Args:
        expert: the part of a tensor of all experts, where it is in one.
    """

    name: str
    row_offset: int = 0
    num_rows: int | None = None
    expert: ExpertPart | None = None


class FusedPart(NamedTuple):
    """A module that is rows [first, first + num_rows) of a fused Hugging Face one."""

    module: str
    first: int
    num_rows: int


class Spelling(NamedTuple):
    """One of the ways in which a family's checkpoints name the same modules.

    Args:
        body, head, vision: as of `NameMap`.
    """

    body: str
    head: str
    vision: Mapping[str, str]

    def places_in(self, tensor_names: Iterable[str]) -> tuple[int, int]:
        """Returns how many of the places of body and vision model these names have, and how long those places are."""
        dotted = [f"{name}." for name in tensor_names]
        places = [self.body, *(f"{place}." for place in self.vision.values())]
        found = [place for place in places if any(name.startswith(place) for name in dotted)]
        return len(found), sum(map(len, found))


QKV, GATE_UP = "attention.qkv_proj", "mlp.gate_up_proj"
EXPERT_GATE_UP, SHARED_EXPERT_GATE_UP = "mlp.experts.*.gate_up_proj", "mlp.shared_expert.gate_up_proj"
VISION_QKV, VISION_GATE_UP = "attention.vision.qkv_proj", "mlp.vision.gate_up_proj"
KEY_VALUE = "cross_attention.key_value"
FUSED = {
    QKV: ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    EXPERT_GATE_UP: ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
    SHARED_EXPERT_GATE_UP: ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    VISION_QKV: ("attention.vision.q_proj", "attention.vision.k_proj", "attention.vision.v_proj"),
    VISION_GATE_UP: ("mlp.vision.gate_proj", "mlp.vision.up_proj"),
    KEY_VALUE: ("cross_attention.key", "cross_attention.value"),
}
"""Modules that a checkpoint may fuse -> their parts in the order of their rows."""


def fused_parts(module: str) -> list[str]:
    """Returns the modules behind a fused one such as `layers.3.mlp.gate_up_proj`; any other module is its own part."""
    if match := _LAYER.match(module):
        inside, expert = _without_expert(match[2])
        if inside in FUSED:
            return [f"layers.{match[1]}.{part.replace(_EVERY_EXPERT, expert)}" for part in FUSED[inside]]
    return [module]


def buffer_value(name: str) -> float | None:
    """Returns the value that a tensor which never trains has in a fresh model; None for a parameter."""
    return next((value for ending, value in _BUFFERS.items() if name.endswith(ending)), None)


def is_shared_factor(name: str) -> bool:
    """Returns whether a tensor is a factor of an adapter that all experts of a layer share."""
    return _SHARED_FACTOR.fullmatch(name) is not None


def own_names(name: str, config: DecoderConfig) -> list[str]:
    """Returns the names that a shared factor has as each expert's own; of any other tensor its name."""
    match = _SHARED_FACTOR.fullmatch(name)
    if match is None or not config.num_experts:
        return [name]
    return [f"{match[1]}.{expert}.{match[2]}" for expert in range(config.num_experts)]


def part_rows(config: DecoderConfig) -> dict[str, int]:
    """Returns the output rows of every module that may be part of a fused one."""
    kv = config.num_kv_heads * config.head_dim
    rows = {"q_proj": config.num_heads * config.head_dim, "k_proj": kv, "v_proj": kv}
    found = {f"attention.{name}": count for name, count in rows.items()}
    found |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), config.intermediate)
    for variant in config.variants:
        found |= variant.part_rows(config)
    return found


def fused_rows(config: DecoderConfig, module: str) -> dict[str, slice]:
    """Returns the rows of each of `fused_parts` in a fused module."""
    counts, rows, first = part_rows(config), {}, 0
    for part in fused_parts(module):
        count = counts[_without_expert(part.split(".", 2)[2])[0]]
        rows[part] = slice(first, first + count)
        first += count
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class NameMap:
    """One family's table, read in both directions.

    Args:
        layer_modules: engine module name inside a layer -> Hugging Face module name inside a layer, or the part of one,
            or of a tensor of all experts. A * stands for the number of an expert.
        body: prefix of the decoder's body in the checkpoint ("model." usually; "llm.model." or
            "model.language_model." where the language model is nested).
        head: full module name of the output head.
        rows: of `part_rows`, needed to tell the parts of fused modules apart.
        fused_names: module of FUSED -> its name inside a layer of the checkpoint, where that does not follow from its
            parts'.
        vision: first component below `vision.` of a vision model's names -> its full name in the checkpoint.
        unused: names, with the wildcards of a shell, of tensors that a checkpoint has and nothing is computed with.
        tensors: tensor inside a layer -> its name inside a layer of the checkpoint, for those that do not lie in their
            module's place.
        parameters: modules, without `vision.` or inside a layer, that are no modules in the checkpoint but parameters;
            here they have a weight.
        spellings: all that the family has, that of transformers' modules first; empty where there is one alone.
        ends: "embed_tokens", "norm" or a further module outside the layers -> what the checkpoint calls it, where that
            differs or the module is a further one.
    """

    source: ClassVar[str] = ""
    """Reads the weights of a Hugging Face folder, as "module:NAME"; empty where `to_hf` says where they lie."""
    pieces: ClassVar[str] = ""
    """Gives an export's tensors, as "module:NAME"; empty where `to_hf` says what they are."""

    layer_modules: Mapping[str, str | FusedPart | StackedPart]
    body: str = "model."
    head: str = "lm_head"
    rows: Mapping[str, int] = field(default_factory=dict)
    fused_names: Mapping[str, str] = field(default_factory=dict)
    vision: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    spellings: tuple[Spelling, ...] = ()
    parameters: tuple[str, ...] = ()
    tensors: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, str] = field(default_factory=dict)

    def means_experts(self, hf_module: str) -> bool:
        """Returns whether PEFT takes the name of a module, as a target, for that of all experts' linears."""
        return False

    def record(self) -> dict[str, Any]:
        """Returns what a partitioned base has to keep of the checkpoint that it is made from, as JSON."""
        return {}

    def recorded(self, record: Mapping[str, Any], label: str) -> NameMap:
        """Returns the map of the checkpoint that a partitioned base was made from.

        Args:
            record: has what `record` gave.
            label: of the base, for errors.

        Raises:
            UserError: it is damaged.
        """
        return self

    @property
    def fused(self) -> tuple[str, ...]:
        """The modules among FUSED that lie in one matrix."""
        return tuple(module for module in FUSED if module in self.layer_modules)

    def fuse(self, modules: Iterable[str]) -> NameMap:
        """Returns the map of a checkpoint where these modules of FUSED, those that the model has, are one matrix each;
        needs `rows`."""
        table = dict(self.layer_modules)
        for fused in modules:
            if fused in table or FUSED[fused][0] not in table:
                continue
            whole = table[FUSED[fused][0]]
            if isinstance(whole, StackedPart):  # in one tensor with those of all experts already
                continue
            assert isinstance(whole, str), fused
            name = self.fused_names.get(fused, f"{whole.rpartition('.')[0]}.{fused.rpartition('.')[2]}")
            first = 0
            for part in FUSED[fused]:
                table[part] = FusedPart(name, first, self.rows[part])
                first += self.rows[part]
            table[fused] = name
        return replace(self, layer_modules=table)

    def spelled(self, spelling: Spelling) -> NameMap:
        """Returns the map of a checkpoint that names modules so."""
        return replace(self, body=spelling.body, head=spelling.head, vision=spelling.vision)

    def spelled_as(self, tensor_names: Collection[str]) -> NameMap:
        """Returns the map with the spelling that most of these names have; the same where the family has one only."""
        if not self.spellings:
            return self
        return self.spelled(max(self.spellings, key=lambda spelling: spelling.places_in(tensor_names)))

    @property
    def is_stacked(self) -> bool:
        """Whether the checkpoint has the matrices of all experts of a layer in one tensor."""
        return any(isinstance(place, StackedPart) for place in self.layer_modules.values())

    @property
    def live_experts(self) -> str:
        """The name, inside a layer, of the module of all experts in transformers' model."""
        stacked_in = self.layer_modules.get("mlp.experts.*.gate_proj")
        if isinstance(stacked_in, StackedPart):
            parent, dot, _ = stacked_in.module.partition(".")
            return f"{parent}.experts" if dot else parent
        router = self.layer_modules.get("mlp.router")
        return "feed_forward.experts" if isinstance(router, str) and router.startswith("feed_") else "mlp.experts"

    def stack(self) -> NameMap:
        """Returns the map of a checkpoint that transformers wrote as its modules are, with experts stacked."""
        if self.is_stacked or "mlp.router" not in self.layer_modules:
            return self
        experts = self.live_experts
        parent = experts.rpartition(".")[0]
        table = {**self.layer_modules, "mlp.router": f"{parent}.gate", **stacked(experts)}
        return replace(
            self,
            layer_modules=table,
            tensors={name: f"{parent}.{place.rpartition('.')[2]}" for name, place in self.tensors.items()},
        )

    @property
    def live(self) -> NameMap:
        """The map of the modules that transformers makes of a checkpoint, which PEFT names its adapters by."""
        return self.spelled(self.spellings[0]) if self.spellings else self

    def aliases(self, module: str) -> list[str]:
        """Returns the Hugging Face names of an engine module: that of this checkpoint, and those in other spellings."""
        others = (self.spelled(spelling) for spelling in self.spellings)
        return list(dict.fromkeys(names.module_to_hf(module) for names in (self, *others)))

    def module_to_hf(self, module: str) -> str:
        """Returns the Hugging Face module name of an engine module such as `layers.3.attention.q_proj`; the fused one
        of a part."""
        if module == "lm_head":
            return self.head
        if module.startswith(VISION):
            root, dot, rest = module.removeprefix(VISION).partition(".")
            return self.vision[root] + dot + rest
        if match := _LAYER.match(module):
            place = self._place(match[2])
            if isinstance(place, StackedPart):  # by a name of its own, as adapters of one expert have it
                return f"{self.body}layers.{match[1]}.{place.module}.{match[2].rpartition('.experts.')[2]}"
            return f"{self.body}layers.{match[1]}.{place.module if isinstance(place, FusedPart) else place}"
        return self.body + self.ends.get(module, module)

    def _place(self, module: str) -> str | FusedPart | StackedPart:
        """Returns what the table has for a module inside a layer."""
        wanted, expert = _without_expert(module)
        if wanted == EXPERT_GATE_UP and self.is_stacked:  # as its parts are
            wanted = FUSED[wanted][0]
        place = self.layer_modules[wanted]
        return place.replace(_EVERY_EXPERT, expert) if isinstance(place, str) else place

    def is_parameter(self, module: str) -> bool:
        """Returns whether an engine module is no module in the checkpoint but a parameter."""
        match = _LAYER.match(module)
        return (match[2] if match else module.removeprefix(VISION)) in self.parameters

    def stack_shapes(self) -> Mapping[str, tuple[int, int, int]]:
        """Returns name -> shape [experts, out, in] of the parameters of transformers' model that have an adapter for
        each expert, where they are so in the engine too."""
        return {}

    def is_stack(self, name: str) -> bool:
        """Returns whether a logical tensor is one of `stack_shapes`."""
        return bool(stacks := self.stack_shapes()) and self.to_hf(name).name in stacks

    def is_unused(self, hf_name: str) -> bool:
        """Returns whether a tensor of the checkpoint is one of `unused`."""
        return any(fnmatchcase(hf_name, pattern) for pattern in self.unused)

    def to_hf(self, name: str) -> HfLocation:
        """Returns the place of the logical tensor `name`."""
        module, _, leaf = name.rpartition(".")
        match = _LAYER.match(module)
        part = self._place(match[2]) if match else None
        if match and (place := self.tensors.get(f"{match[2]}.{leaf}")) is not None:
            return HfLocation(f"{self.body}layers.{match[1]}.{place}")
        if isinstance(part, StackedPart):
            found = _EXPERT.search(module)
            assert found is not None and match is not None, module
            ending = "_bias" if leaf == "bias" else ""
            whole = f"{self.body}layers.{match[1]}.{part.module}.{part.leaf}{ending}"
            return HfLocation(whole, expert=ExpertPart(int(found[1]), part))
        hf_name = self.module_to_hf(module) + ("" if self.is_parameter(module) else f".{leaf}")
        return HfLocation(hf_name, part.first, part.num_rows) if isinstance(part, FusedPart) else HfLocation(hf_name)

    def module_from_hf(self, hf_module: str) -> str | None:
        """Returns the engine module of a Hugging Face one, or None when the family has no such module.

        A fused one is `...qkv_proj` or `...gate_up_proj`; see `fused_parts`.
        """
        if hf_module == self.head:
            return "lm_head"
        for root, place in self.vision.items():
            if f"{hf_module}.".startswith(f"{place}."):
                return VISION + root + hf_module.removeprefix(place)
        if not hf_module.startswith(self.body):
            return None
        rest = hf_module[len(self.body) :]
        if match := _LAYER.match(rest):
            wanted, expert = _without_expert(f".{match[2]}")  # experts may have no module around them
            for engine_name, stored in self.layer_modules.items():
                if isinstance(stored, StackedPart):
                    stored = f"{stored.module}.*.{engine_name.rpartition('.')[2]}"
                if f".{stored}" == wanted:
                    return f"layers.{match[1]}.{engine_name.replace(_EVERY_EXPERT, expert)}"
            return None
        ends = ("embed_tokens", "norm", *self.ends)
        return next((module for module in ends if self.ends.get(module, module) == rest), None)


def _without_expert(module: str) -> tuple[str, str]:
    """Returns a module's name as tables have it, and what stands in the place of `_EVERY_EXPERT` in it."""
    match = _EXPERT.search(module)
    return (module, "") if match is None else (_EXPERT.sub(_EVERY_EXPERT, module), match[0])


def nest(names: NameMap, tensor_names: list[str]) -> NameMap:
    """Returns the map with body and head prefixes, fused matrices and stacked experts, as the checkpoint `tensor_names`
    has them."""
    names = names.spelled_as(tensor_names)
    suffix = f"{names.ends.get('embed_tokens', 'embed_tokens')}.weight"
    bodies = [name[: -len(suffix)] for name in tensor_names if name.endswith(suffix)]
    heads = [name.removesuffix(".weight") for name in tensor_names if name.endswith("lm_head.weight")]
    body = min(bodies, key=len) if bodies and not names.spellings else names.body
    inside = {name.removesuffix(".weight").rpartition(".")[2] for name in tensor_names if name.startswith(body)}
    fused = [module for module in FUSED if module.rpartition(".")[2] in inside]
    if any(name.endswith(f".{names.live_experts}.gate_up_proj") for name in tensor_names):
        names, fused = names.stack(), [module for module in fused if module.rpartition(".")[2] != "gate_up_proj"]
    return replace(names.fuse(fused), body=body, head=min(heads, key=len) if heads else names.head)
