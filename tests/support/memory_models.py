"""The small models of tests.distributed.cases with a memory plan, and micro-batches of packed documents for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.distributed.mesh import Mesh, build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.layers.context import TensorLayout
from engine.layers.host_copies import Transfer
from engine.layers.module import shard_entries
from engine.layers.recompute import MemoryPlan
from engine.layers.saved import SavedTensors
from engine.models.decoder import Decoder
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.kernels import REFERENCE, Kernels
from engine.optim.adamw import FlatAdamW
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep
from tests.distributed.cases import Built, Case, cut, encode_base, make_batch, relative_error, whole_tensor

SEQ_LENGTH, LONG = 24, 256
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
        fold=case.fold, kernels=kernels, base=case.encoding(device),
    )  # fmt: skip
    own = memory if transfer is None else replace(memory, offload=False)
    model = Decoder(case.config, layout=layout, plan=case.plan(), device=device, dtype=dtype, memory=own)
    if transfer is not None:
        model.saved = SavedTensors(memory, device, model.saved.shapes, transfer)
    entries = list(shard_entries(model))
    for entry in entries:
        entry.parameter.data.copy_(cut(whole_tensor(entry.name, entry.spec.global_shape), entry.spec))
    encode_base(model)
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


def long_batch(vocab_size: int, seed: int = 0) -> Batch:
    """Two rows so long that activations are worth moving; the documents are equally long."""
    rows = [(0, (LONG // 2, LONG // 2)), (1, (LONG // 2, LONG // 2))]
    return make_batch(rows, row_length=LONG, seq_length=LONG, vocab_size=vocab_size, seed=seed)


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


class Recorded:
    """A transfer that writes down what it is asked for, keeps tensors where torch does not see them, and insists that
    each is fetched before it is waited for, once."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.shapes: list[torch.Size] = []

    def send(self, tensor: Tensor) -> tuple[int, np.ndarray, torch.dtype]:
        self.events.append(f"send {len(self.shapes)}")
        self.shapes.append(tensor.shape)
        return len(self.shapes) - 1, tensor.view(torch.uint8).numpy().copy(), tensor.dtype

    def fetch(self, sent: tuple[int, np.ndarray, torch.dtype]) -> tuple[int, Tensor]:
        number, array, dtype = sent
        assert f"fetch {number}" not in self.events
        self.events.append(f"fetch {number}")
        return number, torch.from_numpy(array).view(dtype).clone()

    def wait(self, fetched: tuple[int, Tensor]) -> Tensor:
        self.events.append(f"wait {fetched[0]}")
        return fetched[1]


def total_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference of all gradients over the norm of those expected."""
    names = sorted(expected)
    return relative_error(*(torch.cat([each[name].flatten() for name in names]) for each in (found, expected)))


def same_bits(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Asserts that two results of `two_alive` are equal, and that none of the gradients is nothing."""
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    different = [name for name in expected[1] if not torch.equal(found[1][name], expected[1][name])]
    assert not different, different
    assert all(gradient.any() for gradient in expected[1].values())


def gradients_on_two_ranks(case: Case, kernels: Kernels) -> dict[str, Tensor]:
    """The gradients of one micro-batch, with two ranks along the tensor-parallel axis."""
    mesh = build_mesh(RankGrid(tp=2), device_type="cpu", num_kv_heads=case.config.num_kv_heads)
    built = build_with(case, MemoryPlan(), mesh, kernels=kernels)
    batch = make_batch([(0, (9, 1, 14)), (1, (24,))], row_length=24, seq_length=24, vocab_size=131, seed=1)
    built.stage.load([batch], float(batch.loss_weights_BS.sum()))
    built.stage.forward(0)
    built.stage.backward(0)
    return built.gradients()
