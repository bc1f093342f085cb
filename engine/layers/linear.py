"""Parallel linears that own their storage.

A module may hold several logical linears on one input (q, k, v; gate, up) as row sections of one storage tensor, so
that one matrix product serves them all. Each section is a parameter of its own, a view of the storage, with its own
name, shard and adapter. The adapters' A are rows of one stacked tensor for the same reason.

Only `weight_view` may be used to read the frozen base: the storage may grow columns that are not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distributed.sharding import Piece, ShardSpec, replicated_spec, split_spec
from engine.layers.module import ShardedModule, ShardEntry, empty
from engine.layers.plan import AdapterSettings, TensorLayout, TrainingPlan
from engine.ops.context import TokenContext
from engine.ops.dropout import DropoutSite
from engine.ops.low_rank import Factor, LowRank
from engine.ops.parallel_linear import LinearOperands, RowsSink, column_linear, row_linear


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
        *,
        bias: bool,
        layout: TensorLayout,
        plan: TrainingPlan,
        device: torch.device,
        dtype: torch.dtype,
        shared: ShardEntry | None = None,
    ) -> None:
        super().__init__()
        self.sections, self.layout, self.plan = sections, layout, plan
        self.in_features = sections[0].spec.local_shape[1]
        rows = sum(section.rows for section in sections)
        self._sinks: list[RowsSink] = []
        self._leaves: list[Tensor] = []
        if shared is not None:
            self.storage = shared.parameter.data
            if shared.sink is not None:
                shared.sink.uses += 1
                self._sinks.append(RowsSink(first=0, count=rows, weight=shared.sink, bias=None))
                self._leaves.append(shared.parameter)
        else:
            self.storage = empty((rows, self.in_features), dtype, device)
        self.bias_storage = empty((rows,), dtype, device) if bias else None
        first = 0
        for section in sections:
            if shared is None:
                self._own_section(section, first)
            first += section.rows

    def weight_view(self) -> Tensor:
        """The base weight [O, I] of all sections, without anything else the storage may hold."""
        return self.storage[:, : self.in_features]

    def _bias_spec(self, spec: ShardSpec) -> ShardSpec:
        raise NotImplementedError

    def _own_section(self, section: Section, first: int) -> None:
        trains = self.plan.trains(section.name)
        rows = slice(first, first + section.rows)
        weight = self.own(f"{section.name}.weight", self.weight_view()[rows], section.spec, trainable=trains)
        bias = None
        if self.bias_storage is not None:
            spec = self._bias_spec(section.spec)
            bias = self.own(f"{section.name}.bias", self.bias_storage[rows], spec, trainable=trains)
        if trains:
            bias_sink = bias.sink if bias is not None else None
            self._sinks.append(RowsSink(first=first, count=section.rows, weight=weight.sink, bias=bias_sink))
            self._leaves.extend(entry.parameter for entry in (weight, bias) if entry is not None)

    def _build_adapters(self, slots: list[_AdapterSlot], *, site: int, feature_offset: int) -> LowRank | None:
        if not slots:
            return None
        dtype, device = self.storage.dtype, self.storage.device
        total = sum(slot.settings.rank for slot in slots)
        stacked = empty((total, self.in_features), dtype, device)
        factors, first = [], 0
        for slot in slots:
            rank = slot.settings.rank
            a = self.own(f"{slot.name}.lora_A", stacked[first : first + rank], slot.spec_a, trainable=True)
            b_storage = empty(slot.spec_b.local_shape, dtype, device)
            b = self.own(f"{slot.name}.lora_B", b_storage, slot.spec_b, trainable=True)
            self._leaves.extend((a.parameter, b.parameter))
            factors.append(
                Factor(
                    b_OR=b.parameter.data,
                    first_column=slot.first_row,
                    num_columns=slot.spec_b.local_shape[0],
                    first_row=first,
                    scale=slot.settings.scale,
                    sink_a=a.sink,
                    sink_b=b.sink,
                )
            )
            first += rank
        probability = slots[0].settings.dropout
        dropout = None
        if probability > 0:
            dropout = DropoutSite(
                probability=probability, seed=self.plan.seed, site=site, feature_offset=feature_offset
            )
        return LowRank(a_RI=stacked, factors=tuple(factors), dropout=dropout)

    def _operands(self, low_rank: LowRank | None, *, joint: bool = False) -> LinearOperands:
        return LinearOperands(
            weight_OI=self.weight_view(),
            bias_O=self.bias_storage,
            low_rank=low_rank,
            sinks=tuple(self._sinks),
            axis=self.layout.tp,
            sequence_parallel=self.layout.sequence_parallel,
            joint=joint,
        )


def _concatenated(specs: list[ShardSpec], rank: int) -> ShardSpec:
    """The spec of [O_1 + O_2 + ..., rank] stacked from row-split sections: one piece per section."""
    pieces, global_rows, local_rows = [], 0, 0
    for spec in specs:
        runs = spec.pieces if spec.dim is not None else (Piece(0, 0, spec.local_shape[0]),)
        pieces += [Piece(global_rows + p.global_offset, local_rows + p.local_offset, p.length) for p in runs]
        global_rows += spec.global_shape[0]
        local_rows += spec.local_shape[0]
    return ShardSpec(global_shape=(global_rows, rank), local_shape=(local_rows, rank), dim=0, pieces=tuple(pieces))


class ColumnParallelLinear(_ParallelLinear):
    """Linears whose output rows are split over tp: [T, I] (or [T / tp, I]) -> [T, O / tp].

    Args:
        sections: the logical linears, in output order.
        bias: whether they have biases.
        site: dropout site of the common input.
        fused_adapter: module name of one adapter over all sections, where the plan fuses them.
        shared: take the weight from this entry (a tied embedding) instead of owning one.
    """

    def __init__(
        self,
        sections: list[Section],
        *,
        bias: bool,
        site: int,
        layout: TensorLayout,
        plan: TrainingPlan,
        device: torch.device,
        dtype: torch.dtype,
        fused_adapter: str | None = None,
        shared: ShardEntry | None = None,
    ) -> None:
        super().__init__(sections, bias=bias, layout=layout, plan=plan, device=device, dtype=dtype, shared=shared)
        slots = self._fused_slot(fused_adapter) if fused_adapter and plan.fused_qkv else self._slots()
        self.joint = layout.joint_reduce and not layout.splits_tokens
        low_rank = self._build_adapters(slots, site=site, feature_offset=0)
        self.operands = self._operands(low_rank, joint=self.joint)

    def _bias_spec(self, spec: ShardSpec) -> ShardSpec:
        return ShardSpec(
            global_shape=spec.global_shape[:1],
            local_shape=spec.local_shape[:1],
            dim=spec.dim,
            pieces=spec.pieces,
            grad_reduce=spec.grad_reduce,
            replicated=spec.replicated,
            owner=spec.owner,
        )

    def _spec_a(self, rank: int) -> ShardSpec:
        complete = self.layout.joint_reduce and not self.layout.splits_tokens
        return replicated_spec(
            (rank, self.in_features),
            rank=self.layout.tp.rank,
            size=self.layout.tp.size,
            grad_reduce=() if complete else ("tp",),
        )

    def _slots(self) -> list[_AdapterSlot]:
        slots, first = [], 0
        for section in self.sections:
            if (settings := self.plan.adapter(section.name)) is not None:
                spec = section.spec
                spec_b = ShardSpec(
                    global_shape=(spec.global_shape[0], settings.rank),
                    local_shape=(spec.local_shape[0], settings.rank),
                    dim=spec.dim,
                    pieces=spec.pieces,
                    grad_reduce=spec.grad_reduce,
                    replicated=spec.replicated,
                    owner=spec.owner,
                )
                slots.append(
                    _AdapterSlot(
                        name=section.name,
                        settings=settings,
                        first_row=first,
                        spec_a=self._spec_a(settings.rank),
                        spec_b=spec_b,
                    )
                )
            first += section.rows
        return slots

    def _fused_slot(self, name: str) -> list[_AdapterSlot]:
        settings = self.plan.adapter(name)
        if settings is None:
            return []
        spec_b = _concatenated([section.spec for section in self.sections], settings.rank)
        return [
            _AdapterSlot(name=name, settings=settings, first_row=0, spec_a=self._spec_a(settings.rank), spec_b=spec_b)
        ]

    def forward(self, x_TI: Tensor, context: TokenContext) -> Tensor:
        return column_linear(x_TI, self.operands, context, tuple(self._leaves))


class RowParallelLinear(_ParallelLinear):
    """A linear whose input features are split over tp: [T, I / tp] -> [T, O] (or [T / tp, O]).

    Args:
        name: engine module name.
        in_features, out_features: global sizes.
        site: dropout site of its input.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        site: int,
        layout: TensorLayout,
        plan: TrainingPlan,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        tp = layout.tp
        shape = (out_features, in_features)
        spec = split_spec(shape, 1, rank=tp.rank, size=tp.size, what=f"the input width of {name}")
        section = Section(name=name, spec=spec)
        super().__init__([section], bias=bias, layout=layout, plan=plan, device=device, dtype=dtype)
        slots = []
        if (settings := plan.adapter(name)) is not None:
            spec_a = split_spec((settings.rank, in_features), 1, rank=tp.rank, size=tp.size, what="lora_A")
            spec_b = replicated_spec((out_features, settings.rank), rank=tp.rank, size=tp.size, grad_reduce=("tp",))
            slots = [_AdapterSlot(name=name, settings=settings, first_row=0, spec_a=spec_a, spec_b=spec_b)]
        low_rank = self._build_adapters(slots, site=site, feature_offset=tp.rank * self.in_features)
        self.operands = self._operands(low_rank)

    def _bias_spec(self, spec: ShardSpec) -> ShardSpec:
        return replicated_spec(
            spec.global_shape[:1],
            rank=self.layout.tp.rank,
            size=self.layout.tp.size,
            grad_reduce=("tp",) if self.layout.splits_tokens else (),
        )

    def forward(self, x_TI: Tensor, context: TokenContext) -> Tensor:
        return row_linear(x_TI, self.operands, context, tuple(self._leaves))
