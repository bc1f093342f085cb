"""A layout of ranks, what is trained under it, and which layers its pipeline ranks hold.

The split of layers is that of `engine.training.partition`, computed from sizes that are read once for a whole search.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from engine.config.parallel import ParallelOptions
from engine.layers.plan import TrainingPlan
from engine.models.config import DecoderConfig
from engine.ops.kernels import REFERENCE, Kernels
from engine.pipeline.partition import (
    LayerWeights,
    first_trainable_stage,
    parse_layers,
    split_layers,
    time_without_backward,
)
from engine.pipeline.schedule import Schedule
from engine.pipeline.schedules import chosen_schedule, default_virtual, make_schedule
from engine.planning.kernels import KernelMemory
from engine.planning.shape_kernels import shape_kernels
from engine.planning.shapes import ModelShape, model_shape
from engine.planning.stage import StageRange
from engine.planning.traces import Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Ranks of each axis, and how they work together.

    Args:
        parallel: as in a run's configuration.
        data: data-parallel ranks, which follow from the number of ranks there.
    """

    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    data: int = 1

    @property
    def world_size(self) -> int:
        return self.parallel.model_parallel_size * self.data

    @property
    def data_and_context(self) -> int:
        """Ranks that sum gradients."""
        return self.data * self.parallel.context

    def label(self) -> str:
        """Such as "tensor 2, pipeline 4x2, data 1"."""
        parallel = self.parallel
        parts = [f"tensor {parallel.tensor}" + ("" if parallel.sequence is not False else " without sequence")]
        if parallel.pipeline > 1:
            parts.append(f"pipeline {parallel.pipeline}" + (f"x{parallel.virtual}" if parallel.virtual else ""))
        if parallel.context > 1:
            parts.append(f"context {parallel.context}")
        parts.append(f"data {self.data}")
        if parallel.shard != "none":
            parts.append(f"shard {parallel.shard}")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is trained, whatever the layout.

    Args:
        decoder: of the model.
        plan: what trains, and the adapters.
        dtype: of weights and activations.
        micro_batch: rows of a micro-batch.
        global_batch: rows of a step, over all ranks.
        seq_length: tokens of a row.
        longest_document: tokens of the longest document of a row; 0 where one fills the row.
        answers: of a micro-batch, where the objective compares answers; else 0.
        refers_to_base: each step goes through the model without adapters first, for the objective to compare with.
        base_dtype: how frozen weights of the layers are stored; None for `dtype`.
        device_type: "cuda" or "cpu".
        beside: frozen parameters of other parts than the decoder, in `dtype`; what they compute is not counted.
        kernels: the backend of the ops.
        finds_done: whether a send says that it is done; see engine.planning.messages.
        square_sum_writes: whether the gradient's norm writes the squares of a region, as plain torch does.
        offload_weights: whether frozen weights wait in host memory.
        offload_optimizer: whether masters and moments do.
    """

    decoder: DecoderConfig
    plan: TrainingPlan
    dtype: torch.dtype
    micro_batch: int
    global_batch: int
    seq_length: int
    kernels: KernelMemory
    longest_document: int = 0
    answers: int = 0
    refers_to_base: bool = False
    base_dtype: str | None = None
    device_type: str = "cuda"
    beside: int = 0
    finds_done: bool = True
    square_sum_writes: bool = True
    offload_weights: bool = False
    offload_optimizer: bool = False

    @property
    def document_length(self) -> int:
        """Tokens of the longest document."""
        return self.longest_document or self.seq_length

    def num_microbatches(self, layout: Layout) -> int:
        """Of each rank in a step."""
        return self.global_batch // (self.micro_batch * layout.data)


def setting_of(workload: Workload, parallel: ParallelOptions) -> Setting:
    """What traces of the model's pieces depend on."""
    return Setting(
        decoder=workload.decoder, plan=workload.plan, dtype=workload.dtype, rows=workload.micro_batch,
        row_length=workload.seq_length, document_length=workload.document_length, answers=workload.answers,
        base_dtype=workload.base_dtype, kernels=workload.kernels, device_type=workload.device_type,
        tensor=parallel.tensor, context=parallel.context, context_method=parallel.context_method,
        sequence_parallel=parallel.sequence_parallel, joint_reduce=parallel.lora_reduce == "joint",
        tied_ends=workload.decoder.tied_embeddings and parallel.pipeline > 1,
    )  # fmt: skip


class Shapes:
    """Models as ranks of a tensor axis would hold them, each read once.

    Args:
        decoder, plan: of the model.
        base_dtype: how frozen weights of the layers are stored; None for the model's dtype.
        device_type: whose products must take what is stored encoded; "meta" asks nobody.
        kernels: the backend of the ops.
    """

    def __init__(
        self, decoder: DecoderConfig, plan: TrainingPlan, base_dtype: str | None = None, device_type: str = "meta",
        kernels: Kernels = REFERENCE,
    ) -> None:  # fmt: skip
        self._decoder, self._plan, self._kernels = decoder, plan, kernels
        self._base_dtype, self._device_type = base_dtype, device_type
        self._known: dict[tuple[object, ...], ModelShape] = {}

    @classmethod
    def for_workload(cls, workload: Workload) -> Shapes:
        """Of what is trained."""
        kernels = shape_kernels(workload.kernels)
        return cls(workload.decoder, workload.plan, workload.base_dtype, workload.device_type, kernels)

    def of(self, parallel: ParallelOptions, tensor_rank: int = 0) -> ModelShape:
        """For one tensor-parallel rank.

        Raises:
            UserError: the model's sizes do not fit parallel.tensor.
        """
        joint = parallel.lora_reduce == "joint"
        tied_ends = self._decoder.tied_embeddings and parallel.pipeline > 1
        key = parallel.tensor, tensor_rank, parallel.sequence_parallel, joint, tied_ends
        if key not in self._known:
            self._known[key] = model_shape(
                self._decoder, self._plan, tensor_size=parallel.tensor, tensor_rank=tensor_rank,
                sequence_parallel=parallel.sequence_parallel, joint_reduce=joint, tied_ends=tied_ends,
                base_dtype=self._base_dtype, device_type=self._device_type, kernels=self._kernels,
            )  # fmt: skip
        return self._known[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """The stages of a layout.

    Args:
        layers: of each stage.
        schedule: the actions of all pipeline ranks.
    """

    layers: tuple[int, ...]
    schedule: Schedule

    def stages(self, rank: int) -> dict[int, StageRange]:
        """Those of a pipeline rank, by their number in the whole model."""
        ends = [sum(self.layers[: stage + 1]) for stage in range(len(self.layers))]
        return {
            stage: StageRange(
                first=ends[stage] - self.layers[stage], last=ends[stage], embedding=stage == 0,
                head=stage == len(self.layers) - 1,
            )
            for stage in self.schedule.stages_of(rank)
        }  # fmt: skip

    @property
    def ends_meet(self) -> bool:
        """Whether the first and the last stage are on one rank, which then has one tensor for tied embeddings."""
        return self.schedule.stage_rank[0] == self.schedule.stage_rank[-1]


def pipeline_plan(
    decoder: DecoderConfig, shape: ModelShape, parallel: ParallelOptions, num_microbatches: int
) -> PipelinePlan:
    """Splits the layers for a layout.

    Raises:
        UserError: they cannot be split like that, or the schedule does not fit the micro-batches.
    """
    first_layer, frozen = shape.first_trainable_layer, shape.layers_are_frozen
    name = chosen_schedule(parallel.schedule, parallel.virtual, layers_are_frozen=frozen)
    if parallel.pipeline == 1:
        return PipelinePlan(layers=(decoder.num_layers,), schedule=_schedule("1f1b", 1, 1, num_microbatches, 0))
    virtual = parallel.virtual or default_virtual(name)
    num_stages = parallel.pipeline * virtual
    if parallel.layers_per_stage is not None:
        layers = parse_layers(",".join(map(str, parallel.layers_per_stage)), decoder.num_layers, num_stages)
    else:
        weights = LayerWeights(
            head=decoder.hidden * decoder.vocab_size / layer_matrix_elements(decoder),
            first_trainable_layer=first_layer,
            frozen_layer=time_without_backward(layers_are_frozen=frozen),
        )
        layers = split_layers(decoder.num_layers, num_stages, weights)
    first_stage = first_trainable_stage(layers, first_layer)
    return PipelinePlan(
        layers=layers, schedule=_schedule(name, parallel.pipeline, virtual, num_microbatches, first_stage)
    )


def layer_matrix_elements(decoder: DecoderConfig) -> int:
    """Elements of the matrices of one layer, over all ranks: its arithmetic."""
    attention = 2 * decoder.num_heads + 2 * decoder.num_kv_heads
    return decoder.hidden * (attention * decoder.head_dim + 3 * decoder.intermediate)


@lru_cache(maxsize=256)
def _schedule(name: str, num_ranks: int, virtual: int, num_microbatches: int, first_stage: int) -> Schedule:
    return make_schedule(name, num_ranks, virtual, num_microbatches, first_stage)
