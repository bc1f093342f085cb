"""The small models of tests.distributed.cases with a memory plan, and micro-batches of packed documents for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.batch import Batch
from engine.distributed.mesh import Mesh, single_process_mesh
from engine.layers.module import shard_entries
from engine.layers.offload import Transfer
from engine.layers.plan import TensorLayout
from engine.layers.recompute import MemoryPlan
from engine.layers.saved import SavedTensors
from engine.models.decoder import Decoder
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.kernels import REFERENCE, Kernels
from engine.optim.adamw import FlatAdamW
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.training.stage import ModelStage
from engine.training.stages import Stages
from engine.training.step import TrainStep
from tests.distributed.cases import Built, Case, cut, make_batch, whole_tensor

SEQ_LENGTH = 24
CPU = torch.device("cpu")


def build_with(
    case: Case,
    memory: MemoryPlan,
    mesh: Mesh | None = None,
    *,
    kernels: Kernels = REFERENCE,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    transfer: Transfer | None = None,
) -> Built:
    """The case on this rank of `mesh`, or on one process, as tests.distributed.cases.build makes it.

    Args:
        transfer: takes the place of the one that `memory.offload` would make.
    """
    mesh = mesh or single_process_mesh()
    layout = TensorLayout(
        tp=mesh.tp, kv_replica=mesh.kv_replica, sequence_parallel=case.sequence_parallel, joint_reduce=case.joint,
        fold=case.fold, kernels=kernels,
    )  # fmt: skip
    own = memory if transfer is None else replace(memory, offload=False)
    model = Decoder(case.config, layout=layout, plan=case.plan(), device=device, dtype=dtype, memory=own)
    if transfer is not None:
        model.saved = SavedTensors(memory, device, model.saved.shapes, transfer)
    entries = list(shard_entries(model))
    for entry in entries:
        entry.parameter.data.copy_(cut(whole_tensor(entry.name, entry.spec.global_shape), entry.spec))
    flat = FlatParameters(entries, device)
    reducer = GradientReducer(flat, mesh, bucket_bytes=2048)
    optimizer = FlatAdamW(flat, mesh, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01, clip_grad_norm=1.0)
    stage = ModelStage(model, LanguageModeling(), device)
    return Built(
        mesh=mesh, entries=entries, model=model, flat=flat, reducer=reducer, optimizer=optimizer, stage=stage,
        step=TrainStep(Stages.whole(stage), reducer, optimizer, mesh),
    )  # fmt: skip


def packed_batches(vocab_size: int, step: int = 0, rank: int = 0, size: int = 1) -> list[Batch]:
    """Two micro-batches of two packed rows, of which each of `size` data-parallel ranks takes its share."""
    common = {"row_length": SEQ_LENGTH, "seq_length": SEQ_LENGTH, "vocab_size": vocab_size, "seed": step}
    rows = [[(0, (9, 15)), (1, (24,))], [(2, (20,)), (3, (4, 7, 13))]]
    return [make_batch(micro[rank::size], **common) for micro in rows]


def num_targets(batches: list[Batch]) -> float:
    return float(sum(batch.loss_weights_BS.sum() for batch in batches))


def two_alive(built: Built, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss sum and gradients by name, with both micro-batches' activations alive at once, as in a pipeline."""
    built.flat.gradient.zero_()
    built.stage.load(batches, num_targets(batches))
    for number in range(len(batches)):
        built.stage.forward(number)
    for number in range(len(batches)):
        built.stage.backward(number)
    return built.stage.loss_sum.clone(), built.gradients()
