"""Parallel linears that own their storage.

A module may hold several logical linears on one input (q, k, v; gate, up) as row sections of one storage tensor, so
that one matrix product serves them all. Each section is a parameter of its own, a view of the storage, with its own
name, shard and adapter. The adapters' A are rows of one stacked tensor for the same reason.

The storage of a linear whose adapters are folded has further columns, [W | B]: each section's B lies beside its own
rows of W, and B is a view of those columns. So only `weight_view` may be used to read the base.

Where the run stores its base encoded, a linear none of whose sections trains, and all of whose sections have the same
encoding, has no storage: its sections' parts lie in an `EncodedStorage`, and [W | B] exists while a product runs (see
ops.encoded_weight).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.distributed.mesh import Axis
from engine.distributed.sharding import Piece, ShardSpec, replicated_spec, split_spec
from engine.errors import UserError
from engine.layers.branch import Around, LinearShape
from engine.layers.context import AdapterSettings, LayerContext, TrainingPlan
from engine.layers.encoded_storage import EncodedStorage
from engine.layers.module import AdaptedModule, ShardEntry
from engine.ops.adapters import Adapter, LowRank
from engine.ops.attention.token_context import TokenContext
from engine.ops.dropout import DropoutSite
from engine.ops.encoded_weight import EncodedWeight
from engine.ops.inputs import LinearInput
from engine.ops.magnitude import AdapterBias, Magnitude, biased_output, scaled_output
from engine.ops.merged_weight import MergedLowRank
from engine.ops.operands import LinearOperands, RowsSink, Way
from engine.ops.parallel_linear import column_linear, row_linear
from engine.ops.products import FOLDED, JOINED, SEPARATE


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One logical linear's output rows.

    Args:
        name: engine module name.
        spec: shard of its [out, in] weight, split along dim 0 (or replicated over some of the ranks).
    """

    name: str
    spec: ShardSpec

    @property
    def rows(self) -> int:
        return self.spec.local_shape[0]


_Adapted = tuple[Section, AdapterSettings, int]
"""A section that has an adapter, the adapter's settings, and the section's first output row here."""


class _ParallelLinear(AdaptedModule):
    """Storage, bias and adapters common to both directions.

    Args:
        sections: the logical linears, in output order.
        adaptable: the same rows as adapters may stand over them: each section, or all of them as one.
        bias: whether they have biases.
        site: dropout site of the common input.
        first_feature: the first of the input's features here.
        joint: see LinearOperands.
        may_fold: whether the layout allows that B lies beside W.
        shared: take the weight from this entry instead of owning one.
    """

    def __init__(
        self,
        sections: list[Section],
        *,
        adaptable: list[Section],
        bias: bool,
        site: int,
        first_feature: int = 0,
        joint: bool,
        may_fold: bool,
        build: LayerContext,
        shared: ShardEntry | None = None,
    ) -> None:
        super().__init__()
        layout = build.layout
        self.build = build
        self.in_features = sections[0].spec.local_shape[1]
        self._sinks: list[RowsSink] = []
        self._leaves: list[Tensor] = []
        self._magnitude_leaves: list[Tensor] = []
        self._bias_leaves: list[Tensor] = []
        rows = sum(section.rows for section in sections)
        adapted = _adapted(adaptable, build.plan)
        rank = sum(settings.rank for _, settings, _ in adapted)
        self.encoded = self._encode(sections) if shared is None else None
        merges = build.plan.merge_aware and self.encoded is not None and bool(adapted)
        may_fold = may_fold and (self.encoded is None or self.encoded.may_fold) and not merges
        may_fold = may_fold and layout.fold and shared is None
        forward_way, backward_way = self._ways(rows, adapted=bool(adapted), may_fold=may_fold)
        folded = FOLDED in (forward_way, backward_way)
        multiple = layout.kernels.fold_multiple
        extra = -(-rank // multiple) * multiple if folded else 0
        self.bias_storage = build.empty((rows,)) if bias else None
        if shared is None:
            holder = build if self.encoded is None else replace(build, device=torch.device("meta"))
            self.storage = holder.empty((rows, self.in_features + extra))
        else:
            self._share(shared, sections[0])
        first = 0
        for section in sections:
            if shared is None:
                self._own_section(section, first)
            first += section.rows
        low_rank = self._build_adapters(adapted, rank, site, first_feature, folded=folded, merges=merges)
        adapters = () if low_rank is None else low_rank.adapters
        self.magnitudes = self._build_magnitudes(adapted, adapters)
        self._adapter_biases = self._build_adapter_biases(adapted, adapters)
        self.operands = LinearOperands(
            extended_OE=self.storage,
            in_features=self.in_features,
            bias_O=None if self.magnitudes else self.bias_storage,
            low_rank=low_rank,
            forward_way=forward_way,
            backward_way=backward_way,
            sinks=tuple(self._sinks),
            axis=Axis(layout.tp.name) if build.defers_reduce else layout.tp,
            sequence_parallel=layout.sequence_parallel,
            joint=joint,
            kernels=layout.kernels,
            name=sections[0].name,
            encoded=self._encoded_operand(low_rank, extra),
        )

    def _encode(self, sections: list[Section]) -> EncodedStorage | None:
        """Returns where the weights are stored encoded; None where one trains, or their encodings differ."""
        base, build = self.build.layout.base, self.build
        if base is None or any(build.plan.trains(section.name) for section in sections):
            return None
        if (encoding := base.common([f"{section.name}.weight" for section in sections])) is None:
            return None
        weights = [(section.name, section.spec) for section in sections]
        return build.once(
            lambda: EncodedStorage(
                weights, encoding, base, tp=build.layout.tp, device=build.device, rounds_inputs=base.rounds_inputs
            )
        )

    def _encoded_operand(self, low_rank: LowRank | None, extra: int) -> EncodedWeight | None:
        """Returns what products read where the base is stored encoded.

        Args:
            extra: the columns of folded adapters.
        """
        if self.encoded is None:
            return None
        if isinstance(low_rank, MergedLowRank):
            return self.encoded.merged_operand(self.build.dtype, low_rank.factors())
        return self.encoded.operand(self.build.dtype, extra)

    def _ways(self, rows: int, *, adapted: bool, may_fold: bool) -> tuple[Way, Way]:
        """Returns how base and adapters are multiplied, forward and backward."""
        if not adapted:
            return SEPARATE, SEPARATE
        kernels = self.build.layout.kernels
        other: Way = JOINED if kernels.adapted is not None and self.encoded is None else SEPARATE
        if not may_fold:
            return other, other
        forward, backward = kernels.folds(self.in_features, rows, self.build.dtype)
        return FOLDED if forward else other, FOLDED if backward else other

    def weight_view(self) -> Tensor:
        """Returns the base weight [O, I] of all sections without anything else the storage holds; on the meta device
        where it is encoded."""
        return self.storage[:, : self.in_features]

    def wrapped(self, around: Around) -> nn.Module:
        """Returns what takes the linear's place."""
        return around(self)

    @property
    def shapes(self) -> tuple[LinearShape, ...]:
        """The linear's sizes on this rank."""
        outputs, columns = self.operands.extended_OE.shape
        return (
            LinearShape(
                inputs=self.in_features,
                outputs=outputs,
                extra=columns - self.in_features,
                trained_rows=tuple(sink.count for sink in self._sinks if sink.weight is not None),
                encoding=None if self.encoded is None else self.encoded.weight.encoding.name,
                is_decoded=self.encoded is not None and self.encoded.is_decoded,
            ),
        )

    @property
    def trained_leaves(self) -> tuple[Tensor, ...]:
        """The trained tensors of the linear itself."""
        return tuple(self._leaves)

    def leaves(self, source: LinearInput) -> tuple[Tensor, ...]:
        """Returns every trainable tensor that the output depends on."""
        return (*self._leaves, *source.leaves())

    def _bias_spec(self, spec: ShardSpec) -> ShardSpec:
        """Returns the shard of what has one number for each row of a weight with `spec`."""
        raise NotImplementedError

    def _factor_specs(self, spec: ShardSpec, rank: int) -> tuple[ShardSpec, ShardSpec]:
        """Returns the shards of A and of B, of an adapter over the rows of a weight with `spec`."""
        raise NotImplementedError

    def _own_rows(self, section: Section, leaf: str) -> ShardEntry:
        """Makes a trained number for each output row of an adapter."""
        storage = self.build.factor((section.rows,))
        return self.own(f"{section.name}.{leaf}", storage, self._bias_spec(section.spec), trainable=True)

    def _build_magnitudes(self, adapted: list[_Adapted], adapters: tuple[Adapter, ...]) -> tuple[Magnitude, ...]:
        """Makes the trained lengths of output rows, of the adapters that have them."""
        magnitudes = []
        for (section, settings, _), adapter in zip(adapted, adapters, strict=True):
            if settings.dora:
                if self.encoded is not None:
                    raise UserError(
                        f"the adapter of {section.name} is DoRA's, which needs the lengths of the base's rows, and "
                        "these are not known of weights that are stored encoded: leave the base's encoding out."
                    )
                entry = self._own_rows(section, "lora_magnitude")
                magnitudes.append(Magnitude(m_O=entry.parameter.data, adapter=adapter, sink=entry.sink))
                self._magnitude_leaves.append(entry.parameter)
        return tuple(magnitudes)

    def _build_adapter_biases(self, adapted: list[_Adapted], adapters: tuple[Adapter, ...]) -> tuple[AdapterBias, ...]:
        """Makes the trained biases of adapters, of those that have them."""
        biases = []
        for (section, settings, _), adapter in zip(adapted, adapters, strict=True):
            if settings.bias:
                entry = self._own_rows(section, "lora_bias")
                biases.append(AdapterBias(b_O=entry.parameter.data, adapter=adapter, sink=entry.sink))
                self._bias_leaves.append(entry.parameter)
        return tuple(biases)

    def _finish(self, y_TO: Tensor, context: TokenContext, *, split_inputs: bool, divisor: float = 1.0) -> Tensor:
        """Returns the output, for what the product gave: a linear with magnitudes adds its bias after them."""
        if self._adapter_biases:
            return biased_output(y_TO, self._adapter_biases, context, tuple(self._bias_leaves), divisor)
        if not self.magnitudes:
            return y_TO
        leaves = tuple(self._magnitude_leaves)
        y = scaled_output(y_TO, self.operands, self.magnitudes, context, leaves, split_inputs=split_inputs)
        return y if self.bias_storage is None else y + self.bias_storage

    def _share(self, shared: ShardEntry, section: Section) -> None:
        self.storage = shared.parameter.data
        bias = None
        if self.bias_storage is not None:
            spec, trains = self._bias_spec(section.spec), self.build.plan.trains(section.name)
            bias = self.own(f"{section.name}.bias", self.bias_storage, spec, trainable=trains)
            self._leaves.append(bias.parameter)
        if shared.sink is not None:
            shared.sink.uses += 1
            sink = None if bias is None else bias.sink
            self._sinks.append(RowsSink(first=0, count=section.rows, weight=shared.sink, bias=sink))
            self._leaves.append(shared.parameter)

    def _own_section(self, section: Section, first: int) -> None:
        trains = self.build.plan.trains(section.name)
        rows = slice(first, first + section.rows)
        weight = bias = None
        if self.encoded is None:
            weight = self.own(f"{section.name}.weight", self.weight_view()[rows], section.spec, trainable=trains)
        if self.bias_storage is not None:
            spec = self._bias_spec(section.spec)
            bias = self.own(f"{section.name}.bias", self.bias_storage[rows], spec, trainable=trains)
        if trains and weight is not None:
            bias_sink = bias.sink if bias is not None else None
            self._sinks.append(RowsSink(first=first, count=section.rows, weight=weight.sink, bias=bias_sink))
            self._leaves.extend(entry.parameter for entry in (weight, bias) if entry is not None)

    def _build_adapters(
        self, adapted: list[_Adapted], total_rank: int, site: int, first_feature: int, *, folded: bool, merges: bool
    ) -> LowRank | None:
        """Makes A as rows of one stacked tensor; B as columns of the storage where folded, if there is one.

        Args:
            merges: the base takes the adapters before it is rounded.
        """
        if not adapted:
            return None
        stacked = self.build.factor((total_rank, self.in_features))
        adapters, first = [], 0
        for section, settings, first_column in adapted:
            rank = settings.rank
            spec_a, spec_b = self._factor_specs(section.spec, rank)
            if folded and self.encoded is None:
                columns = slice(self.in_features + first, self.in_features + first + rank)
                b_storage = self.storage[first_column : first_column + section.rows, columns]
            else:
                b_storage = self.build.factor(spec_b.local_shape)
            a = self.own(f"{section.name}.lora_A", stacked[first : first + rank], spec_a, trainable=True)
            b = self.own(f"{section.name}.lora_B", b_storage, spec_b, trainable=True)
            self._leaves.extend((a.parameter, b.parameter))
            adapters.append(
                Adapter(
                    b_OR=b_storage,
                    first_column=first_column,
                    num_columns=section.rows,
                    first_row=first,
                    num_ranks=rank,
                    scale=settings.scale,
                    sink_a=a.sink,
                    sink_b=b.sink,
                )
            )
            first += rank
        dropout = None
        if (probability := adapted[0][1].dropout) > 0:  # all adapters on an input drop with one probability
            seed = self.build.plan.seed
            dropout = DropoutSite(probability=probability, seed=seed, site=site, feature_offset=first_feature)
        return (MergedLowRank if merges else LowRank)(a_RI=stacked, adapters=tuple(adapters), dropout=dropout)


def _adapted(sections: list[Section], plan: TrainingPlan) -> list[_Adapted]:
    """Returns the sections that have an adapter, which take their output rows one after the other."""
    found, first = [], 0
    for section in sections:
        if (settings := plan.adapter(section.name)) is not None:
            found.append((section, settings, first))
        first += section.rows
    return found


def _with_columns(spec: ShardSpec, columns: int) -> ShardSpec:
    """Returns the spec of [O, columns] whose rows lie as those of `spec`."""
    return replace(spec, global_shape=(spec.global_shape[0], columns), local_shape=(spec.local_shape[0], columns))


def concatenated(sections: list[Section], name: str) -> Section:
    """Joins the rows of row-split sections, one after the other, as one: its spec has one piece for each section."""
    pieces: tuple[Piece, ...] = ()
    global_rows = local_rows = 0
    for spec in (section.spec for section in sections):
        held = spec.pieces if spec.dim is not None else (Piece(0, 0, spec.local_shape[0]),)
        pieces += tuple(Piece(global_rows + p.global_offset, local_rows + p.local_offset, p.length) for p in held)
        global_rows += spec.global_shape[0]
        local_rows += spec.local_shape[0]
    columns = sections[0].spec.local_shape[1]
    spec = ShardSpec(global_shape=(global_rows, columns), local_shape=(local_rows, columns), dim=0, pieces=pieces)
    return Section(name=name, spec=spec)


class ColumnParallelLinear(_ParallelLinear):
    """Linears whose output rows are split over tp: x [T, I] (or [T / tp, I]) -> [T, O / tp].

    Args:
        sections: the logical linears, in output order.
        bias: whether they have biases.
        site: dropout site of the common input.
        fused_adapter: module name of the one adapter over all sections, where the plan fuses them.
        shared: take the weight from this entry (a tied embedding) instead of owning one.
    """

    def __init__(
        self,
        sections: list[Section],
        *,
        bias: bool,
        site: int,
        build: LayerContext,
        fused_adapter: str | None = None,
        shared: ShardEntry | None = None,
    ) -> None:
        layout = build.layout
        joint = layout.joint_reduce and not layout.splits_tokens
        whole = None if fused_adapter is None or not build.plan.fused(fused_adapter) else fused_adapter
        super().__init__(
            sections,
            adaptable=sections if whole is None else [concatenated(sections, whole)],
            bias=bias,
            site=site,
            joint=joint,
            may_fold=joint or layout.splits_tokens or build.defers_reduce or layout.tp.size == 1,
            build=build,
            shared=shared,
        )

    def _bias_spec(self, spec: ShardSpec) -> ShardSpec:
        return replace(spec, global_shape=spec.global_shape[:1], local_shape=spec.local_shape[:1])

    def _factor_specs(self, spec: ShardSpec, rank: int) -> tuple[ShardSpec, ShardSpec]:
        """A is whole on every rank; see the table in ops.parallel_linear."""
        layout = self.build.layout
        complete = layout.joint_reduce and not layout.splits_tokens
        spec_a = replicated_spec(
            (rank, self.in_features),
            rank=layout.tp.rank,
            size=layout.tp.size,
            grad_reduce=() if complete else ("tp",),
        )
        return spec_a, _with_columns(spec, rank)

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext, *, output_divisor: float = 1.0) -> Tensor:
        """Returns [T, O / tp].

        Args:
            output_divisor: the output is divided by it. `source` has divided what it can: all but adapters' biases.
        """
        y = column_linear(u, source, self.operands, context, self.leaves(source))
        return self._finish(y, context, split_inputs=False, divisor=output_divisor)


class RowParallelLinear(_ParallelLinear):
    """A linear whose input features are split over tp: x [T, I / tp] -> [T, O] (or [T / tp, O]).

    Args:
        name: engine module name.
        in_features, out_features: global sizes.
        site: dropout site of its input.
    """

    def __init__(
        self, name: str, in_features: int, out_features: int, *, bias: bool, site: int, build: LayerContext
    ) -> None:
        tp = build.layout.tp
        spec = split_spec((out_features, in_features), 1, rank=tp.rank, size=tp.size, what=f"the input width of {name}")
        sections = [Section(name=name, spec=spec)]
        super().__init__(
            sections,
            adaptable=sections,
            bias=bias,
            site=site,
            first_feature=tp.rank * spec.local_shape[1],
            joint=False,
            may_fold=True,
            build=build,
        )
        if build.defers_reduce and tp.size > 1:
            self._check_partial_output(name, bias=bias)

    def _check_partial_output(self, name: str, *, bias: bool) -> None:
        """Checks that nothing is done with the output that only its sum over tensor ranks allows."""
        assert not bias, name
        for option, built in (("dora", self.magnitudes), ("bias", self._adapter_biases)):
            if built:
                raise UserError(
                    f"lora.{option} is true and {name} is to have an adapter, but it is one of several experts, "
                    f"whose outputs are summed together over parallel.tensor {self.build.layout.tp.size}: set "
                    f"lora.{option} to false, leave that module out of lora.targets, or set parallel.tensor to 1."
                )

    def _bias_spec(self, spec: ShardSpec) -> ShardSpec:
        return replicated_spec(
            spec.global_shape[:1],
            rank=self.build.layout.tp.rank,
            size=self.build.layout.tp.size,
            grad_reduce=("tp",) if self.build.layout.splits_tokens else (),
        )

    def _factor_specs(self, spec: ShardSpec, rank: int) -> tuple[ShardSpec, ShardSpec]:
        tp, (out_features, in_features) = self.build.layout.tp, spec.global_shape
        spec_a = split_spec((rank, in_features), 1, rank=tp.rank, size=tp.size, what="lora_A")
        spec_b = replicated_spec((out_features, rank), rank=tp.rank, size=tp.size, grad_reduce=("tp",))
        return spec_a, spec_b

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        y = row_linear(u, source, self.operands, context, self.leaves(source))
        return self._finish(y, context, split_inputs=True)
