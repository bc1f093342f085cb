"""The proof that an adopted model is transformers' model: a small one of the same make, run both ways.

Every check compares numbers of the engine's body, with adapters whose B is drawn, with autograd through transformers'
own model on each document alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers.pytorch_utils import Conv1D

from engine.adopted.config import INSIDE, AdoptedConfig, Attention, adopted_config, adopted_family
from engine.adopted.forms import seeded, small_model, small_record
from engine.adopted.images.arguments import forward_arguments, image_token
from engine.adopted.images.inputs import ImageInputs, joined
from engine.adopted.structure import FAULTS, first_line, quiet
from engine.batch import IGNORE_LABEL, Batch
from engine.choices import VISION
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Mesh
from engine.distributed.sharding import shard_of
from engine.errors import UserError
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.layers.storage import WeightPlacement
from engine.models.decoder import Decoder, Part, build_decoder, split_parts
from engine.models.decoder_config import DecoderConfig
from engine.models.names import NameMap
from engine.seams import resolve

BOUND = 1e-4
"""Largest difference of a loss, or of a gradient relative to its norm, that rounding explains in float32."""
_LENGTHS = (11, 13, 16)
_TRIED: tuple[Attention, ...] = ("engine", "own", "counted")
_RANK, _SCALE = 2, 0.5
_TOKENS = 16


class Difference(NamedTuple):
    """How far two computations are apart.

    Args:
        figure: "loss", or the logical name of the parameter whose gradient differs most.
        worst: of the loss the largest difference of a token's, of a gradient the norm of the difference over its norm.
    """

    figure: str
    worst: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains it."""
        return self.worst <= BOUND

    @property
    def severity(self) -> float:
        """The difference to order by, in which NaN is the largest."""
        return inf if self.worst != self.worst else self.worst

    def sentence(self) -> str:
        """Returns a phrase that names what differs."""
        what = self.figure if self.figure == "loss" else f"the gradient of {self.figure}"
        return f"{what} differs from transformers' own by {self.worst:.1e}, and at most {BOUND:g} is allowed"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionProof:
    """The attention with which the body computes what transformers' model does.

    Args:
        attention: which one.
        found: how far it is from transformers' own.
        packed: where it is the modules' own, how far the engine's is in rows that pack documents, or what it raised.
    """

    attention: Attention
    found: Difference
    packed: Difference | str | None = None

    def why_own(self) -> str:
        """Returns a phrase on what the engine's attention does not compute in rows that pack documents."""
        return self.packed.sentence() if isinstance(self.packed, Difference) else str(self.packed)


@lru_cache(maxsize=8)
def attention_proof(config_text: str) -> AttentionProof:
    """Returns the attention with which the body computes what transformers' model does.

    Args:
        config_text: the `config.json`, as text.

    Raises:
        UserError: none does; names what differs.
    """
    small = small_of(json.loads(config_text))
    rows, single = (small.batch(lengths) for lengths in (_LENGTHS, _LENGTHS[-1:]))
    found: list[Difference | str] = []
    for attention in _TRIED:
        tried = replace(small, config=replace(small.config, attention=attention))
        try:
            tried_now = agreement(tried, rows if attention == "engine" else single)
        except FAULTS as error:  # a UserError among them, where this attention lacks something
            found.append(raised(error))
            continue
        if tried_now.is_rounding:
            return AttentionProof(attention=attention, found=tried_now, packed=found[0] if found else None)
        found.append(tried_now)
    last = found[1]
    raise UserError(
        f"a {small.config.family} model of transformers cannot be adopted: in a small one of its make, "
        f"{last if isinstance(last, str) else last.sentence()}."
    )


def proven_attention(config_text: str) -> Attention:
    """Returns the attention of `attention_proof`."""
    return attention_proof(config_text).attention


def raised(error: Exception) -> str:
    """Returns a phrase on what a module raised."""
    if isinstance(error, UserError):
        return str(error).rstrip(".")
    return f"it raises {type(error).__name__} ({first_line(error)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What trains, by engine names with * in place of a layer's index.

    Args:
        adapters: modules with adapters; None for every linear of a layer.
        weights: parameters that train themselves.
    """

    adapters: frozenset[str] | None = None
    weights: frozenset[str] = frozenset()

    @classmethod
    def of(cls, names: Iterable[str]) -> Trained:
        """Returns what trains where the parameters of these names do."""
        patterns = [_LAYER.sub(r"\1*\2", name) for name in names]
        adapters = frozenset(name.rpartition(".")[0] for name in patterns if name.endswith(".lora_A"))
        return cls(adapters=adapters, weights=frozenset(name for name in patterns if ".lora_" not in name))

    def adapts(self, module: str) -> bool:
        """Returns whether a module has an adapter."""
        if self.adapters is None:
            return not module.startswith(VISION)
        return _LAYER.sub(r"\1*\2", module) in self.adapters

    def trains(self, name: str) -> bool:
        """Returns whether a parameter trains itself."""
        return _LAYER.sub(r"\1*\2", name) in self.weights


_LAYER = re.compile(r"^(layers\.)\d+(\.)")


@dataclass(frozen=True, slots=True)
class Small:
    """A small model of transformers, and the engine's record of it.

    Args:
        model: of transformers; its linears with adapters compute them.
        config, names: the engine's.
        factors: of adapters, by logical name; leaves of autograd.
        weights: parameters that train themselves, likewise; of `model`.
    """

    model: nn.Module
    config: AdoptedConfig
    names: NameMap
    factors: dict[str, Tensor]
    weights: dict[str, Tensor]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Everything whose gradient is compared."""
        return {**self.factors, **self.weights}

    def batch(self, lengths: tuple[int, ...], seed: int = 0) -> Batch:
        """Returns a row that packs documents of these lengths, or as many with images where the model sees such."""
        if not self.config.sees_images:
            return proof_batch(lengths, self.config.vocab_size, seed=2 + seed)
        made_up = resolve("engine.adopted.images.made_up:made_up_images")
        hf_config = json.loads(self.config.hf_config)
        try:
            found = [made_up(hf_config, self.model, seed=seed + place) for place in range(len(lengths))]
        except FAULTS as error:
            raise UserError(
                f"no images can be made up for a small {self.config.family} model: {raised(error)}."
            ) from None
        device = next(self.model.parameters()).device
        batch = packed([one.tokens for one in found], image_token(self.model.config))
        return batch.with_parts(joined([one.images for one in found])).to(device)

    def plan(self) -> TrainingPlan:
        """Returns the plan that trains the adapters and weights."""
        settings = AdapterSettings(rank=_RANK, scale=_SCALE, dropout=0.0)
        owners = {name.rpartition(".")[0] for name in self.weights}
        return TrainingPlan(
            adapter=lambda name: settings if f"{name}.lora_A" in self.factors else None,
            trains=lambda name: name in owners,
        )

    def parts(
        self,
        layers: tuple[int, ...] | None = None,
        layout: TensorLayout | None = None,
        spread: WeightPlacement | None = None,
    ) -> list[Decoder]:
        """Returns the engine's model, or its parts with so many layers each, with the small model's weights.

        Args:
            layout: over tensor ranks; None for one.
            spread: spreads the weights over ranks; None keeps all of them here.
        """
        whole = layers or (self.config.num_layers,)
        found: list[Decoder] = []
        for part in split_parts(whole):
            found.append(self._filled(part, found, layout or TensorLayout(), spread))
        return found

    def _filled(
        self, part: Part, before: list[Decoder], layout: TensorLayout, spread: WeightPlacement | None
    ) -> Decoder:
        first = before[0].embedding if before else None
        weights = self.model.state_dict()
        model = build_decoder(
            self.config,
            layout=layout,
            plan=self.plan(),
            device=next(iter(weights.values())).device,
            dtype=torch.float32,
            part=part,
            embedding_weight=None if first is None else first.weight,
            weights=spread,
        )
        entries = list(shard_entries(model))
        found = () if spread is None else (spread.storage(entry.parameter) for entry in entries)
        storages = {id(one): one for one in found if one is not None}.values()
        for storage in storages:
            storage.make()
            storage.whole.zero_()  # between rows of a weight and its adapter's lies what fills them up
        with torch.no_grad():
            for entry in entries:
                source = self.factors.get(entry.name)
                whole = self._weight(weights, entry.name) if source is None else source
                entry.parameter.copy_(shard_of(whole, entry.spec))
        for storage in storages:
            storage.keep()
            storage.free()
        return model

    def _weight(self, weights: dict[str, Tensor], name: str) -> Tensor:
        stored = self.names.to_hf(name).name
        return weights[stored].t() if self._is_turned(stored) else weights[stored]

    def _is_turned(self, stored: str) -> bool:
        """Returns whether transformers' model has a parameter [in, out] that is [out, in] here."""
        module, _, leaf = stored.rpartition(".")
        return leaf == "weight" and isinstance(self.model.get_submodule(module), Conv1D)

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of all leaves, as the engine has them; zeros where a leaf has none."""
        found = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in self.leaves.items()}
        turned = {name: found[name].t() for name in self.weights if self._is_turned(self.names.to_hf(name).name)}
        return {**found, **turned}


def small_of(
    hf_config: dict[str, Any], trained: Trained | None = None, ranks: int = 1, device: torch.device | None = None
) -> Small:
    """Returns a small model of the make of a `config.json`, its adapters drawn at random.

    Args:
        trained: what trains; None for adapters on every linear of a layer. Where nothing of it is there, as in a model
            without linears, all weights do.
        ranks: tensor or expert ranks that divide it.
        device: None for the CPU.
    """
    trained = trained or Trained()
    model = small_model(hf_config, ranks=ranks).to(device)
    config = small_record(hf_config, ranks)
    decoder, names = adopted_config(config, "engine"), adopted_family(config).names
    found = Small(model, decoder, names, {}, {})
    with seeded(1):
        for module in filter(trained.adapts, _adaptable(decoder, names, model)):
            plain = model.get_submodule(names.module_to_hf(module))
            weight = plain.weight.t() if isinstance(plain, Conv1D) else plain.weight
            for leaf, shape in (("lora_A", (_RANK, weight.shape[1])), ("lora_B", (weight.shape[0], _RANK))):
                found.factors[f"{module}.{leaf}"] = (torch.randn(shape) * 0.1).to(weight.device).requires_grad_()
        _adapt_stacks(found, trained)
    linears = [name.rpartition(".")[0] for name, factor in found.factors.items() if factor.dim() == 2]
    for name in dict.fromkeys(linears):
        _adapt(model.get_submodule(names.module_to_hf(name)), found.factors, name)
    ends = ("embed_tokens.weight", "lm_head.weight") if decoder.tied_embeddings else ()  # a sum of two, or a copy
    stock = dict(model.named_parameters())
    for parameter in stock.values():
        parameter.requires_grad_(False)
    everything = not found.factors and not trained.weights
    if everything or trained.weights:
        meta = build_decoder(
            decoder, layout=TensorLayout(), plan=TrainingPlan(), device=torch.device("meta"), dtype=torch.float32
        )
        for name in (entry.name for entry in shard_entries(meta)):
            if (everything or trained.trains(name)) and name not in ends and (place := names.to_hf(name).name) in stock:
                found.weights[name] = stock[place].requires_grad_()
    return found


def _adaptable(decoder: DecoderConfig, names: NameMap, model: nn.Module) -> list[str]:
    layers = model.get_submodule(names.module_to_hf("layers"))
    return [
        f"layers.{index}.{INSIDE}{name}"
        for index, layer in layers.named_children()
        for name, module in layer.named_modules()
        if name in decoder.all_linears and isinstance(module, nn.Linear | Conv1D)
    ] + [*decoder.vision_linears()]


def _adapt(module: nn.Module, factors: dict[str, Tensor], name: str) -> None:
    assert isinstance(module, nn.Linear | Conv1D)
    plain = module.forward
    a, b = factors[f"{name}.lora_A"], factors[f"{name}.lora_B"]
    module.forward = lambda x: plain(x) + _SCALE * linear(linear(x, a), b)  # type: ignore[method-assign]


def _adapt_stacks(small: Small, trained: Trained) -> None:
    """Gives the stacks of experts that a run adapts their adapters; a run that names none may leave experts out."""
    for name, (count, outputs, inputs) in small.names.stack_shapes().items() if trained.adapters is not None else ():
        module, stack = small.names.module_from_hf(name), small.model.get_parameter(name)
        if module is None or not trained.adapts(module):
            continue
        shapes = {"lora_A": (_RANK, count, inputs), "lora_B": (outputs, count, _RANK)}
        factors = {
            f"{module}.{leaf}": (torch.randn(shape) * 0.1).to(stack.device).requires_grad_()
            for leaf, shape in shapes.items()
        }
        small.factors.update(factors)
        _adapt_stack(small.model, name, *factors.values())


def _adapt_stack(model: nn.Module, name: str, a_REI: Tensor, b_OER: Tensor) -> None:
    """Has transformers' module of experts compute with a stack that an adapter changes.

    Args:
        name: of the stack.
    """
    owner, _, leaf = name.rpartition(".")
    stack = model.get_parameter(name)

    def change(module: nn.Module, _: Any) -> None:  # an attribute goes before the parameter of its name
        vars(module)[leaf] = stack + _SCALE * torch.einsum("oer,rei->eoi", b_OER, a_REI)

    def restore(module: nn.Module, *_: Any) -> None:
        vars(module).pop(leaf, None)

    experts = model.get_submodule(owner)
    experts.register_forward_pre_hook(change)
    experts.register_forward_hook(restore, always_call=True)


def proof_batch(lengths: tuple[int, ...], vocabulary: int, seed: int = 2) -> Batch:
    """Returns a row that packs documents of these lengths, whose tokens are drawn."""
    tokens = torch.randint(3, vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return packed(tokens.split(list(lengths)))


def packed(documents: Sequence[Tensor], unlearned: int | None = None) -> Batch:
    """Returns a row that packs documents, given their tokens' int64 ids.

    Args:
        unlearned: the token that is no label.
    """
    lengths, tokens = tuple(map(len, documents)), torch.cat([*documents])[None]
    total, ends = sum(lengths), torch.tensor(lengths).cumsum(0)
    labels = tokens.roll(-1, 1)
    labels[0, ends - 1] = IGNORE_LABEL
    labels[labels == unlearned] = IGNORE_LABEL
    return Batch(
        tokens_BS=tokens,
        labels_BS=labels,
        positions_BS=torch.cat([torch.arange(length) for length in lengths])[None],
        token_index_BS=torch.arange(total)[None],
        loss_weights_BS=(labels != IGNORE_LABEL).float(),
        document_offsets=torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        document_lengths=lengths,
    )


class Computed(NamedTuple):
    """What a model computes of a batch.

    Args:
        losses: of tokens, [T].
        gradients: of their sum, by logical name; on tensor ranks this rank's shards.
    """

    losses: Tensor
    gradients: dict[str, Tensor]


def reference(small: Small, batch: Batch) -> Computed:
    """Returns what transformers' model computes, each document alone."""
    losses, first = [], 0
    leaves = small.leaves
    images = batch.part(ImageInputs)
    of_documents = [None] * len(batch.document_lengths) if images is None else images.split(len(batch.document_lengths))
    for leaf in leaves.values():
        leaf.grad = None
    with quiet():
        for length, own in zip(batch.document_lengths, of_documents, strict=True):
            piece = slice(first, first + length)
            tokens = batch.tokens_BS[:, piece]
            given = {} if own is None else forward_arguments(small.model, tokens, own)
            logits = small.model(input_ids=tokens, use_cache=False, **given).logits.float()
            losses.append(
                cross_entropy(logits[0], batch.labels_BS[0, piece], reduction="none", ignore_index=IGNORE_LABEL)
            )
            first += length
    whole = torch.cat(losses)
    if leaves:
        whole.sum().backward()
    return Computed(whole.detach(), small.gradients())


def computed(parts: list[Decoder], batch: Batch, mesh: Mesh | None = None) -> Computed:
    """Returns what the engine's parts compute, one after the other.

    Args:
        mesh: of the tensor ranks that compute it together; None for one.
    """
    step, x = torch.zeros((), dtype=torch.int64, device=batch.tokens_BS.device), None
    with quiet():
        for model in parts:
            x, carried = (model.embed(batch), ()) if x is None else model.unpack(x, batch)
            context = model.context(batch, step, training=False, carried=carried)
            x = model.run_layers(x, context)
            if model.head is None:
                x = model.pack(x, context)
    losses = parts[-1].token_losses(x, batch, context)
    if losses.requires_grad:
        losses.sum().backward()
    gradients = {}
    for entry in (entry for model in parts for entry in shard_entries(model)):
        if entry.sink is not None:
            gradients[entry.name] = entry.sink.buffer
            for axis in () if mesh is None else map(mesh.axis, entry.spec.grad_reduce):
                all_reduce(entry.sink.buffer, axis)
    return Computed(losses.detach(), gradients)


def difference(found: Computed, wanted: Computed, parts: Iterable[Decoder] = ()) -> Difference:
    """Returns the largest difference.

    Args:
        parts: of the model on this rank, which say what shards `found` has; none for whole tensors.
    """
    specs = {entry.name: entry.spec for model in parts for entry in shard_entries(model)}
    worst = [Difference("loss", float((found.losses - wanted.losses).abs().max()))]
    largest = max((float(one.norm()) for one in wanted.gradients.values()), default=0.0)
    for name, whole in wanted.gradients.items():
        expected = shard_of(whole, specs[name]) if name in specs else whole
        norm = max(float(whole.norm()), 1e-3 * largest, 1e-12)
        worst.append(Difference(name, float((found.gradients[name] - expected).norm()) / norm))
    return max(worst, key=lambda one: one.severity)


def agreement(
    small: Small, batch: Batch, layers: tuple[int, ...] | None = None, wanted: Computed | None = None
) -> Difference:
    """Returns how far the engine's model, in stages of so many layers each, is from transformers' own.

    Where losses agree and a gradient does not, other tokens decide: at the kink of an activation such as ReLU it is
    rounding that takes one of two slopes.

    Args:
        batch: of `Small.batch`.
        wanted: what transformers' computes of it; None computes that.
    """
    wanted = reference(small, batch) if wanted is None else wanted
    found = difference(computed(small.parts(layers), batch), wanted)
    if found.is_rounding or found.figure == "loss":
        return found
    lengths = batch.document_lengths
    other = small.batch(lengths, seed=len(lengths)).to(batch.tokens_BS.device)
    return difference(computed(small.parts(layers), other), reference(small, other))


@lru_cache(maxsize=8)
def masked_attention(config_text: str) -> str | None:
    """Returns what masks scores beside the order of tokens, in words; None where nothing does.

    Args:
        config_text: the `config.json`, as text.
    """
    (model,) = small_of(json.loads(config_text)).parts()
    with quiet():
        attentions = model.cached_attentions()
    if any(one.softcap is not None for one in attentions):
        return "a soft cap on scores"
    return "windows" if any(one.window is not None for one in attentions) else None


@lru_cache(maxsize=8)
def layers_stand_alone(config_text: str) -> bool:
    """Returns whether a small model in stages of one layer each computes what it does in one piece.

    Args:
        config_text: the `config.json`, as text.
    """
    small = small_of(json.loads(config_text))
    batch = proof_batch((_TOKENS,), small.config.vocab_size)
    try:
        with torch.no_grad():
            whole, apart = (computed(small.parts(cut), batch) for cut in (None, (1,) * small.config.num_layers))
    except FAULTS:
        return False
    return difference(apart, Computed(whole.losses, {})).is_rounding


@lru_cache(maxsize=8)
def unseen_layer(config_text: str) -> str | None:
    """Returns the name of a small model's layer that the engine's attention is not asked in, which so does not reach
    tokens of other ranks; None where it is asked in each.

    Args:
        config_text: the `config.json`, as text.
    """
    (model,) = small_of(json.loads(config_text)).parts()
    with quiet():
        names = [one.name for one in model.cached_attentions()]
    layers = (f"layers.{index}." for index in range(model.config.num_layers))
    return next((layer.rstrip(".") for layer in layers if not any(name.startswith(layer) for name in names)), None)
