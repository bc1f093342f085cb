"""The router of a mixture of experts: logits of all experts, and with them a choice for each token.

It is small, and every tensor rank has it whole. Its input is too, and its gradient a partial sum over these ranks,
because it comes from outputs that are. Frozen unless it is asked for: in full, or by an adapter of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.distributed.collectives import local_part
from engine.distributed.sharding import replicated_spec
from engine.errors import UserError
from engine.experts.layers.given_routes import GivenRoutes
from engine.experts.ops.load_balance import LoadBalance
from engine.experts.ops.routing import RoutingRule, Slots, route, sink_bias, sink_chosen, sink_linear, sink_scale
from engine.kernels.philox import dropout_mask
from engine.layers.context import AdapterSettings, LayerContext
from engine.layers.module import ShardedModule, ShardEntry
from engine.models.names import CORRECTION
from engine.ops.attention.token_context import TokenContext, TokenCounts
from engine.ops.dropout import DropoutSite


class Router(ShardedModule):
    """Chooses experts: x [T, hidden] -> weights [T, k] and slots.

    Args:
        name: engine module name, such as `layers.3.mlp.router`.
        rule: how it chooses.
        hidden: features of x.
        layer: number of its layer in the whole model.
        site: dropout site of its adapter's input.

    Raises:
        UserError: its adapter is to have what a router's has not.
    """

    def __init__(
        self, name: str, rule: RoutingRule, hidden: int, *, layer: int, site: int, build: LayerContext
    ) -> None:
        super().__init__()
        self._name, self._rule, self._layer, self._build = name, rule, layer, build
        self._dtype = torch.float32 if rule.wide else None
        self._product, self._sigmoid = build.layout.kernels.narrow_product, build.layout.kernels.sigmoid
        trains = build.plan.trains(name)
        shape, wide = (rule.num_experts, hidden), torch.float32
        frozen = None
        if rule.keeps_weight_wide and not trains:
            frozen = build.once(lambda: torch.empty(shape, dtype=wide, device=build.device))
        self.weight = self._own("weight", shape, trains, frozen)
        self.bias = self._own("bias", (rule.num_experts,), trains) if rule.has_bias else None
        self.scale: ShardEntry | None = None
        self.expert_scale: ShardEntry | None = None
        if rule.input_factor is not None:
            self.scale = self._own("scale", (hidden,), trains, decays=True)
        if rule.scales_experts:
            self.expert_scale = self._own("per_expert_scale", (rule.num_experts,), trains, decays=True)
        self.correction: ShardEntry | None = None
        if rule.has_correction:
            # in fp32 whatever the model computes in: differences of scores are smaller than bfloat16 can tell
            values = build.once(lambda: torch.zeros(rule.num_experts, dtype=torch.float32, device=build.device))
            if rule.correction_is_row:
                values = values[None]
            self.correction = self._own(CORRECTION, tuple(values.shape), False, values)
        self._scale, self._dropout = 0.0, None
        self.factors: tuple[ShardEntry, ShardEntry] | None = None
        if (settings := build.plan.adapter(name)) is not None:
            self._check(settings)
            self.factors = (
                self._own("lora_A", (settings.rank, hidden), True, build.factor((settings.rank, hidden))),
                self._own(
                    "lora_B", (rule.num_experts, settings.rank), True, build.factor((rule.num_experts, settings.rank))
                ),
            )
            self._scale = settings.scale
            if settings.dropout > 0:
                self._dropout = DropoutSite(probability=settings.dropout, seed=build.plan.seed, site=site)

    def _own(
        self,
        leaf: str,
        shape: tuple[int, ...],
        trains: bool,
        values: Tensor | None = None,
        *,
        decays: bool | None = None,
    ) -> ShardEntry:
        tp = self._build.layout.tp
        spec = replicated_spec(shape, rank=tp.rank, size=tp.size, grad_reduce=("tp",))
        values = self._build.empty(shape) if values is None else values
        return self.own(f"{self._name}.{leaf}", values, spec, trainable=trains, decays=decays)

    def _check(self, settings: AdapterSettings) -> None:
        for option, asked in (("dora", settings.dora), ("bias", settings.bias)):
            if asked:
                raise UserError(
                    f"lora.{option} is true and {self._name} is to have an adapter, but a router has a plain adapter "
                    f"alone: set lora.{option} to false, or leave the router out of lora.targets."
                )

    def _logits(self, x_TH: Tensor, context: TokenContext) -> Tensor:
        if self.scale is not None and self._rule.input_factor is not None:
            x_TH = sink_scale(x_TH, self.scale.parameter, self.scale.sink, self._rule.input_factor)
        logits = self._linear(x_TH, self.weight)
        if self.bias is not None:
            logits = sink_bias(logits, self.bias.parameter, self.bias.sink)
        if self.factors is None or not context.adapters:
            return logits
        if self._dropout is not None and context.training:
            key = self._dropout.key(context.token_index, x_TH.shape[1], context.step)
            x_TH = (x_TH * dropout_mask(key)).mul_(self._dropout.scale)
        a, b = self.factors
        return torch.add(logits, self._linear(self._linear(x_TH, a), b), alpha=self._scale)

    def _linear(self, x_TH: Tensor, weight: ShardEntry) -> Tensor:
        return sink_linear(x_TH, weight.parameter, weight.sink, self._dtype, self._product)

    def _route(self, logits_TE: Tensor, context: TokenContext, *, loops: bool) -> tuple[Tensor, Slots]:
        correction_E = None if self.correction is None else self.correction.parameter
        routes = context.part(GivenRoutes) if context.adapters else None  # the reference chooses for itself
        given = None
        if routes is not None:
            layout = self._build.layout
            given = routes.of_layer(self._layer, layout.tp if layout.routes_local_tokens else None).instead_of
        return route(
            logits_TE,
            self._rule,
            loops=loops,
            correction_E=correction_E,
            scaled=self._scaled,
            sigmoid=self._sigmoid,
            given=given,
        )

    def _scaled(self, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        if self.expert_scale is None:
            return weights_TK
        return sink_chosen(weights_TK, ids_TK, self.expert_scale.parameter, self.expert_scale.sink)

    def forward(self, x_TH: Tensor, context: TokenContext, *, loops: bool) -> tuple[Tensor, Slots]:
        """Returns weights and slots; `loops` as of `engine.experts.ops.grouped_products.row_groups`."""
        logits_TE, balance = self._logits(x_TH, context), context.part(LoadBalance)
        if balance is None:
            return self._route(logits_TE, context, loops=loops)
        layout, counts = self._build.layout, context.part(TokenCounts)
        counts_T = None if counts is None else counts.counts_T
        if counts_T is not None and layout.routes_local_tokens:
            counts_T = local_part(counts_T, layout.tp)
        # where ranks have the same tokens, the gradient is a partial sum, of which one has it
        if layout.routes_local_tokens or layout.tp.rank == 0:
            logits_TE = balance.through(logits_TE, counts_T)
        weights, slots = self._route(logits_TE, context, loops=loops)
        if not context.repeats:
            balance.seen(logits_TE, slots, counts_T)
        return weights, slots
