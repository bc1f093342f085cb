"""A mixture of experts in the place of an MLP: a router gives each token a few of many MLPs, and weighs their outputs.

An expert's matrices are parameters of their own, `<prefix>.experts.{e}.{gate_proj,up_proj,down_proj}.weight`, 2D as in
checkpoints, and so are its adapters. On a rank they lie one behind the other in one storage, of which the parameters
are views, so that one grouped product serves all experts without a copy (see ops.routed_experts).

Every expert's inner features are split over tensor ranks, like a dense MLP's. Between the two boundaries with the
residual stream, outputs and all gradients are partial sums over these ranks; the router's gradient too, because it
comes from outputs that are. x is gathered, or just copied, at the first boundary, and outputs are summed at the second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.distributed.differentiable import from_partial, to_partial
from engine.distributed.sharding import ShardSpec, replicated_spec, split_spec
from engine.errors import UserError
from engine.kernels.records import AdapterPlace
from engine.layers.context import AdapterSettings, LayerContext
from engine.layers.experts import expert_context
from engine.layers.mlp import MLP
from engine.layers.module import ShardedModule, ShardEntry
from engine.ops.attention.token_context import TokenContext
from engine.ops.dropout import DropoutSite
from engine.ops.grouped_products import GROUPED_MULTIPLE, GradientBlock
from engine.ops.inputs import GivenInput, LinearInput, made_input
from engine.ops.routed_experts import GroupedLowRank, GroupedOperands, routed_experts
from engine.ops.routing import RoutingRule, route, sink_linear

_ALL = slice(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedSizes:
    """The mixture of experts that stands in the place of the MLP.

    Args:
        rule: how the router chooses.
        intermediate: inner features of an expert.
        shared: inner features of the expert that all tokens share; 0 without one.
        dense_layers: the layers that have an MLP after all.
    """

    rule: RoutingRule
    intermediate: int
    shared: int = 0
    dense_layers: tuple[int, ...] = ()


class GroupedLinear(ShardedModule):
    """The same linears of every expert, on one input: gate and up, or down.

    Args:
        prefix: of the experts' module names, such as `layers.3.mlp.experts`.
        leaves: names of the linears, in the order of their rows.
        spec: shard of the weight of each.
        site: dropout site of the input.
        first_feature: the first of the input's features here.
        num_experts: of the layer.

    Raises:
        UserError: adapters that experts cannot have, or sizes that the device's grouped products do not take.
    """

    def __init__(
        self,
        prefix: str,
        leaves: tuple[str, ...],
        spec: ShardSpec,
        *,
        site: int,
        first_feature: int = 0,
        num_experts: int,
        build: LayerContext,
    ) -> None:
        super().__init__()
        self._prefix, self._names, self._spec, self._build = prefix, leaves, spec, build
        self._experts = range(num_experts)
        rows, self._in = spec.local_shape
        settings = {leaf: self._common_settings(leaf) for leaf in leaves}
        adapted = {leaf: found for leaf, found in settings.items() if found is not None}
        rank = sum(found.rank for found in adapted.values())
        padded = -(-rank // GROUPED_MULTIPLE) * GROUPED_MULTIPLE
        if build.device.type == "cuda":
            self._check_device(rows * len(leaves))
        self.storage = build.empty((num_experts, rows * len(leaves), self._in + padded))
        blocks = tuple(self._own_weights(expert, rows) for expert in self._experts)
        self.trained: list[ShardEntry] = [entry for entry in self.entries if entry.sink is not None]
        low_rank = None
        if adapted:
            low_rank = self._build_adapters(adapted, rows, padded, site, first_feature)
        self.operands = GroupedOperands(
            extended_EOI=self.storage,
            in_features=self._in,
            weight_blocks=blocks,
            low_rank=low_rank,
            kernels=build.layout.kernels,
        )

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Every tensor that trains."""
        return tuple(entry.parameter for entry in self.trained)

    def _common_settings(self, leaf: str) -> AdapterSettings | None:
        """Returns the settings of the experts' adapters; some experts may have none."""
        plan = self._build.plan
        names = [f"{self._prefix}.{expert}.{leaf}" for expert in self._experts]
        found: dict[AdapterSettings, str] = {}
        for name in names:
            if (settings := plan.adapter(name)) is not None:
                found.setdefault(settings, name)
        if not found:
            return None
        if len(found) > 1:
            first, second, *_ = found.values()
            raise UserError(
                f"{first} and {second} are to have adapters of different rank or alpha, but the adapters of one "
                "layer's experts are one product: write lora.rank_pattern and lora.alpha_pattern so that they agree."
            )
        ((common, name),) = found.items()
        for option, asked in (("dora", common.dora), ("bias", common.bias)):
            if asked:
                raise UserError(
                    f"lora.{option} is true and {name} is to have an adapter, but experts that a router chooses have "
                    f"plain adapters alone: set lora.{option} to false, or leave that module out of lora.targets."
                )
        return common

    def _check_device(self, rows: int) -> None:
        """Checks what torch's grouped product takes on a GPU."""
        if self._build.dtype != torch.bfloat16:
            raise UserError(
                "the model has experts that a router chooses, whose products a GPU has in bfloat16 alone: set "
                "model.dtype to bfloat16."
            )
        for size in (rows, self._in):
            if size % GROUPED_MULTIPLE:
                raise UserError(
                    f"{self._prefix} has linears of {size} features on a rank, but products of experts on a GPU need a "
                    f"multiple of {GROUPED_MULTIPLE}: use a parallel.tensor that leaves one."
                )

    def _own_weights(self, expert: int, rows: int) -> tuple[GradientBlock, ...]:
        blocks = []
        for index, leaf in enumerate(self._names):
            module, part = f"{self._prefix}.{expert}.{leaf}", slice(index * rows, (index + 1) * rows)
            weight = self.storage[expert, part, : self._in]
            entry = self.own(f"{module}.weight", weight, self._spec, trainable=self._build.plan.trains(module))
            if entry.sink is not None:
                blocks.append(GradientBlock(entry.sink, part, _ALL))
        return tuple(blocks)

    def _build_adapters(
        self, adapted: dict[str, AdapterSettings], rows: int, padded: int, site: int, first_feature: int
    ) -> GroupedLowRank:
        """Makes A as rows of one stacked tensor, and B as columns of the storage."""
        stacked = self._build.empty((len(self._experts), padded, self._in))
        places, first = [], 0
        a_blocks: list[list[GradientBlock]] = [[] for _ in self._experts]
        b_blocks: list[list[GradientBlock]] = [[] for _ in self._experts]
        for leaf, settings in adapted.items():
            start, rank = self._names.index(leaf) * rows, settings.rank
            part, ranks = slice(start, start + rows), slice(first, first + rank)
            places.append(
                AdapterPlace(
                    first_column=start, num_columns=rows, first_row=first, num_ranks=rank, scale=settings.scale
                )
            )
            spec_a, spec_b = self._factor_specs(rank)
            for expert in self._experts:
                module = f"{self._prefix}.{expert}.{leaf}"
                if self._build.plan.adapter(module) is None:
                    continue
                b_columns = slice(self._in + first, self._in + first + rank)
                a = self.own(f"{module}.lora_A", stacked[expert, ranks], spec_a, trainable=True)
                b = self.own(f"{module}.lora_B", self.storage[expert, part, b_columns], spec_b, trainable=True)
                assert a.sink is not None and b.sink is not None
                self.trained += [a, b]
                a_blocks[expert].append(GradientBlock(a.sink, ranks, _ALL))
                b_blocks[expert].append(GradientBlock(b.sink, part, ranks))
            first += rank
        dropout = None
        if (probability := next(iter(adapted.values())).dropout) > 0:
            dropout = DropoutSite(
                probability=probability, seed=self._build.plan.seed, site=site, feature_offset=first_feature
            )
        return GroupedLowRank(
            a_ERI=stacked,
            places=tuple(places),
            a_blocks=tuple(map(tuple, a_blocks)),
            b_blocks=tuple(map(tuple, b_blocks)),
            dropout=dropout,
        )

    def _factor_specs(self, rank: int) -> tuple[ShardSpec, ShardSpec]:
        """Returns the shards of A and B: one is cut as the weight, the gradient of the other is a partial sum."""
        tp, spec = self._build.layout.tp, self._spec
        outputs, inputs = spec.global_shape
        if spec.dim == 0:
            cut = replace(spec, global_shape=(outputs, rank), local_shape=(spec.local_shape[0], rank))
            return replicated_spec((rank, inputs), rank=tp.rank, size=tp.size, grad_reduce=("tp",)), cut
        cut = replace(spec, global_shape=(rank, inputs), local_shape=(rank, spec.local_shape[1]))
        return cut, replicated_spec((outputs, rank), rank=tp.rank, size=tp.size, grad_reduce=("tp",))


class _TokenWeight(ShardedModule):
    """A small matrix that every rank has whole: the router's, or the gate's of the shared expert.

    Args:
        name: engine module name.
        rows, hidden: of the matrix.
    """

    def __init__(self, name: str, rows: int, hidden: int, *, build: LayerContext) -> None:
        super().__init__()
        tp = build.layout.tp
        spec = replicated_spec((rows, hidden), rank=tp.rank, size=tp.size, grad_reduce=("tp",))
        self.weight = self.own(f"{name}.weight", build.empty((rows, hidden)), spec, trainable=build.plan.trains(name))

    def forward(self, x_TH: Tensor) -> Tensor:
        return sink_linear(x_TH, self.weight.parameter, self.weight.sink)


class RoutedMLP(nn.Module):
    """The experts that the router chooses for each token and, in some families, one that all tokens share.

    u: [T, hidden] (or [T / tp, hidden]), from which x is made -> the same shape.

    Args:
        prefix: engine module name, such as `layers.3.mlp`.
        sizes: of the mixture; the output of a shared expert is multiplied by a gate of its own.
        hidden: features of the residual stream.
        first_site: dropout site of the experts' input; that of their inner features is the next one.
        shared_site: the same of the shared expert.

    Raises:
        UserError: the frozen base is to be stored encoded; else see `GroupedLinear`.
    """

    def __init__(
        self,
        prefix: str,
        sizes: RoutedSizes,
        *,
        hidden: int,
        first_site: int,
        shared_site: int,
        build: LayerContext,
    ) -> None:
        super().__init__()
        layout = build.layout
        tp, rule, intermediate = layout.tp, sizes.rule, sizes.intermediate
        if layout.base is not None:
            raise UserError(
                "model.base_dtype asks for an encoded base, but the model has experts that a router chooses, and their "
                "products take plain weights alone: set model.base_dtype to null."
            )
        self._rule, self._layout = rule, layout
        self._loops = build.device.type != "cuda"
        inner = expert_context(build)
        self.router = _TokenWeight(f"{prefix}.router", rule.num_experts, hidden, build=inner)
        what = "the experts' intermediate size"
        self.gate_up = GroupedLinear(
            f"{prefix}.experts",
            ("gate_proj", "up_proj"),
            split_spec((intermediate, hidden), 0, rank=tp.rank, size=tp.size, what=what),
            site=first_site,
            num_experts=rule.num_experts,
            build=inner,
        )
        self.down = GroupedLinear(
            f"{prefix}.experts",
            ("down_proj",),
            split_spec((hidden, intermediate), 1, rank=tp.rank, size=tp.size, what=what),
            site=first_site + 1,
            first_feature=tp.rank * (intermediate // tp.size),
            num_experts=rule.num_experts,
            build=inner,
        )
        self.shared: MLP | None = None
        self.shared_gate: _TokenWeight | None = None
        if sizes.shared:
            self.shared = MLP(
                f"{prefix}.shared_expert",
                hidden=hidden,
                intermediate=sizes.shared,
                bias=False,
                first_site=shared_site,
                build=inner,
            )
            self.shared_gate = _TokenWeight(f"{prefix}.shared_expert_gate", 1, hidden, build=inner)

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        layout = self._layout
        x = to_partial(made_input(u, source, layout.kernels), layout.tp, splits_tokens=layout.splits_tokens)
        weights, slots = route(self.router(x), self._rule, loops=self._loops)
        leaves = (*self.gate_up.leaves, *self.down.leaves)
        y = routed_experts(x, weights, slots, self.gate_up.operands, self.down.operands, context, leaves)
        if self.shared is not None and self.shared_gate is not None:
            y = y + torch.sigmoid(self.shared_gate(x)) * self.shared(x, GivenInput(), context)
        return from_partial(y, layout.tp, splits_tokens=layout.splits_tokens)
