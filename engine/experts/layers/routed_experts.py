"""A mixture of experts in the place of an MLP: a router gives each token a few of many MLPs, and weighs their outputs.

An expert's matrices are parameters of their own, `<prefix>.experts.{e}.{gate_proj,up_proj,down_proj}.weight`
(layers.grouped_linear).

Experts may be divided over ranks: these send each other their tokens (ops.expert_exchange). Tensor ranks meet them in
one of two ways.

*Cut*: every expert's inner features are split over them, like a dense MLP's. Between the two boundaries with the
residual stream, outputs and all gradients are partial sums over these ranks; the router's gradient too, because it
comes from outputs that are. x is gathered, or just copied, at the first boundary, and outputs are summed at the second.

*Whole*: each tensor rank routes tokens of its own: those that it has under sequence parallelism, else its part of them,
whose outputs are gathered. Nothing in an expert is a partial sum; the router's gradient is one, over tokens. The shared
expert is an MLP as in a model without a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.batch import Batch
from engine.distributed.collectives import local_part
from engine.distributed.differentiable import from_partial, join_tokens, split_tokens, to_partial
from engine.distributed.sharding import replicated_spec, split_spec
from engine.experts.layers.given_routes import GivenRoutes
from engine.experts.layers.grouped_linear import GroupedLinear, is_gpu
from engine.experts.layers.router import Router
from engine.experts.ops.expert_exchange import plan_exchange
from engine.experts.ops.grouped_products import RowGroups, grouped_on_device
from engine.experts.ops.load_balance import LoadBalance
from engine.experts.ops.routed_experts import RoutedPass
from engine.experts.ops.routing import RoutingRule, sink_linear
from engine.experts.ops.span_adapters import groups_by_span, taken_apart, with_choice
from engine.layers.branch import Around, Branch, LinearShape
from engine.layers.context import LayerContext, deferred_sums
from engine.layers.linear import ColumnParallelLinear, Section
from engine.layers.mlp import INPUTS, MLP, Activation, first_linears
from engine.layers.module import ShardedModule
from engine.models.decoder_config import DecoderConfig, LayerPlace, LayerVariant
from engine.models.names import EXPERT_GATE_UP, FUSED, GATE_UP, SHARED_EXPERT_GATE_UP
from engine.ops.activations import ClampedGLUInput
from engine.ops.attention.token_context import ContextPart, TokenContext
from engine.ops.inputs import GivenInput, LinearInput, compute_input


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedSizes(LayerVariant):
    """The mixture of experts that stands in the place of the MLP.

    Args:
        rule: how the router chooses.
        intermediate: inner features of an expert.
        shared: inner features of the expert that all tokens share; 0 without one.
        gates_shared: that expert's output is multiplied by a gate of its own, a sigmoid of each token.
        dense_layers: the layers that have an MLP after all.
        has_biases: every linear of an expert has one.
        clamp: steepness and limit of the clamped gate (see ops.activations.ClampedGLUInput); None for SwiGLU.
        activation: of an expert; "relu2", the square of a ReLU, is of experts without a gate.
        latent: features that the chosen experts read and write, between two linears that all tokens share; 0 for those
            of the stream.
        balanced_by: coefficient of the auxiliary loss that the config asks for; 0 where it does not, None where the
            family has none.
    """

    rule: RoutingRule
    intermediate: int
    shared: int = 0
    gates_shared: bool = True
    dense_layers: tuple[int, ...] = ()
    has_biases: bool = False
    clamp: tuple[float, float] | None = None
    balanced_by: float | None = None
    activation: Activation = "silu"
    latent: int = 0

    @property
    def expert_width(self) -> int:
        return self.latent

    @property
    def num_experts(self) -> int:
        return self.rule.num_experts

    @property
    def experts_per_token(self) -> int:
        return self.rule.per_token

    def applies(self, index: int) -> bool:
        return index not in self.dense_layers

    def mlp(self, place: LayerPlace) -> RoutedMLP:
        return RoutedMLP(
            f"{place.prefix}.mlp",
            self,
            hidden=place.config.hidden,
            layer=place.index,
            first_site=place.mlp_site,
            shared_site=place.further_site,
            latent_site=place.latent_site,
            build=place.build,
        )

    def context_part(self, batch: Batch) -> ContextPart | None:
        return GivenRoutes.of_batch(batch)

    def mlp_parameters(self, config: DecoderConfig) -> int:
        rule = self.rule
        linears = 1 + len(first_linears(self.activation))
        met = linears * self.shared + rule.num_experts + int(self.shared > 0) + 2 * self.latent
        return config.hidden * met + linears * rule.per_token * self.intermediate * (self.latent or config.hidden)

    def auxiliary_loss(self, coefficient: float, device: torch.device) -> LoadBalance:
        return LoadBalance(coefficient, self.num_experts, device=device)

    def fused_places(self, fused: str) -> tuple[str, ...]:
        if fused != GATE_UP:
            return (fused,)
        if self.activation == "relu2":
            return ()
        experts = (EXPERT_GATE_UP.replace("*", str(expert)) for expert in range(self.num_experts))
        return (*experts, *((SHARED_EXPERT_GATE_UP,) if self.shared else ()))

    def graph_obstacle(self, family: str) -> str:
        return f"experts that a router chooses, as in this {family} model, have not been captured in graphs yet"

    def decoding_obstacle(self, family: str, device: torch.device) -> str | None:
        if grouped_on_device(device):
            return None
        return f"the products of experts in this {family} model are launched one by one, by counts that the host reads"

    def plain_torch(self) -> tuple[str, ...]:
        return () if self.clamp is None else ("the experts' clamped gate",)

    def part_rows(self, config: DecoderConfig) -> dict[str, int]:
        experts = dict.fromkeys(FUSED[EXPERT_GATE_UP], self.intermediate)
        return experts | dict.fromkeys(FUSED[SHARED_EXPERT_GATE_UP], self.shared)


class _TokenWeight(ShardedModule):
    """A small matrix that every rank has whole: the gate's of the shared expert.

    Args:
        name: engine module name.
        rows, hidden: of the matrix.
    """

    def __init__(self, name: str, rows: int, hidden: int, *, build: LayerContext) -> None:
        super().__init__()
        tp, self._product = build.layout.tp, build.layout.kernels.narrow_product
        spec = replicated_spec((rows, hidden), rank=tp.rank, size=tp.size, grad_reduce=("tp",))
        self.weight = self.own(f"{name}.weight", build.empty((rows, hidden)), spec, trainable=build.plan.trains(name))

    def forward(self, x_TH: Tensor) -> Tensor:
        return sink_linear(x_TH, self.weight.parameter, self.weight.sink, product=self._product)


def _shared_expert(prefix: str, sizes: RoutedSizes, hidden: int, first_site: int, build: LayerContext) -> MLP:
    """Makes the expert that every token goes through; arguments are those of `RoutedMLP`."""
    return MLP(
        f"{prefix}.shared_expert",
        hidden=hidden,
        intermediate=sizes.shared,
        bias=False,
        first_site=first_site,
        activation=sizes.activation,
        build=build,
    )


class RoutedMLP(Branch):
    """The experts that the router chooses for each token and, in some families, one that all tokens share.

    u: [T, hidden] (or [T / tp, hidden]), from which x is made -> the same shape.

    Args:
        prefix: engine module name, such as `layers.3.mlp`.
        sizes: of the mixture.
        hidden: features of the residual stream.
        layer: number of the layer in the whole model.
        first_site: dropout site of the experts' input; that of their inner features is the next one.
        shared_site: the same of the shared expert; the one after these two is the router's.
        latent_site: the same of the linears before and behind the experts, where they have a width of their own.

    Raises:
        UserError: see `GroupedLinear`.
    """

    def __init__(
        self,
        prefix: str,
        sizes: RoutedSizes,
        *,
        hidden: int,
        layer: int,
        first_site: int,
        shared_site: int,
        build: LayerContext,
        latent_site: int = 0,
    ) -> None:
        super().__init__()
        layout = build.layout
        axes, rule, intermediate = layout.expert_axes, sizes.rule, sizes.intermediate
        tp, self._ep = axes.tp, axes.ep
        self.routes_local_tokens = layout.routes_local_tokens
        self.ends_region = False
        """Whether a region that backward recomputes ends with the output, which is not read a second time."""
        here = rule.num_experts // self._ep.size
        experts = range(self._ep.rank * here, (self._ep.rank + 1) * here)
        self._layout = layout
        self.rows_E = torch.zeros(rule.num_experts, dtype=torch.int64, device=build.device)
        """Rows that this rank's tokens have sent to each expert in training, since it was last set to zero."""
        self._loops = not is_gpu(build)
        inner = deferred_sums(build)
        self.router = Router(f"{prefix}.router", rule, hidden, layer=layer, site=shared_site + 2, build=inner)
        what, firsts = "the experts' intermediate size", first_linears(sizes.activation)
        width = sizes.latent or hidden
        self.gate_up = GroupedLinear(
            f"{prefix}.experts",
            firsts,
            replace(split_spec((intermediate, width), 0, rank=tp.rank, size=tp.size, what=what), data=axes.data),
            site=first_site,
            experts=experts,
            num_experts=rule.num_experts,
            bias=sizes.has_biases,
            fused="gate_up_proj" if len(firsts) > 1 else None,
            build=inner,
        )
        self.down = GroupedLinear(
            f"{prefix}.experts",
            ("down_proj",),
            replace(split_spec((width, intermediate), 1, rank=tp.rank, size=tp.size, what=what), data=axes.data),
            site=first_site + 1,
            experts=experts,
            first_feature=tp.rank * (intermediate // tp.size),
            num_experts=rule.num_experts,
            bias=sizes.has_biases,
            build=inner,
        )
        self.gate_up.counted = self.rows_E
        self._gated: LinearInput = INPUTS[sizes.activation]
        if sizes.clamp is not None:
            self._gated = ClampedGLUInput(alpha=sizes.clamp[0], limit=sizes.clamp[1])
        around = build if self.routes_local_tokens else inner
        self.shared = _shared_expert(prefix, sizes, hidden, shared_site, around) if sizes.shared else None
        self.shared_gate: _TokenWeight | None = None
        if self.shared is not None and sizes.gates_shared:
            self.shared_gate = _TokenWeight(f"{prefix}.shared_expert_gate", 1, hidden, build=inner)
        self.into_latent: ColumnParallelLinear | None = None
        self.out_of_latent: ColumnParallelLinear | None = None
        if sizes.latent:

            def whole(name: str, shape: tuple[int, int], site: int) -> ColumnParallelLinear:
                spec = replicated_spec(shape, rank=layout.tp.rank, size=layout.tp.size, grad_reduce=("tp",))
                section = Section(name=f"{prefix}.{name}", spec=spec)
                return ColumnParallelLinear([section], bias=False, site=site, build=inner)

            self.into_latent = whole("fc1_latent_proj", (sizes.latent, hidden), latent_site)
            self.out_of_latent = whole("fc2_latent_proj", (hidden, sizes.latent), latent_site + 1)
        gates_behind = self.routes_local_tokens and self.shared_gate is not None
        self._reads_output = gates_behind or self.out_of_latent is not None
        """Whether backward reads what the experts return, so that a second run does not end before it."""

    @property
    def has_shared(self) -> bool:
        return self.shared is not None

    @property
    def linear_shapes(self) -> tuple[LinearShape, ...]:
        around = (self.into_latent, self.out_of_latent)
        latent = tuple(shape for linear in around if linear is not None for shape in linear.shapes)
        return (self.gate_up.shape, self.down.shape, *latent)

    def keep_inputs(self, around: Around) -> None:
        if self.shared is not None:
            self.shared.keep_inputs(around)

    def end_region(self, around: Around) -> None:
        """Leaves the output out of a second run; the shared expert's may be read again, by its gate."""
        self.ends_region = True

    def check_products(self, device_type: str) -> None:
        """Checks that a device has products of such experts; see `GroupedLinear.check_products`."""
        for linear in (self.gate_up, self.down):
            linear.check_products(device_type)

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        layout = self._layout
        x = compute_input(u, source, layout.kernels)
        if self.routes_local_tokens:
            return self._whole(x, context)
        x = to_partial(x, layout.tp, splits_tokens=layout.splits_tokens)
        routed, link = self._dispatch(x, context)
        link, shared = self._compute(routed, link, x, context)
        if shared is not None and self.shared_gate is not None:
            shared = layout.kernels.sigmoid(self.shared_gate(x)) * shared
        y = self.experts_output(routed.combine(link), context)
        if shared is not None:
            y = y + shared
        return from_partial(y, layout.tp, splits_tokens=layout.splits_tokens)

    def _whole(self, x: Tensor, context: TokenContext) -> Tensor:
        """Returns the mixture's output where each tensor rank routes tokens of its own."""
        layout = self._layout
        joins = not layout.splits_tokens
        own = split_tokens(x, layout.tp) if joins else x
        index = local_part(context.token_index, layout.tp) if joins else context.local_token_index
        choice = context.choice
        if choice is not None:
            choice = choice.part(own.shape[0] * layout.tp.rank, own.shape[0] * (layout.tp.rank + 1))
        local = replace(context, token_index=index, choice=choice)
        routed, link = self._dispatch(own, local)
        gate = None if self.shared_gate is None else layout.kernels.sigmoid(self.shared_gate(own))
        link, shared = self._compute(routed, link, x, context)
        y = self.experts_output(routed.combine(link), local)
        if joins and gate is not None:
            y, gate = join_tokens(torch.cat([y, gate], dim=1), layout.tp).split([y.shape[1], 1], dim=1)
        elif joins:
            y = join_tokens(y, layout.tp)
        if shared is None:
            return y
        return y + (shared if gate is None else gate * shared)

    def _dispatch(self, x: Tensor, context: TokenContext) -> tuple[RoutedPass, Tensor]:
        """Chooses experts for these tokens, and starts their rows on the way."""
        travels = self._ep.size > 1
        weights, slots = self.router(x, context, loops=self._loops and not travels)
        gate_up, down = self.gate_up.operands, self.down.operands
        leaves, spans = (*self.gate_up.trained_leaves, *self.down.trained_leaves), ()
        choice = context.choice if context.adapters else None
        if choice is None:
            self._count(slots.groups, [self.rows_E], context)
            exchange = plan_exchange(slots, self._ep, loops=self._loops)
        else:
            groups = groups_by_span(slots, choice.lengths, loops=self._loops and not travels)
            self._count(groups, choice.counted(gate_up.name), context)
            exchange = plan_exchange(slots._replace(groups=groups), self._ep, loops=self._loops)
            by_expert, spans = taken_apart(exchange.groups, [length * weights.shape[1] for length in choice.lengths])
            exchange = replace(exchange, groups=by_expert)
            leaves = (*choice.leaves(gate_up.name), *choice.leaves(down.name))
            gate_up, down = with_choice(gate_up, choice), with_choice(down, choice)
        routed = RoutedPass(
            slots,
            gate_up,
            down,
            context,
            leaves,
            exchange,
            gated=self._gated,
            leaves_output=self.ends_region and context.repeats and not self._reads_output,
            spans=spans,
        )
        return routed, routed.dispatch(self.experts_input(x, context), weights)

    def _count(self, groups: RowGroups, counted: Sequence[Tensor | None], context: TokenContext) -> None:
        """Counts the rows of a step's own pass: not of one for counting before it, nor where backward runs again.

        Args:
            groups: the rows of each expert, or of each of its spans.
            counted: int64 [E], to which those of each span are added.
        """
        balance = context.part(LoadBalance)
        if not context.training or context.repeats or (balance is not None and balance.counts_alone):
            return
        rows_ES = torch.diff(groups.ends, prepend=groups.ends.new_zeros(1)).view(-1, len(counted))
        for span, total_E in enumerate(counted):
            if total_E is not None:
                total_E.add_(rows_ES[:, span])

    def experts_input(self, x: Tensor, context: TokenContext) -> Tensor:
        """Returns what the chosen experts read, for what the router does."""
        return x if self.into_latent is None else self.into_latent(x, GivenInput(), context)

    def experts_output(self, y: Tensor, context: TokenContext) -> Tensor:
        """Returns what joins the stream, for what the chosen experts return."""
        return y if self.out_of_latent is None else self.out_of_latent(y, GivenInput(), context)

    def _compute(
        self, routed: RoutedPass, link: Tensor, x: Tensor, context: TokenContext
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the chosen experts, and the shared one of x while rows travel: one linear on their way to the
        experts, the other on their way back. In backward, too, since that goes through them in the opposite order.

        Returns:
            What `RoutedPass.combine` is called with, and the shared expert's output.
        """
        if self.shared is None:
            return routed.compute(link), None
        both = self.shared.gate_up(x, GivenInput(), context)
        link = routed.compute(link)
        return link, self.shared.finish(both, context)
