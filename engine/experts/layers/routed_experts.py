"""A mixture of experts in the place of an MLP: a router gives each token a few of many MLPs, and weighs their outputs.

An expert's matrices are parameters of their own, `<prefix>.experts.{e}.{gate_proj,up_proj,down_proj}.weight`, 2D as in
checkpoints, and so are its adapters. On a rank they lie one behind the other in one storage, of which the parameters
are views, so that one grouped product serves all experts without a copy (see ops.routed_experts). Where the run stores
its base encoded and none of the weights trains, they lie in an `EncodedStorage` (see ops.encoded_experts).

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

from engine.distributed.collectives import local_part
from engine.distributed.differentiable import from_partial, join_tokens, split_tokens, to_partial
from engine.distributed.sharding import ShardSpec, replicated_spec, split_spec
from engine.errors import UserError
from engine.experts.kernels import grouped_kernels
from engine.experts.layers.expert_adapters import ExpertAdapter, expert_adapters, sharing
from engine.experts.layers.router import Router
from engine.experts.ops.encoded_experts import EncodedExperts
from engine.experts.ops.expert_exchange import plan_exchange
from engine.experts.ops.grouped_adapters import Blocks, GroupedLowRank
from engine.experts.ops.grouped_products import GROUPED_MULTIPLE, GradientBlock, grouped_on_device
from engine.experts.ops.load_balance import LoadBalance
from engine.experts.ops.routed_experts import GroupedOperands, RoutedPass
from engine.experts.ops.routing import RoutingRule, sink_linear
from engine.kernels.records import AdapterPlace
from engine.layers.branch import Around, Branch, LinearShape
from engine.layers.context import LayerContext, deferred_sums
from engine.layers.encoded_storage import EncodedStorage
from engine.layers.linear import ColumnParallelLinear, Section
from engine.layers.mlp import INPUTS, MLP, Activation, first_linears
from engine.layers.module import ShardedModule, ShardEntry
from engine.models.decoder_config import DecoderConfig, LayerPlace, LayerVariant
from engine.models.names import EXPERT_GATE_UP, FUSED, GATE_UP, SHARED_EXPERT_GATE_UP
from engine.ops.activations import ClampedGLUInput
from engine.ops.attention.token_context import TokenContext
from engine.ops.dropout import DropoutSite
from engine.ops.inputs import GivenInput, LinearInput, compute_input

_ALL = slice(None)


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
            first_site=place.mlp_site,
            shared_site=place.further_site,
            latent_site=place.latent_site,
            build=place.build,
        )

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


def _is_gpu(build: LayerContext) -> bool:
    """Returns whether one launch serves all experts; without numbers, whether it would where the backend is used."""
    return build.device.type == "cuda" or (build.device.type == "meta" and build.layout.kernels.name == "triton")


class GroupedLinear(ShardedModule):
    """The same linears of every expert, on one input: gate and up, or down.

    Args:
        prefix: of the experts' module names, such as `layers.3.mlp.experts`.
        leaves: names of the linears, in the order of their rows.
        spec: shard of the weight of each.
        site: dropout site of the input.
        first_feature: the first of the input's features here.
        experts: of the layer, those on this rank.
        num_experts: of the layer, on all ranks.
        bias: every expert's linears have one.
        fused: name of the one adapter that may stand over all leaves.

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
        experts: range,
        num_experts: int,
        bias: bool = False,
        fused: str | None = None,
        build: LayerContext,
    ) -> None:
        super().__init__()
        self._prefix, self._names, self._spec, self._build = prefix, leaves, spec, build
        self._experts, self._num_experts = experts, num_experts
        rows, self._in = spec.local_shape
        adapters = expert_adapters(prefix, leaves, spec, fused, num_experts, build.plan)
        rank = sum(adapter.rank for adapter in adapters)
        padded = -(-rank // GROUPED_MULTIPLE) * GROUPED_MULTIPLE
        self.encoded = self._encode()
        self._sharing = sharing(build.plan.experts, reads_stream=spec.dim == 0)
        apart = self._sharing.b or not build.layout.fold
        beside = 0 if apart else padded
        holder = build if self.encoded is None else replace(build, device=torch.device("meta"))
        self.storage = holder.empty((len(experts), rows * len(leaves), self._in + beside))
        self.check_products(build.device.type)
        blocks: Blocks = ()
        if self.encoded is None:
            # views of all experts at once, taken apart: one after the other they take the host longer
            parts = [
                self.storage[:, index * rows : (index + 1) * rows, : self._in].unbind() for index in range(len(leaves))
            ]
            weights = zip(self._experts, zip(*parts, strict=True), strict=True)
            blocks = tuple(self._own_parts("weight", expert, own, spec) for expert, own in weights)
        bias_EO: Tensor | None = None
        bias_blocks: Blocks = ()
        if bias:
            bias_EO = build.empty((len(experts), rows * len(leaves)))
            biases, bias_spec = zip(self._experts, bias_EO, strict=True), self._bias_spec()
            bias_blocks = tuple(self._own_parts("bias", expert, own.split(rows), bias_spec) for expert, own in biases)
        self.trained: list[ShardEntry] = [entry for entry in self.entries if entry.sink is not None]
        low_rank, b_EOR = None, self.storage[..., self._in :]
        if self.encoded is not None or (apart and not self._sharing.b):
            b_EOR = build.factor((*self.storage.shape[:2], beside if self._sharing.b else padded))
        if adapters:
            low_rank = self._build_adapters(adapters, b_EOR, padded, site, first_feature, apart=apart)
        trains = any(build.plan.trains(f"{prefix}.{expert}.{leaf}") for expert in range(num_experts) for leaf in leaves)
        self._stands_in = not self.trained and (bool(adapters) or trains)
        self.operands = GroupedOperands(
            extended_EOI=self.storage,
            in_features=self._in,
            weight_blocks=blocks,
            low_rank=low_rank,
            kernels=build.layout.kernels,
            bias_EO=bias_EO,
            bias_blocks=bias_blocks if any(bias_blocks) else (),
            adds_bias=spec.dim == 0 or build.layout.expert_axes.tp.rank == 0,
            encoded=self._decoded_operand(b_EOR if beside else None),
            grouped=grouped_kernels(
                build.layout.kernels,
                dtype=build.dtype,
                narrowest=min(self._in, rows * len(leaves)),
                shapes=build.device.type == "meta",
            ),
        )

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Every tensor that trains; of other ranks' experts a stand-in, since all have to go through backward."""
        if self._stands_in:
            return (torch.zeros(0, requires_grad=True),)
        return tuple(entry.parameter for entry in self.trained)

    @property
    def shape(self) -> LinearShape:
        """The sizes of the linears of all experts, as if their outputs were one's."""
        count, outputs, columns = self.storage.shape
        blocks = [block for own in self.operands.weight_blocks for block in own]
        return LinearShape(
            inputs=self._in,
            outputs=count * outputs,
            extra=columns - self._in,
            trained_rows=tuple(block.rows.stop - block.rows.start for block in blocks),
        )

    def _encode(self) -> EncodedStorage | None:
        """Returns where the weights are stored encoded; None where one of the layer's trains, on whichever rank it is:
        what is encoded does not depend on the layout."""
        layout, leaves = self._build.layout, self._names
        everywhere = [f"{self._prefix}.{expert}.{leaf}" for expert in range(self._num_experts) for leaf in leaves]
        if layout.base is None or any(map(self._build.plan.trains, everywhere)):
            return None
        sections = [(f"{self._prefix}.{expert}.{leaf}", self._spec) for expert in self._experts for leaf in leaves]
        base = layout.base
        return self._build.once(
            lambda: EncodedStorage(sections, base, tp=layout.expert_axes.tp, device=self._build.device)
        )

    def _decoded_operand(self, b_EOR: Tensor | None) -> EncodedExperts | None:
        base = self._build.layout.base
        if self.encoded is None or base is None:
            return None
        experts = EncodedExperts(
            weight=self.encoded.weight,
            num_experts=len(self._experts),
            b_EOR=b_EOR,
            dtype=self._build.dtype,
            scratch=base.scratch,
        )
        experts.announce(together=_is_gpu(self._build))
        return experts

    def check_products(self, device_type: str) -> None:
        """Checks what torch's grouped product takes on a GPU; a CPU's takes everything.

        Raises:
            UserError: another dtype, or a number of features.
        """
        if device_type != "cuda":
            return
        if self._build.dtype != torch.bfloat16:
            raise UserError(
                "the model has experts that a router chooses, whose products a GPU has in bfloat16 alone: set "
                "model.dtype to bfloat16."
            )
        for size in (self.storage.shape[1], self._in):
            if size % GROUPED_MULTIPLE:
                raise UserError(
                    f"{self._prefix} has linears of {size} features on a rank, but products of experts on a GPU need a "
                    f"multiple of {GROUPED_MULTIPLE}: use a parallel.tensor that leaves one."
                )

    def _own_parts(self, kind: str, expert: int, parts: Sequence[Tensor], spec: ShardSpec) -> tuple[GradientBlock, ...]:
        """Takes a weight or a bias for each linear of an expert."""
        blocks, rows = [], self._spec.local_shape[0]
        for index, (leaf, part) in enumerate(zip(self._names, parts, strict=True)):
            module = f"{self._prefix}.{expert}.{leaf}"
            entry = self.own(f"{module}.{kind}", part, spec, trainable=self._build.plan.trains(module))
            if entry.sink is not None:
                blocks.append(GradientBlock(entry.sink, slice(index * rows, (index + 1) * rows), _ALL))
        return tuple(blocks)

    def _bias_spec(self) -> ShardSpec:
        """Returns the shard of a bias: cut as the rows of its weight, or whole, where one rank's output has it."""
        outputs = (self._spec.global_shape[0],)
        if self._spec.dim == 0:
            return replace(self._spec, global_shape=outputs, local_shape=self._spec.local_shape[:1])
        return self._whole_spec(outputs)

    def _whole_spec(self, shape: tuple[int, ...]) -> ShardSpec:
        """Returns the shard of what every tensor rank has whole, beside weights that are cut."""
        tp = self._build.layout.expert_axes.tp
        return replace(replicated_spec(shape, rank=tp.rank, size=tp.size, grad_reduce=("tp",)), data=self._spec.data)

    def _build_adapters(
        self, adapters: list[ExpertAdapter], b_EOR: Tensor, padded: int, site: int, first_feature: int, *, apart: bool
    ) -> GroupedLowRank:
        """Makes A as rows of one stacked tensor; B as columns of another, of the storage where it is not apart, or one
        matrix where experts share it."""
        shares, build, count = self._sharing, self._build, len(self._experts)
        stacked = build.factor((padded, self._in) if shares.a else (count, padded, self._in))
        b_shared = build.factor((self.storage.shape[1], padded)) if shares.b else None
        a_blocks: list[list[GradientBlock]] = [[] for _ in range(1 if shares.a else count)]
        b_blocks: list[list[GradientBlock]] = [[] for _ in range(1 if shares.b else count)]
        places, first = [], 0
        scales = torch.zeros(count, padded, dtype=torch.float32)
        for adapter in adapters:
            rows, common = adapter.rows, slice(first, first + adapter.rank)
            places.append(
                AdapterPlace(
                    first_column=rows.start,
                    num_columns=rows.stop - rows.start,
                    first_row=first,
                    num_ranks=adapter.rank,
                    scale=adapter.present[0].scale,
                )
            )
            shared = f"{self._prefix}.{adapter.leaf}"
            common_a, common_b = self._common_specs(adapter.spec, adapter.rank)
            a_E = () if shares.a else stacked[:, common].unbind()
            b_E = () if shares.b else b_EOR[:, rows, common].unbind()
            if shares.a:
                self._own_factor(f"{shared}.lora_A", stacked[common], common_a, a_blocks[0], common, _ALL)
            for place, expert in enumerate(self._experts):
                settings = adapter.settings[expert]
                if settings is None:
                    continue
                scales[place, common] = settings.scale
                module, ranks = f"{self._prefix}.{expert}.{adapter.leaf}", slice(first, first + settings.rank)
                spec_a, spec_b = self._factor_specs(adapter.spec, settings.rank)
                if not shares.a:
                    a = a_E[place] if settings.rank == adapter.rank else a_E[place][: settings.rank]
                    self._own_factor(f"{module}.lora_A", a, spec_a, a_blocks[place], ranks, _ALL)
                if not shares.b:
                    b = b_E[place] if settings.rank == adapter.rank else b_E[place][:, : settings.rank]
                    self._own_factor(f"{module}.lora_B", b, spec_b, b_blocks[place], rows, ranks)
            if b_shared is not None:
                self._own_factor(f"{shared}.lora_B", b_shared[rows, common], common_b, b_blocks[0], rows, common)
            first += adapter.rank
        differ = len({one.scale for adapter in adapters for one in adapter.present}) > 1
        dropout = None
        if (probability := adapters[0].present[0].dropout) > 0:
            dropout = DropoutSite(
                probability=probability, seed=build.plan.seed, site=site, feature_offset=first_feature
            )
        return GroupedLowRank(
            a_ERI=stacked,
            b_OR=b_shared,
            b_EOR=b_EOR if apart and not shares.b else None,
            places=tuple(places),
            scales_ER=scales.to(build.device) if differ else None,
            a_blocks=tuple(map(tuple, a_blocks)),
            b_blocks=tuple(map(tuple, b_blocks)),
            dropout=dropout,
        )

    def _own_factor(
        self, name: str, tensor: Tensor, spec: ShardSpec, blocks: list[GradientBlock], rows: slice, columns: slice
    ) -> None:
        """Owns a factor, whose gradient is these rows and columns of what its operand's product gives."""
        entry = self.own(name, tensor, spec, trainable=True)
        assert entry.sink is not None
        self.trained.append(entry)
        blocks.append(GradientBlock(entry.sink, rows, columns))

    def _factor_specs(self, spec: ShardSpec, rank: int) -> tuple[ShardSpec, ShardSpec]:
        """Returns the shards of A and B: one is cut as the weight, the gradient of the other is a partial sum."""
        outputs, inputs = spec.global_shape
        if spec.dim == 0:
            cut = replace(spec, global_shape=(outputs, rank), local_shape=(spec.local_shape[0], rank))
            return self._whole_spec((rank, inputs)), cut
        cut = replace(spec, global_shape=(rank, inputs), local_shape=(rank, spec.local_shape[1]))
        return cut, self._whole_spec((outputs, rank))

    def _common_specs(self, spec: ShardSpec, rank: int) -> tuple[ShardSpec, ShardSpec]:
        """Returns the shards of A and B that all experts share: every rank of the data has rows for them, and every
        tensor rank too where these have whole experts."""
        tp, cuts = self._build.layout.tp, self._build.layout.expert_axes.tp.size > 1

        def common(one: ShardSpec) -> ShardSpec:
            if one.dim is not None and cuts:
                return replace(one, data="dp_cp")
            return replicated_spec(one.global_shape, rank=tp.rank, size=tp.size, grad_reduce=("tp",))

        spec_a, spec_b = self._factor_specs(spec, rank)
        return common(spec_a), common(spec_b)


class _TokenWeight(ShardedModule):
    """A small matrix that every rank has whole: the gate's of the shared expert.

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


class RoutedMLP(Branch):
    """The experts that the router chooses for each token and, in some families, one that all tokens share.

    u: [T, hidden] (or [T / tp, hidden]), from which x is made -> the same shape.

    Args:
        prefix: engine module name, such as `layers.3.mlp`.
        sizes: of the mixture.
        hidden: features of the residual stream.
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
        self._loops = not _is_gpu(build)
        inner = deferred_sums(build)
        self.router = Router(f"{prefix}.router", rule, hidden, site=shared_site + 2, build=inner)
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
        self._gated: LinearInput = INPUTS[sizes.activation]
        if sizes.clamp is not None:
            self._gated = ClampedGLUInput(alpha=sizes.clamp[0], limit=sizes.clamp[1])
        self.shared: MLP | None = None
        self.shared_gate: _TokenWeight | None = None
        if sizes.shared:
            self.shared = MLP(
                f"{prefix}.shared_expert",
                hidden=hidden,
                intermediate=sizes.shared,
                bias=False,
                first_site=shared_site,
                activation=sizes.activation,
                build=build if self.routes_local_tokens else inner,
            )
            if sizes.gates_shared:
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
            shared = torch.sigmoid(self.shared_gate(x)) * shared
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
        local = replace(context, token_index=index)
        routed, link = self._dispatch(own, local)
        gate = None if self.shared_gate is None else torch.sigmoid(self.shared_gate(own))
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
        balance = context.part(LoadBalance)
        # of a step's own pass: not one for counting before it, nor a part that backward runs again
        if context.training and not context.repeats and (balance is None or not balance.counts_alone):
            ends = slots.groups.ends
            self.rows_E.add_(torch.diff(ends, prepend=ends.new_zeros(1)))
        exchange = plan_exchange(slots, self._ep, loops=self._loops)
        routed = RoutedPass(
            slots,
            self.gate_up.operands,
            self.down.operands,
            context,
            (*self.gate_up.leaves, *self.down.leaves),
            exchange,
            gated=self._gated,
            leaves_output=self.ends_region and context.repeats and not self._reads_output,
        )
        return routed, routed.dispatch(self.experts_input(x, context), weights)

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
