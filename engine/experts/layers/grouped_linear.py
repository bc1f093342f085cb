"""The same linears of every expert of a layer, in one storage, with the adapters of each.

An expert's matrices are parameters of their own, 2D as in checkpoints, and so are its adapters. On a rank they lie one
behind the other in one storage, of which the parameters are views, so that one grouped product serves all experts
without a copy (see ops.routed_experts). Where the run stores its base encoded and none of the weights trains, they lie
in an `EncodedStorage` (see ops.encoded_experts). Where several models read the base, it holds no adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.distributed.sharding import ShardSpec, replicated_spec
from engine.errors import UserError
from engine.experts.kernels import grouped_kernels
from engine.experts.layers.expert_adapters import ExpertAdapter, expert_adapters, sharing
from engine.experts.ops.encoded_experts import EncodedExperts
from engine.experts.ops.grouped_adapters import Blocks, GroupedLowRank
from engine.experts.ops.grouped_products import GROUPED_MULTIPLE, GradientBlock
from engine.experts.ops.merged_experts import MergedExperts, MergedLowRanks, factor_stack
from engine.experts.ops.routed_experts import GroupedOperands
from engine.kernels.records import AdapterPlace
from engine.layers.branch import LinearShape
from engine.layers.context import LayerContext
from engine.layers.encoded_storage import EncodedStorage
from engine.layers.module import AdaptedModule, ShardEntry
from engine.ops.dropout import DropoutSite
from engine.ops.merged_weight import Factors

_ALL = slice(None)


def is_gpu(build: LayerContext) -> bool:
    """Returns whether one launch serves all experts; without numbers, whether it would where the backend is used."""
    return build.device.type == "cuda" or (build.device.type == "meta" and build.layout.kernels.name == "triton")


class GroupedLinear(AdaptedModule):
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
        self._merges = build.plan.merge_aware and self.encoded is not None
        apart = self._sharing.b or not build.layout.fold or self._merges
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
            name=f"{prefix}.{leaves[0]}",
            bias_EO=bias_EO,
            bias_blocks=bias_blocks if any(bias_blocks) else (),
            adds_bias=spec.dim == 0 or build.layout.expert_axes.tp.rank == 0,
            encoded=self._decoded_operand(b_EOR if beside else None, self._merged_factors(adapters, low_rank)),
            grouped=grouped_kernels(
                build.layout.kernels,
                dtype=build.dtype,
                narrowest=min(self._in, rows * len(leaves)),
                shapes=build.device.type == "meta",
            ),
        )

    @property
    def trained_leaves(self) -> tuple[Tensor, ...]:
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
        """Returns where the weights are stored encoded; None where one of the layer's trains, on whichever rank it is,
        or their encodings differ: what is encoded does not depend on the layout."""
        layout, leaves = self._build.layout, self._names
        everywhere = [f"{self._prefix}.{expert}.{leaf}" for expert in range(self._num_experts) for leaf in leaves]
        if layout.base is None or any(map(self._build.plan.trains, everywhere)):
            return None
        base = layout.base
        if (encoding := base.common([f"{module}.weight" for module in everywhere])) is None:
            return None
        sections = [(f"{self._prefix}.{expert}.{leaf}", self._spec) for expert in self._experts for leaf in leaves]
        return self._build.once(
            lambda: EncodedStorage(sections, encoding, base, tp=layout.expert_axes.tp, device=self._build.device)
        )

    def _decoded_operand(self, b_EOR: Tensor | None, merged: Sequence[Sequence[Factors]]) -> EncodedExperts | None:
        """Returns the experts as products read them, with the adapters that the weights take before rounding."""
        base, count = self._build.layout.base, len(self._experts)
        if self.encoded is None or base is None:
            return None
        experts = EncodedExperts(
            weight=self.encoded.weight, num_experts=count, b_EOR=b_EOR, dtype=self._build.dtype, scratch=base.scratch
        )
        if merged:
            per = len(self._names)
            own = [
                self.encoded.merged_sections(adapters, slice(place * per, (place + 1) * per))
                for place, adapters in enumerate(merged)
            ]
            experts = MergedExperts(
                weight=experts.weight,
                num_experts=count,
                b_EOR=None,
                dtype=experts.dtype,
                scratch=experts.scratch,
                sections=tuple(own),
                stacks=tuple(map(factor_stack, zip(*own, strict=True))),
                state=self.encoded.state,
            )
        experts.announce(together=is_gpu(self._build))
        return experts

    def _merged_factors(self, adapters: list[ExpertAdapter], low_rank: GroupedLowRank | None) -> list[list[Factors]]:
        """Returns the adapters of each expert here that its weight takes before rounding; nothing where none does."""
        if low_rank is None or not low_rank.is_merged:
            return []
        found: list[list[Factors]] = []
        a_ERI = low_rank.every_a(len(self._experts))
        for place, expert in enumerate(self._experts):
            found.append([])
            for adapter, at in zip(adapters, low_rank.places, strict=True):
                if (settings := adapter.settings[expert]) is None:
                    continue
                ranks = slice(at.first_row, at.first_row + settings.rank)
                b_OR = low_rank.b_OR if low_rank.b_EOR is None else low_rank.b_EOR[place]
                assert b_OR is not None
                found[-1].append(
                    Factors(
                        first_row=adapter.rows.start,
                        num_rows=at.num_columns,
                        b_OR=b_OR[adapter.rows, ranks],
                        a_RI=a_ERI[place, ranks],
                        scale=settings.scale,
                    )
                )
        return found

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
        return (MergedLowRanks if self._merges else GroupedLowRank)(
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
