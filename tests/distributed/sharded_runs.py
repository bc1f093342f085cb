"""Whole training runs on the ranks of a Gloo group, at a chosen level of sharding and in a chosen layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.batch import Batch
from engine.data.collate import context_part
from engine.distributed.mesh import Axis, Mesh, build_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard, ShardSpec
from engine.kernels.native.product import multiply
from engine.layers.context import TensorLayout
from engine.layers.encoded_storage import encoded_entries, fill_encoded
from engine.layers.host_copies import host_memory
from engine.layers.recompute import Level, MemoryPlan
from engine.layers.storage import WeightPlacement
from engine.models.decoder import Part, build_decoder
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.attention.blocks import CPU_BLOCKS
from engine.ops.backends import NATIVE
from engine.ops.encoded_weight import BaseEncoding
from engine.optim.adamw import FlatAdamW
from engine.optim.backends import TORCH, OptimizerBackend
from engine.optim.flat import FlatParameters
from engine.optim.flat_layout import same_rate
from engine.optim.reduce import GradientReducer
from engine.optim.state_sharding import Sharding, ShardLevel
from engine.pipeline.schedules import ScheduleChoice
from engine.quantization.encoding import encoding
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep
from engine.vision.batch_parts import BidirectionalSpans, CrossImages, ExpertTokens, Images
from engine.vision.layers.cross_attention import CrossAttentionSizes
from engine.vision.layers.fronts import ImageTower
from engine.vision.layers.token_experts import TokenExperts
from tests.distributed.cases import Case, make_batch, whole_tensor
from tests.distributed.run_cases import CASES, GRIDS, SMALL
from tests.support.shared_scales import encoded_whole
from tests.support.toy_vision import toy_grid, with_grid_positions, with_images

CPU = torch.device("cpu")
LEVELS: tuple[ShardLevel, ...] = ("none", "optimizer", "gradients", "parameters")
BUCKET_ELEMENTS = 700
"""So that a run has several buckets, most of several parameters, and rows and parameters are cut."""
PIECE_ELEMENTS = 96
"""Elements of offloaded state that are updated together: so few that parameters and rows are cut here, too."""
GLOBAL_ROWS = 8
SEQ_LENGTH = 24
CLIP = 0.3


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks are used, and for what.

    Args:
        case: a key of CASES, or a case of the caller's own.
        layers: of each pipeline stage.
        schedule: of a pipeline.
        first: the first stage that trains anything; those below have no backward.
        accumulation: micro-batches a step.
        recompute: what backward makes again.
        dtype: of the weights that the model computes with.
        stored: dtype in which activations are kept for backward; None keeps theirs.
        base: the encoding in which frozen weights of the layers are stored.
        rounds_inputs: their products are of codes, and of inputs rounded in groups.
        merge_aware: such weights take their adapters before they are rounded.
        rounded: frozen weights of the layers have the values that this encoding gives them, but are stored plain.
        plain: regular expression over the names of weights that are neither encoded nor rounded.
        balance: coefficient of the routers' auxiliary loss.
        compiled: by the compiled kernels, also where they would leave so small products to torch, of whose a row's bits
            depend on how many rows there are.
    """

    case: str | Case
    grid: RankGrid
    layers: tuple[int, ...] = (2,)
    schedule: str = "1f1b"
    first: int = 0
    sequence: bool = False
    accumulation: int = 2
    dropout: float = 0.1
    recompute: Level = "selective"
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    base: str | None = None
    rounds_inputs: bool = False
    merge_aware: bool = False
    rounded: str | None = None
    plain: str = ""
    balance: float = 0.0
    compiled: bool = False

    def value(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
        """The whole tensor that a parameter starts with, of all whose shapes are given."""
        whole = whole_tensor(name, shapes[name])
        if self.rounded is None or not name.endswith("_proj.weight") or re.fullmatch(self.plain, name):
            return whole
        decoded = torch.empty_like(whole)
        codec = encoding(self.rounded)
        codec.decode(encoded_whole(codec, name, shapes, whole_tensor), decoded)
        return decoded


class Trained(NamedTuple):
    """What one rank saw in its run."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    masters: list[NamedShard]
    weights: list[NamedShard]


class Run:
    """A layout on this rank, with weights that are functions of their names."""

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        level: ShardLevel,
        *,
        backend: OptimizerBackend = TORCH,
        offload_weights: bool = False,
        offload_optimizer: bool = False,
        bucket_elements: int = BUCKET_ELEMENTS,
        clip: float = CLIP,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        lr_factor: Callable[[str], float] = same_rate,
    ) -> None:
        case = layout.case if isinstance(layout.case, Case) else CASES[layout.case]
        case = replace(
            case, sequence_parallel=layout.sequence, dropout=layout.dropout, balance=layout.balance,
            merge_aware=layout.merge_aware,
        )  # fmt: skip
        self.balance = case.load_balance(mesh)
        self.layout, self.mesh, self.case = layout, mesh, case
        virtual = len(layout.layers) // mesh.pp.size
        choice = ScheduleChoice(
            name=layout.schedule, num_ranks=mesh.pp.size, virtual=virtual, first_trainable_stage=layout.first
        )
        stage_rank = choice.schedule(layout.accumulation).stage_rank
        more: dict[str, Any] = {"kernels": replace(NATIVE, product=multiply)} if layout.compiled else {}
        if (kind := case.config.attention_kind(0)).bidirectional or kind.sinks:  # which ring attention does not have
            more |= {"context_method": "ulysses", "attention_blocks": CPU_BLOCKS}
        named = None if layout.base is None else BaseEncoding.named(layout.base)
        base = None if named is None else replace(named, rounds_inputs=layout.rounds_inputs)
        tensors = TensorLayout(
            tp=mesh.tp, kv_replica=mesh.kv_replica, sequence_parallel=layout.sequence, cp=mesh.cp,
            pp_ends=Axis("pp_ends") if stage_rank[0] == stage_rank[-1] else mesh.pp_ends,
            experts=mesh.experts, fold=case.fold,
            base=base, **more,
        )  # fmt: skip
        host = host_memory(CPU)
        self.kept = WeightPlacement(
            mesh.dp_cp if level == "parameters" else Axis("dp_cp"), host=host if offload_weights else None,
            expert_axis=mesh.edp if level == "parameters" else None,
        )  # fmt: skip
        self.stages = Stages(self._build_stages(stage_rank, tensors), mesh.pp, choice, self.balance)
        sharding = Sharding(
            level=level, axis=mesh.dp_cp, expert_axis=mesh.edp, bucket_elements=bucket_elements, weights=self.kept
        )
        self.entries = self.stages.entries()
        self.flat = FlatParameters(
            self.entries, CPU, sharding=sharding, host=host if offload_optimizer else None, lr_factor=lr_factor
        )
        self._fill_weights()
        self.flat.publish()
        self.optimizer = FlatAdamW(
            self.flat, mesh, betas=(0.9, 0.99), eps=eps, weight_decay=weight_decay, clip_grad_norm=clip,
            backend=backend, piece_elements=PIECE_ELEMENTS,
        )  # fmt: skip
        self.reducer = GradientReducer(self.flat, mesh, bucket_bytes=4 * bucket_elements)
        self.step = TrainStep(self.stages, self.reducer, self.optimizer, mesh)

    def _build_stages(self, stage_rank: Sequence[int], tensors: TensorLayout) -> dict[int, ModelStage]:
        """This rank's parts of the model, empty."""
        layout, case = self.layout, self.case
        memory = MemoryPlan(recompute=layout.recompute, stored_dtype=layout.stored)
        stages: dict[int, ModelStage] = {}
        step, embedding, first = torch.zeros((), dtype=torch.int64), None, 0
        for number, count in enumerate(layout.layers):
            part = Part(
                first=first, last=first + count, embedding=number == 0, head=number == len(layout.layers) - 1
            )  # fmt: skip
            first += count
            if stage_rank[number] != self.mesh.pp.rank:
                continue
            model = build_decoder(
                case.config, layout=tensors, plan=case.plan(), device=CPU, dtype=layout.dtype, part=part,
                embedding_weight=embedding, weights=self.kept, memory=memory,
            )  # fmt: skip
            embedding = model.embedding.weight if model.embedding is not None else embedding
            stages[number] = ModelStage(
                model, LanguageModeling(), CPU, trains=number >= layout.first, gives_gradient=number > layout.first,
                step=step, balance=self.balance,
            )  # fmt: skip
        return stages

    def _fill_weights(self) -> None:
        """Weights and masters by their names."""
        frozen = [shard for entry in self.entries if entry.sink is None for shard in self.kept.parts(entry)]
        shapes = {entry.name: entry.spec.global_shape for entry in self.entries}
        _fill(frozen, lambda name, shape: self.layout.value(name, shapes))
        _fill(self.flat.master_shards(), whole_tensor)
        self.encoded = [entry for model in self.stages.models() for entry in encoded_entries(model)]
        fill_encoded(
            self.encoded,
            lambda entry: take(whole_tensor(entry.name, entry.spec.global_shape), entry.spec),
            holding=self.kept.materialize,
        )

    def batches(self, step: int) -> tuple[list[Batch], float]:
        """This rank's micro-batches, and the targets of the global batch."""
        mesh = self.mesh
        size = GLOBAL_ROWS // self.layout.accumulation
        share = size // mesh.dp.size
        common = {
            "row_length": SEQ_LENGTH, "seq_length": SEQ_LENGTH, "vocab_size": SMALL.vocab_size, "seed": step,
        }  # fmt: skip
        mine, total = [], 0.0
        for index in range(self.layout.accumulation):
            rows = [(slot, _documents(step, slot)) for slot in range(index * size, (index + 1) * size)]
            total += float(make_batch(rows, **common).loss_weights_BS.sum())
            own = rows[mesh.dp.rank * share : (mesh.dp.rank + 1) * share]
            whole = make_batch(own, **common)
            if (tower := self.case.config.front(ImageTower)) is not None:
                assert isinstance(self.layout.case, str)
                grid_of = GRIDS.get(self.layout.case.partition(" ")[0], toy_grid)
                slots = [slot for slot, _ in own]
                whole = with_images(whole, slots, seed=step, vision=tower.model, grid_of=grid_of)
                if self.case.config.attention_kind(0).bidirectional:
                    whole = with_spans(whole)
            if self.case.config.rope_axes:
                whole = with_grid_positions(whole)
            if self.case.config.variant(CrossAttentionSizes) is not None:
                # of two data ranks, one has none in the first micro-batch and the other in the second; a context rank
                # may have no token of a document with images
                whole = with_images(
                    whole, [slot if slot in (2, 5) else 0 for slot, _ in own], seed=step, kind=CrossImages
                )
            if self.case.config.variant(TokenExperts) is not None:
                whole = with_experts(whole, [slot for slot, _ in own])
            mine.append(context_part(whole, size=mesh.cp.size, rank=mesh.cp.rank))
        return mine, total

    def train(self, first: int, last: int, lr: float = 1e-3) -> tuple[list[float], list[float]]:
        """Steps first ... last; losses and norms before clipping."""
        losses, norms = [], []
        for step in range(first, last + 1):
            result = self.step(*self.batches(step), lr)
            losses.append(result.loss.item())
            norms.append(result.grad_norm.item())
        return losses, norms

    def weights(self) -> list[NamedShard]:
        """What of the model's weights this rank keeps, trained ones and frozen ones, as they will be read next."""
        self.flat.publish()
        parts = [part for entry in self.entries for part in self.kept.parts(entry)]
        return [NamedShard(name, tensor.clone(), spec) for name, tensor, spec in parts]

    def gradients(self, step: int) -> list[NamedShard]:
        """The global batch's summed gradient of a step that is not taken, as far as this rank has it."""
        self.step.gradients(*self.batches(step))
        shards = [NamedShard(name, tensor.clone(), spec) for name, tensor, spec in self.flat.gradient_shards()]
        self.flat.gradient.zero_()
        return shards

    def trained(self, num_steps: int) -> Trained:
        """A run that is interrupted by an evaluation half way."""
        half = num_steps // 2
        first = self.train(1, half)
        evaluation = self.stages.figures(self.batches(99)[0])[0].item()
        second = self.train(half + 1, num_steps)
        masters = [NamedShard(name, tensor.clone(), spec) for name, tensor, spec in self.flat.master_shards()]
        return Trained(first[0] + second[0], first[1] + second[1], evaluation, masters, self.weights())


def trained_layouts(
    layouts: Mapping[str, tuple[Layout, ShardLevel]], kinds: Sequence[str], steps: int
) -> dict[tuple[str, str], Trained]:
    """Trains each kind of model in each layout; on all ranks."""
    seen = {}
    for name, (layout, level) in layouts.items():
        mesh = build_mesh(layout.grid, device_type="cpu", num_kv_heads=2)
        for kind in kinds:
            seen[name, kind] = Run(replace(layout, case=kind), mesh, level).trained(steps)
    return seen


def with_spans(batch: Batch) -> Batch:
    """Tokens of images beside each other see each other, as far as their document goes."""
    assert batch.part(Images) is not None
    places, spans = set(batch.part(Images).places_K.tolist()), list[list[int]]()
    starts = {0, *torch.tensor(batch.document_lengths).cumsum(0).tolist()}
    for place in sorted(places):
        if spans and spans[-1][1] == place and place not in starts:
            spans[-1][1] += 1
        else:
            spans.append([place, place + 1])
    return batch.with_parts(BidirectionalSpans.of((start, stop) for start, stop in spans))


def with_experts(batch: Batch, slots: Sequence[int]) -> Batch:
    """Gives some rows tokens of images, by their slots in the global batch; a rank may have none in a step."""
    row_of, column_of = (
        torch.arange(batch.num_tokens) // batch.row_length,
        torch.arange(batch.num_tokens) % batch.row_length,
    )
    count = torch.tensor([3 * (slot % 4) if slot % 4 >= 2 else 0 for slot in slots])
    is_vision = (column_of >= 2) & (column_of < 2 + count[row_of])
    return batch.with_parts(ExpertTokens(vision_V=is_vision.nonzero()[:, 0], language_L=(~is_vision).nonzero()[:, 0]))


def _documents(step: int, slot: int) -> tuple[int, ...]:
    return ((9, 1, 14), (24,), (5, 5, 11), (21,))[(slot + step) % 4]


def _fill(shards: list[NamedShard], value: Callable[[str, tuple[int, ...]], Tensor]) -> None:
    """From whole tensors, cut as each shard says."""
    for name, tensor, spec in shards:
        tensor.copy_(take(value(name, spec.global_shape), spec))


def take(whole: Tensor, spec: ShardSpec) -> Tensor:
    """This shard of a whole tensor; padding is zero."""
    local = torch.zeros(spec.local_shape, dtype=whole.dtype)
    put(local, whole, spec, out_of_whole=True)
    return local


def put(local: Tensor, whole: Tensor, spec: ShardSpec, *, out_of_whole: bool) -> None:
    """Copies between a shard and the whole tensor."""
    if spec.dim is None:
        source, target = (whole, local) if out_of_whole else (local, whole)
        target.copy_(source)
        return
    for piece in spec.pieces:
        here, there = local.narrow(spec.dim, piece.local_offset, piece.length), whole
        for dim in range(whole.dim()):
            run = piece if dim == spec.dim else spec.runs(dim)[0]
            there = there.narrow(dim, run.global_offset, run.length)
        source, target = (there, here) if out_of_whole else (here, there)
        target.copy_(source)


def assemble(ranks: list[list[NamedShard]]) -> dict[str, Tensor]:
    """Whole tensors of all ranks' shards; every element is there, and equal wherever it is twice."""
    whole: dict[str, Tensor] = {}
    for shards in ranks:
        for name, tensor, spec in shards:
            known = whole.setdefault(name, torch.full(spec.global_shape, torch.nan, dtype=tensor.dtype))
            before = take(known, spec)
            assert torch.equal(before[~before.isnan()], tensor[~before.isnan()]), f"{name} differs between ranks"
            put(tensor, known, spec, out_of_whole=False)
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"nobody has all of {name}"
    return whole
