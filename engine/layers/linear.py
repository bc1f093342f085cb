"""Parallel linears that own their storage.

A module may hold several logical linears on one input (q, k, v; gate, up) as row sections of one storage tensor, so
that one matrix product serves them all. Each section is a parameter of its own, a view of the storage, with its own
name, shard and adapter. The adapters' A are rows of one stacked tensor for the same reason.

The storage of a linear whose adapters are folded has further columns, [W | B]: each section's B lies beside its own
rows of W, and B is a view of those columns. So only `weight_view` may be used to read the base.

Where the run stores its base encoded, a linear none of whose sections trains has no storage: its sections' parts lie
in an `EncodedStorage`, and [W | B] exists while a product runs (see ops.encoded_weight).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.distributed.sharding import Piece, ShardSpec, replicated_spec, split_spec
from engine.errors import UserError
from engine.layers.context import AdapterSettings, LayerContext, TensorLayout, TrainingPlan
from engine.layers.encoded_storage import EncodedStorage
from engine.layers.module import ShardedModule, ShardEntry
from engine.ops.adapters import Adapter, LowRank
from engine.ops.attention.token_context import TokenContext
from engine.ops.dropout import DropoutSite
from engine.ops.inputs import LinearInput
from engine.ops.magnitude import AdapterBias, Magnitude, biased_output, scaled_output
from engine.ops.operands import LinearOperands, RowsSink
from engine.ops.parallel_linear import column_linear, row_linear
from engine.ops.products import FOLDED, JOINED, SEPARATE, Way

FOLD_MULTIPLE = 8
"""Columns added to a weight are padded to a multiple of this: the matrix units' alignment."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _AdapterSlot:
    """An adapter to be built: its name, settings, output rows here, and the specs of both factors."""

    name: str
    settings: AdapterSettings
    first_row: int
    spec_a: ShardSpec
    spec_b: ShardSpec


class _ParallelLinear(ShardedModule):
    """Storage, bias and adapters common to both directions."""

    def __init__(
        self,
        sections: list[Section],
        slots: list[_AdapterSlot],
        *,
        bias: bool,
        joint: bool,
        may_fold: bool,
        dropout: DropoutSite | None,
        build: LayerContext,
        shared: ShardEntry | None = None,
    ) -> None:
        super().__init__()
        layout, plan, device = build.layout, build.plan, build.device
        self.build = build
        self.in_features = sections[0].spec.local_shape[1]
        self._sinks: list[RowsSink] = []
        self._leaves: list[Tensor] = []
        self._magnitude_leaves: list[Tensor] = []
        self._bias_leaves: list[Tensor] = []
        rows = sum(section.rows for section in sections)
        rank = sum(slot.settings.rank for slot in slots)
        self.encoded = None
        if layout.base is not None and shared is None and not any(plan.trains(section.name) for section in sections):
            weights = [(section.name, section.spec) for section in sections]
            self.encoded = EncodedStorage(weights, layout.base, tp=layout.tp, device=device)
            may_fold = may_fold and self.encoded.weight.is_decoded
        may_fold = may_fold and layout.fold and shared is None
        forward_way, backward_way = self._ways(rows, adapted=bool(slots), may_fold=may_fold)
        folded = FOLDED in (forward_way, backward_way)
        extra = -(-rank // FOLD_MULTIPLE) * FOLD_MULTIPLE if folded else 0
        if shared is None:
            holder = build if self.encoded is None else replace(build, device=torch.device("meta"))
            self.storage = holder.empty((rows, self.in_features + extra))
        else:
            self._share(shared, rows)
        self.bias_storage = build.empty((rows,)) if bias else None
        first = 0
        for section in sections:
            if shared is None:
                self._own_section(section, first)
            first += section.rows
        low_rank = self._build_adapters(slots, rank, dropout, folded=folded)
        self.magnitudes = self._build_magnitudes(slots, low_rank)
        self._adapter_biases = self._build_adapter_biases(slots, low_rank)
        self.operands = LinearOperands(
            extended_OE=self.storage,
            in_features=self.in_features,
            bias_O=None if self.magnitudes else self.bias_storage,
            low_rank=low_rank,
            forward_way=forward_way,
            backward_way=backward_way,
            sinks=tuple(self._sinks),
            axis=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            joint=joint,
            kernels=layout.kernels,
            encoded=self.encoded.operand(build.dtype, extra) if self.encoded is not None else None,
        )

    def _ways(self, rows: int, *, adapted: bool, may_fold: bool) -> tuple[Way, Way]:
        """How base and adapters are multiplied, forward and backward."""
        if not adapted:
            return SEPARATE, SEPARATE
        kernels = self.build.layout.kernels
        other: Way = JOINED if kernels.adapted is not None and self.encoded is None else SEPARATE
        if not may_fold:
            return other, other
        forward, backward = kernels.folds(self.in_features, rows, self.build.dtype)
        return FOLDED if forward else other, FOLDED if backward else other

    def weight_view(self) -> Tensor:
        """The base weight [O, I] of all sections, without anything else the storage holds; on the meta device where
        it is encoded."""
        return self.storage[:, : self.in_features]

    def leaves(self, source: LinearInput) -> tuple[Tensor, ...]:
        """Every trainable tensor that the output depends on."""
        return (*self._leaves, *source.leaves())

    def _bias_spec(self, spec: ShardSpec) -> ShardSpec:
        raise NotImplementedError

    def _build_magnitudes(self, slots: list[_AdapterSlot], low_rank: LowRank | None) -> tuple[Magnitude, ...]:
        """The trained lengths of output rows, of the adapters that have them."""
        if low_rank is None:
            return ()
        magnitudes = []
        for slot, adapter in zip(slots, low_rank.adapters, strict=True):
            if slot.settings.dora:
                if self.encoded is not None:
                    raise UserError(
                        f"the adapter of {slot.name} is DoRA's, which needs the lengths of the base's rows, and these "
                        "are not known of weights that are stored encoded: leave the base's encoding out."
                    )
                storage = self.build.empty(slot.spec_b.local_shape[:1])
                spec = self._bias_spec(slot.spec_b)
                entry = self.own(f"{slot.name}.lora_magnitude", storage, spec, trainable=True)
                magnitudes.append(Magnitude(m_O=storage, adapter=adapter, sink=entry.sink))
                self._magnitude_leaves.append(entry.parameter)
        return tuple(magnitudes)

    def _build_adapter_biases(self, slots: list[_AdapterSlot], low_rank: LowRank | None) -> tuple[AdapterBias, ...]:
        """The trained biases of adapters, of those that have them."""
        if low_rank is None:
            return ()
        biases = []
        for slot, adapter in zip(slots, low_rank.adapters, strict=True):
            if slot.settings.bias:
                storage = self.build.empty(slot.spec_b.local_shape[:1])
                entry = self.own(f"{slot.name}.lora_bias", storage, self._bias_spec(slot.spec_b), trainable=True)
                biases.append(AdapterBias(b_O=storage, adapter=adapter, sink=entry.sink))
                self._bias_leaves.append(entry.parameter)
        return tuple(biases)

    def _finish(self, y_TO: Tensor, context: TokenContext, *, split_inputs: bool) -> Tensor:
        """The output, for what the product gave: a linear with magnitudes adds its bias after them."""
        if self._adapter_biases:
            return biased_output(y_TO, self._adapter_biases, context, tuple(self._bias_leaves))
        if not self.magnitudes:
            return y_TO
        leaves = tuple(self._magnitude_leaves)
        y = scaled_output(y_TO, self.operands, self.magnitudes, context, leaves, split_inputs=split_inputs)
        return y if self.bias_storage is None else y + self.bias_storage

    def _share(self, shared: ShardEntry, rows: int) -> None:
        self.storage = shared.parameter.data
        if shared.sink is not None:
            shared.sink.uses += 1
            self._sinks.append(RowsSink(first=0, count=rows, weight=shared.sink, bias=None))
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
        self, slots: list[_AdapterSlot], total_rank: int, dropout: DropoutSite | None, *, folded: bool
    ) -> LowRank | None:
        """A as rows of one stacked tensor; B as columns of the storage where folded, if there is one."""
        if not slots:
            return None
        stacked = self.build.empty((total_rank, self.in_features))
        adapters, first = [], 0
        for slot in slots:
            rank, rows = slot.settings.rank, slot.spec_b.local_shape[0]
            if folded and self.encoded is None:
                columns = slice(self.in_features + first, self.in_features + first + rank)
                b_storage = self.storage[slot.first_row : slot.first_row + rows, columns]
            else:
                b_storage = self.build.empty(slot.spec_b.local_shape)
            a = self.own(f"{slot.name}.lora_A", stacked[first : first + rank], slot.spec_a, trainable=True)
            b = self.own(f"{slot.name}.lora_B", b_storage, slot.spec_b, trainable=True)
            self._leaves.extend((a.parameter, b.parameter))
            adapters.append(
                Adapter(
                    b_OR=b_storage,
                    first_column=slot.first_row,
                    first_row=first,
                    scale=slot.settings.scale,
                    sink_a=a.sink,
                    sink_b=b.sink,
                )
            )
            first += rank
        return LowRank(a_RI=stacked, adapters=tuple(adapters), dropout=dropout)


def _dropout_site(slots: list[_AdapterSlot], plan: TrainingPlan, site: int, feature_offset: int) -> DropoutSite | None:
    """The common input's mask; all adapters on an input drop with one probability."""
    if not slots or slots[0].settings.dropout == 0:
        return None
    probability = slots[0].settings.dropout
    return DropoutSite(probability=probability, seed=plan.seed, site=site, feature_offset=feature_offset)


def _with_columns(spec: ShardSpec, columns: int) -> ShardSpec:
    """The spec of [O, columns] whose rows lie as those of `spec`."""
    return replace(spec, global_shape=(spec.global_shape[0], columns), local_shape=(spec.local_shape[0], columns))


def _concatenated(sections: list[Section], columns: int) -> ShardSpec:
    """The spec of [O_1 + O_2 + ..., columns] stacked from row-split sections: one piece per section."""
    pieces, global_rows, local_rows = [], 0, 0
    for spec in (section.spec for section in sections):
        runs = spec.pieces if spec.dim is not None else (Piece(0, 0, spec.local_shape[0]),)
        pieces += [Piece(global_rows + p.global_offset, local_rows + p.local_offset, p.length) for p in runs]
        global_rows += spec.global_shape[0]
        local_rows += spec.local_shape[0]
    return ShardSpec(
        global_shape=(global_rows, columns), local_shape=(local_rows, columns), dim=0, pieces=tuple(pieces)
    )


def _spec_a(rank: int, in_features: int, layout: TensorLayout) -> ShardSpec:
    """A of a column linear: whole on every rank; see the table in ops.parallel_linear."""
    complete = layout.joint_reduce and not layout.splits_tokens
    return replicated_spec(
        (rank, in_features), rank=layout.tp.rank, size=layout.tp.size, grad_reduce=() if complete else ("tp",)
    )


def _column_slots(
    sections: list[Section], fused: str | None, layout: TensorLayout, plan: TrainingPlan
) -> list[_AdapterSlot]:
    """An adapter for each section that the plan gives one, or the one named `fused` over all of them."""
    in_features = sections[0].spec.local_shape[1]
    if fused is not None and plan.fused(fused):
        settings = plan.adapter(fused)
        candidates = [] if settings is None else [(fused, settings, 0, _concatenated(sections, settings.rank))]
    else:
        candidates, first = [], 0
        for section in sections:
            if (settings := plan.adapter(section.name)) is not None:
                candidates.append((section.name, settings, first, _with_columns(section.spec, settings.rank)))
            first += section.rows
    return [
        _AdapterSlot(
            name=name,
            settings=settings,
            first_row=first,
            spec_a=_spec_a(settings.rank, in_features, layout),
            spec_b=spec_b,
        )
        for name, settings, first, spec_b in candidates
    ]


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
        self, sections: list[Section], *, bias: bool, site: int, build: LayerContext,
        fused_adapter: str | None = None, shared: ShardEntry | None = None,
    ) -> None:  # fmt: skip
        layout, plan = build.layout, build.plan
        slots = _column_slots(sections, fused_adapter, layout, plan)
        joint = layout.joint_reduce and not layout.splits_tokens
        super().__init__(
            sections,
            slots,
            bias=bias,
            joint=joint,
            may_fold=joint or layout.splits_tokens or layout.tp.size == 1,
            dropout=_dropout_site(slots, plan, site, 0),
            build=build,
            shared=shared,
        )

    def _bias_spec(self, spec: ShardSpec) -> ShardSpec:
        return replace(spec, global_shape=spec.global_shape[:1], local_shape=spec.local_shape[:1])

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        y = column_linear(u, source, self.operands, context, self.leaves(source))
        return self._finish(y, context, split_inputs=False)


class RowParallelLinear(_ParallelLinear):
    """A linear whose input features are split over tp: x [T, I / tp] -> [T, O] (or [T / tp, O]).

    Args:
        name: engine module name.
        in_features, out_features: global sizes.
        site: dropout site of its input.
    """

    def __init__(
        self, name: str, in_features: int, out_features: int, *, bias: bool, site: int, build: LayerContext
    ) -> None:  # fmt: skip
        tp, plan = build.layout.tp, build.plan
        spec = split_spec((out_features, in_features), 1, rank=tp.rank, size=tp.size, what=f"the input width of {name}")
        slots = []
        if (settings := plan.adapter(name)) is not None:
            spec_a = split_spec((settings.rank, in_features), 1, rank=tp.rank, size=tp.size, what="lora_A")
            spec_b = replicated_spec((out_features, settings.rank), rank=tp.rank, size=tp.size, grad_reduce=("tp",))
            slots = [_AdapterSlot(name=name, settings=settings, first_row=0, spec_a=spec_a, spec_b=spec_b)]
        super().__init__(
            [Section(name=name, spec=spec)],
            slots,
            bias=bias,
            joint=False,
            may_fold=True,
            dropout=_dropout_site(slots, plan, site, tp.rank * spec.local_shape[1]),
            build=build,
        )

    def _bias_spec(self, spec: ShardSpec) -> ShardSpec:
        return replicated_spec(
            spec.global_shape[:1],
            rank=self.build.layout.tp.rank,
            size=self.build.layout.tp.size,
            grad_reduce=("tp",) if self.build.layout.splits_tokens else (),
        )

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        y = row_linear(u, source, self.operands, context, self.leaves(source))
        return self._finish(y, context, split_inputs=True)
