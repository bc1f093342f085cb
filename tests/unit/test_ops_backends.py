"""A training with the compiled kernels follows the one with plain torch; a backend that cannot run is refused."""

from __future__ import annotations

import pytest
import torch

from engine.batch import IGNORE_LABEL, Batch
from engine.distributed.mesh import single_process_mesh
from engine.errors import UserError
from engine.layers.module import shard_entries
from engine.layers.plan import AdapterSettings, TensorLayout, TrainingPlan
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder
from engine.models.initialise import fill_normal, initialise_weights
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.backends import choose_kernels
from engine.ops.kernels import REFERENCE, Kernels
from engine.ops.native.backend import NATIVE
from engine.ops.native.loader import native_status
from engine.optim.adamw import FlatAdamW
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.training.stage import ModelStage
from engine.training.step import TrainStep

CPU = torch.device("cpu")
CONFIG = DecoderConfig(
    family="llama", hidden=72, intermediate=100, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=10, vocab_size=131,
    norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip

needs_native = pytest.mark.skipif(not native_status().available, reason=native_status().reason)


def _batch(seed: int) -> Batch:
    tokens = torch.randint(0, 131, (3, 37), generator=torch.Generator().manual_seed(seed))
    labels = torch.full_like(tokens, IGNORE_LABEL)
    labels[:, :-1] = tokens[:, 1:]
    labels[0, :9] = IGNORE_LABEL
    index = torch.arange(111).view(3, 37)
    lengths = (37, 20, 17, 37)
    return Batch(
        tokens_BS=tokens, labels_BS=labels, positions_BS=index % 37, token_index_BS=index,
        loss_weights_BS=(labels != IGNORE_LABEL).float(),
        document_offsets=torch.tensor([0, 37, 57, 74, 111], dtype=torch.int32), document_lengths=lengths,
    )  # fmt: skip


def _run(
    kernels: Kernels, dropout: float, trained: str, steps: int = 20
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps, and the gradients of the first."""
    settings = AdapterSettings(rank=5, scale=1.5, dropout=dropout)
    plan = TrainingPlan(
        trains=lambda module: trained in module if trained else False,
        adapter=lambda module: settings if module.endswith("_proj") else None,
        seed=11,
    )
    model = Decoder(CONFIG, layout=TensorLayout(kernels=kernels), plan=plan, device=CPU, dtype=torch.float32)
    shards = [entry.shard for entry in shard_entries(model)]
    initialise_weights(shards, 3, 0.1)
    for shard in shards:
        if "lora" in shard.name:
            fill_normal(shard, 0.1, 4)
    flat, mesh = FlatParameters(shard_entries(model), CPU), single_process_mesh()
    optimizer = FlatAdamW(flat, mesh, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, clip_grad_norm=1.0)
    step = TrainStep(
        ModelStage(model, LanguageModeling(), CPU), GradientReducer(flat, mesh, bucket_bytes=1 << 20), optimizer, mesh
    )
    step.gradients([_batch(0)], float(_batch(0).loss_weights_BS.sum()))
    gradients = {entry.name: entry.sink.buffer.clone() for entry in shard_entries(model) if entry.sink is not None}
    flat.gradient.zero_()
    losses = []
    for number in range(steps):
        batch = _batch(number)
        losses.append(float(step([batch], float(batch.loss_weights_BS.sum()), 3e-3).loss))
    return losses, gradients


@needs_native
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("trained", ["", "norm", "lm_head"])
def test_native_training_follows_the_reference(dropout: float, trained: str) -> None:
    losses, gradients = _run(NATIVE, dropout, trained)
    expected_losses, expected = _run(REFERENCE, dropout, trained)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    assert max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)) < 1e-5
    assert losses[-1] != losses[0]


def test_reference_is_taken_where_the_native_kernels_cannot_compute() -> None:
    kernels, why = choose_kernels("auto", device=CPU, dtype=torch.bfloat16)
    assert kernels is REFERENCE and "float32" in why


def test_native_by_name_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(UserError, match="set model.kernels to auto or reference"):
        choose_kernels("native", device=CPU, dtype=torch.bfloat16)


@needs_native
def test_auto_takes_the_native_kernels() -> None:
    assert choose_kernels("auto", device=CPU, dtype=torch.float32)[0] is NATIVE
