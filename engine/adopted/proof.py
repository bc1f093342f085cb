"""The proof that an adopted model is transformers' model: a small one of the same make, run both ways.

Every check compares numbers of the engine's body, with adapters whose B is drawn, with autograd through transformers'
own model on each document alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from engine.adopted.config import INSIDE, AdoptedConfig, Attention, adopted_config, adopted_family
from engine.adopted.forms import seeded, small_model
from engine.adopted.structure import quiet
from engine.batch import IGNORE_LABEL, Batch
from engine.errors import UserError
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.layers.plain_module import linear_names
from engine.models.decoder import Decoder, Part, build_decoder, split_parts
from engine.models.decoder_config import DecoderConfig
from engine.models.names import NameMap

BOUND = 1e-4
"""Largest difference of a loss, or of a gradient relative to its norm, that rounding explains in float32."""
_LENGTHS = (11, 13, 16)
_RANK, _SCALE = 2, 0.5


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


@lru_cache(maxsize=8)
def proven_attention(config_text: str) -> Attention:
    """Returns the attention with which the body computes what transformers' model does.

    Args:
        config_text: the `config.json`, as text.

    Raises:
        UserError: neither does; names what differs.
    """
    small = small_of(json.loads(config_text))
    packed = proof_batch(_LENGTHS, small.config.vocab_size)
    try:
        if difference(computed(small.parts(), packed), reference(small, packed)).is_rounding:
            return "engine"
    except UserError:  # what this attention lacks
        pass
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):  # a module written for another
        pass
    own = replace(small, config=replace(small.config, attention="own"))
    single = proof_batch(_LENGTHS[-1:], small.config.vocab_size)
    found = difference(computed(own.parts(), single), reference(small, single))
    if not found.is_rounding:
        raise UserError(
            f"a {small.config.family} model of transformers cannot be adopted: in a small one of its make, "
            f"{found.figure} differs from transformers' own by {found.worst:.1e}."
        )
    return "own"


@dataclass(frozen=True, slots=True)
class Small:
    """A small model of transformers, and the engine's record of it.

    Args:
        model: of transformers; its linears with adapters compute them.
        config, names: the engine's.
        factors: of adapters, by logical name; leaves of autograd.
    """

    model: nn.Module
    config: AdoptedConfig
    names: NameMap
    factors: dict[str, Tensor]

    def plan(self) -> TrainingPlan:
        """Returns the plan that trains the adapters."""
        settings = AdapterSettings(rank=_RANK, scale=_SCALE, dropout=0.0)
        return TrainingPlan(adapter=lambda name: settings if f"{name}.lora_A" in self.factors else None)

    def parts(self, layers: tuple[int, ...] | None = None) -> list[Decoder]:
        """Returns the engine's model, or its parts with so many layers each, with the small model's weights."""
        whole = layers or (self.config.num_layers,)
        found: list[Decoder] = []
        for part in split_parts(whole):
            found.append(self._filled(part, found))
        return found

    def _filled(self, part: Part, before: list[Decoder]) -> Decoder:
        first = before[0].embedding if before else None
        model = build_decoder(
            self.config,
            layout=TensorLayout(),
            plan=self.plan(),
            device=torch.device("cpu"),
            dtype=torch.float32,
            part=part,
            embedding_weight=None if first is None else first.weight,
        )
        weights = self.model.state_dict()
        with torch.no_grad():
            for entry in shard_entries(model):
                source = self.factors.get(entry.name)
                found = weights[self.names.to_hf(entry.name).name] if source is None else source
                entry.parameter.copy_(found)
        return model


def small_of(hf_config: dict[str, Any]) -> Small:
    """Returns a small model of the make of a `config.json`, its adapters drawn at random."""
    model = small_model(hf_config)
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    config["model_type"] = hf_config["model_type"]
    decoder, names = adopted_config(config, "engine"), adopted_family(config).names
    found = Small(model, decoder, names, {})
    with seeded(1):
        for module in _adaptable(decoder, names, model):
            weight = model.get_submodule(names.module_to_hf(module)).weight
            for leaf, shape in (("lora_A", (_RANK, weight.shape[1])), ("lora_B", (weight.shape[0], _RANK))):
                found.factors[f"{module}.{leaf}"] = (torch.randn(shape) * 0.1).requires_grad_()
    for name in [name.rpartition(".")[0] for name in found.factors if name.endswith("lora_A")]:
        _adapt(model.get_submodule(names.module_to_hf(name)), found.factors, name)
    return found


def _adaptable(decoder: DecoderConfig, names: NameMap, model: nn.Module) -> list[str]:
    layers = model.get_submodule(names.module_to_hf("layers"))
    return [
        f"layers.{index}.{INSIDE}{name}" for index, layer in layers.named_children() for name in linear_names(layer)
    ]


def _adapt(module: nn.Module, factors: dict[str, Tensor], name: str) -> None:
    assert isinstance(module, nn.Linear)
    a, b = factors[f"{name}.lora_A"], factors[f"{name}.lora_B"]
    module.forward = lambda x: linear(x, module.weight, module.bias) + _SCALE * linear(linear(x, a), b)  # type: ignore[method-assign]


def proof_batch(lengths: tuple[int, ...], vocabulary: int) -> Batch:
    """Returns a row that packs documents of these lengths."""
    total = sum(lengths)
    tokens = torch.randint(3, vocabulary, (1, total), generator=torch.Generator().manual_seed(2))
    ends = torch.tensor(lengths).cumsum(0)
    labels = tokens.roll(-1, 1)
    labels[0, ends - 1] = IGNORE_LABEL
    return Batch(
        tokens_BS=tokens,
        labels_BS=labels,
        positions_BS=torch.cat([torch.arange(length) for length in lengths])[None],
        token_index_BS=torch.arange(total)[None],
        loss_weights_BS=(labels != IGNORE_LABEL).float(),
        document_offsets=torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        document_lengths=lengths,
    )


def reference(small: Small, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the token losses [T] of transformers' model on each document alone, and the factors' gradients."""
    losses, first = [], 0
    for factor in small.factors.values():
        factor.grad = None
    with quiet():
        for length in batch.document_lengths:
            piece = slice(first, first + length)
            logits = small.model(input_ids=batch.tokens_BS[:, piece], use_cache=False).logits.float()
            losses.append(
                cross_entropy(logits[0], batch.labels_BS[0, piece], reduction="none", ignore_index=IGNORE_LABEL)
            )
            first += length
    whole = torch.cat(losses)
    whole.sum().backward()
    gradients = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in small.factors.items()}
    return whole.detach(), gradients


def computed(parts: list[Decoder], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the same of the engine's parts, one after the other."""
    step, x = torch.zeros((), dtype=torch.int64), None
    with quiet():
        for model in parts:
            x, carried = (model.embed(batch), ()) if x is None else model.unpack(x, batch)
            context = model.context(batch, step, training=False, carried=carried)
            x = model.run_layers(x, context)
            if model.head is None:
                x = model.pack(x, context)
    losses = parts[-1].token_losses(x, batch, context)
    losses.sum().backward()
    entries = [entry for model in parts for entry in shard_entries(model)]
    return losses.detach(), {entry.name: entry.sink.buffer for entry in entries if entry.sink is not None}


def difference(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> Difference:
    """Returns the largest difference."""
    (losses, gradients), (whole, expected) = found, wanted
    worst = [Difference("loss", float((losses - whole).abs().max()))]
    largest = max(float(one.norm()) for one in expected.values()) if expected else 0.0
    for name, gradient in expected.items():
        apart = float((gradients[name] - gradient).norm()) / max(float(gradient.norm()), 1e-3 * largest, 1e-12)
        worst.append(Difference(name, apart))
    return max(worst, key=lambda one: float("inf") if one.worst != one.worst else one.worst)
