"""A mixture's experts where transformers keeps the weights of all of them as stacks: their adapters, and their ranks.

A stack `gate_up_proj` [E, O, I] is one parameter of the module of experts; here it is a module of that name with a
weight. Its adapter is PEFT's of `target_parameters`: W_e + scale * B_e A_e for each expert e. The deltas are never
made: each expert's rows go through its factors beside its weight.

Expert ranks each hold some of a stack's experts, where transformers' expert plan lets them be apart, and their factors.
Tensor ranks hold some of every expert's inner features.

Legend: E experts, R rank, T tokens, K experts of a token, N = T K rows, I features of an input, O of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.adopted.attention import Run
from engine.adopted.dispatch import inverse_order, planned_route
from engine.adopted.linears import coordinates_of
from engine.adopted.structure import whole_module
from engine.adopted.tensor_plan import Split, parameter_spec
from engine.distributed.mesh import Axis, ExpertAxes
from engine.distributed.sharding import ShardSpec, replicated_spec, split_spec
from engine.errors import UserError
from engine.kernels.philox import dropout_mask
from engine.layers.context import AdapterSettings, LayerContext
from engine.layers.module import ShardEntry
from engine.ops.dropout import DropoutSite

_LEAVES = ("gate_up_proj", "up_proj", "down_proj")


def stack_leaves(module: nn.Module) -> tuple[str, ...]:
    """Returns which of a module's own parameters are stacks of experts' weights, by transformers' interface of experts;
    none of another module."""
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
        return ()
    own = dict(module.named_parameters(recurse=False))
    return tuple(leaf for leaf in _LEAVES if leaf in own and own[leaf].dim() == 3)


_CHOSEN = ("top_k", "num_experts_per_tok", "moe_topk", "moe_k")


def expert_share(layer: nn.Module, config: Any) -> float:
    """Returns the share of a layer's stacked experts that a token meets; 0 without any.

    Args:
        config: transformers' record of the model.
    """
    counts = [module.get_parameter(leaf).shape[0] for module in layer.modules() for leaf in stack_leaves(module)]
    if not counts:
        return 0.0
    places = [vars(module) for module in layer.modules()] + [vars(config)]
    found = (place[name] for place in places for name in _CHOSEN if isinstance(place.get(name), int))
    return next(found, counts[0]) / counts[0]


def met_weights(layer: nn.Module, config: Any) -> int:
    """Returns the number of weights of a layer that a token is multiplied by: of linears, routers and its experts."""
    found, share = 0.0, expert_share(layer, config)
    for module in layer.modules():
        stacks = stack_leaves(module)
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf in stacks:
                found += parameter.numel() * share
            elif leaf == "weight" and parameter.dim() == 2 and not isinstance(module, nn.Embedding):
                found += parameter.numel()
    return round(found)


@lru_cache(maxsize=4)
def stack_shapes(config_text: str) -> Mapping[str, tuple[int, int, int]]:
    """Returns name -> shape of all stacks in transformers' model of a `config.json`, given as text."""
    modules = whole_module(config_text).named_modules()
    found = ((name, module, leaf) for name, module in modules for leaf in stack_leaves(module))
    shapes = {f"{name}.{leaf}": module.get_parameter(leaf).shape for name, module, leaf in found}
    return {name: (experts, outputs, inputs) for name, (experts, outputs, inputs) in shapes.items()}


@dataclass(frozen=True, slots=True)
class StackAdapter:
    """The adapter of a stack.

    Args:
        a_REI, b_OER: the factors.
        scale: of their product.
        dropout: of the input; None for none.
    """

    a_REI: Tensor
    b_OER: Tensor
    scale: float
    dropout: DropoutSite | None

    def factors(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns each expert's A [R, I] and B [O, R]."""
        return self.a_REI.unbind(1), self.b_OER.unbind(1)


Own = Callable[[str, tuple[int, ...], ShardSpec], ShardEntry]
"""Takes a parameter that trains: its name, the shape here, and the spec."""


def stack_adapter(
    name: str,
    experts: nn.Module,
    leaf: str,
    *,
    split: Split,
    apart: bool,
    settings: AdapterSettings,
    site: int,
    build: LayerContext,
    own: Own,
) -> StackAdapter:
    """Makes the adapter of a stack.

    Args:
        name: of the stack, as a module.
        experts, leaf: transformers' module and its parameter, [E, O, I] of the whole model; its numbers are not read.
        split: of the stack over tensor ranks.
        apart: expert ranks hold some of its experts each.
        site: dropout site of its input.

    Raises:
        UserError: adapters that experts cannot have.
    """
    for option, given in (("dora", settings.dora), ("bias", settings.bias)):
        if given:
            raise UserError(
                f"lora.{option} is true, but {name} is a stack of experts, whose adapters have none: set lora.{option} "
                "to false, or add the experts to lora.exclude."
            )
    if build.plan.experts != "per_expert":
        raise UserError(
            f"lora.experts is {build.plan.experts}, but {name} is a stack of experts of a model with transformers' "
            "modules, whose adapters share no factors: set lora.experts to per_expert."
        )
    module: Any = experts
    if module.is_transposed:
        raise UserError(
            f"{name} is a stack of experts whose matrices have their inputs first, which adapters of adopted models "
            "lack: add the experts to lora.exclude."
        )
    count, outputs, inputs = experts.get_parameter(leaf).shape
    a, b = (settings.rank, count, inputs), (outputs, count, settings.rank)
    if apart:
        a_spec, b_spec = (expert_spec(shape, 1, build.layout.expert_axes) for shape in (a, b))
    else:
        a_spec, b_spec = _factor_specs(name, a, b, split, build.layout.tp)
    a_entry = own(f"{name}.lora_A", a_spec.local_shape, a_spec)
    b_entry = own(f"{name}.lora_B", b_spec.local_shape, b_spec)
    dropout = None
    if settings.dropout > 0:
        first = a_spec.runs(2)[0].global_offset
        dropout = DropoutSite(probability=settings.dropout, seed=build.plan.seed, site=site, feature_offset=first)
    return StackAdapter(a_entry.parameter, b_entry.parameter, settings.scale, dropout)


def _factor_specs(
    name: str, a: tuple[int, ...], b: tuple[int, ...], split: Split, tp: Axis
) -> tuple[ShardSpec, ShardSpec]:
    """Returns the shards of A and B: the side that the stack is split on is split, the other's gradient is partial."""
    if split == "columns" and tp.size > 1:
        inner = split_spec(a, 2, rank=tp.rank, size=tp.size, what=f"the input width of {name}")
        return inner, replicated_spec(b, rank=tp.rank, size=tp.size, grad_reduce=("tp",))
    if split in ("rows", "halves") and tp.size > 1:
        flat = parameter_spec((b[0], b[1] * b[2]), split, tp, name=name)
        rows = replace(flat, global_shape=b, local_shape=(flat.local_shape[0], *b[1:]))
        return replicated_spec(a, rank=tp.rank, size=tp.size, grad_reduce=("tp",)), rows
    return tuple(replicated_spec(shape, rank=tp.rank, size=tp.size) for shape in (a, b))  # type: ignore[return-value]


def expert_spec(shape: tuple[int, ...], dim: int, axes: ExpertAxes) -> ShardSpec:
    """Returns the shard of what has its experts in dimension `dim`, of which each expert rank holds as many."""
    spec = split_spec(shape, dim, rank=axes.ep.rank, size=axes.ep.size, what="the number of experts")
    return replace(spec, data=axes.data)


class StackedExperts(nn.Module):
    """A module of experts with adapters on its stacks, or divided over expert ranks, in that module's place.

    Args:
        name: of the module, for errors.
        experts: transformers' module; its stacks are those of this rank's experts.
        adapters: by the stack's leaf.
        ranks: that hold different experts.
        run: of the body.
    """

    def __init__(
        self, name: str, experts: nn.Module, adapters: Mapping[str, StackAdapter], ranks: Axis, run: Run
    ) -> None:
        super().__init__()
        self._name, self._ranks = name, ranks
        self.experts, self._adapters, self._run = experts, dict(adapters), run

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes the experts' weighted sum.

        Args:
            hidden_states: [T, I].
            top_k_index: int64 [T, K], the experts of each token.
            top_k_weights: [T, K].

        Returns:
            [T, I].
        """
        own: Any = self.experts
        per_token, chosen = top_k_index.shape[-1], top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)
        route = planned_route(chosen, own.num_experts, self._ranks)
        tokens = order // per_token
        drops = any(adapter.dropout is not None for adapter in self._adapters.values())
        now = coordinates_of(self._run, hidden_states, drops=drops, name=self._name)
        coordinates = now.local_token_index[tokens] * own.num_experts + chosen[order]
        if drops:
            coordinates = route.out(coordinates)
        first = "gate_up_proj" if own.has_gate else "up_proj"
        inner = self._product(first, route.out(hidden_states[tokens]), route.sizes, coordinates)
        inner = own._apply_gate(inner) if own.has_gate else own.act_fn(inner)
        out = self._product("down_proj", inner, route.sizes, coordinates)
        if own.has_post_expert_norm:
            out = own.post_expert_norm(out)
        out = route.back(out) * top_k_weights.reshape(-1)[order, None]
        return out[inverse_order(order)].unflatten(0, (-1, per_token)).sum(1).to(hidden_states.dtype)

    def _product(self, leaf: str, x_NI: Tensor, sizes: list[int], coordinates_N: Tensor) -> Tensor:
        """Returns [N, O] of rows in the order of their experts, `sizes` of each."""
        own: Any = self.experts
        weights = getattr(own, leaf).unbind()  # one gradient for the stack, not one for each expert
        biases = getattr(own, f"{leaf}_bias").unbind() if own.has_bias else (None,) * len(weights)
        adapter = self._adapters.get(leaf) if self._run.now.adapters else None
        a, b = ((), ()) if adapter is None else adapter.factors()
        low = x_NI if adapter is None else self._dropped(x_NI, adapter.dropout, coordinates_N)
        out = []
        for expert, (rows, low_rows) in enumerate(zip(x_NI.split(sizes), low.split(sizes), strict=True)):
            if not sizes[expert] and (expert or sum(sizes)):  # no rows at all are a product too, of which ranks wait
                continue
            weight = weights[expert].t() if own.is_transposed else weights[expert]
            y = linear(rows, weight, biases[expert])
            if adapter is not None:
                y = y + linear(linear(low_rows, a[expert]), b[expert]) * adapter.scale
            out.append(y)
        return torch.cat(out)

    def _dropped(self, x_NI: Tensor, site: DropoutSite | None, coordinates_N: Tensor) -> Tensor:
        now = self._run.now
        if site is None or not now.training:
            return x_NI
        mask = dropout_mask(site.key(coordinates_N, x_NI.shape[-1], now.step))
        return x_NI * mask * site.scale
