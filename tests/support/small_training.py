"""A small decoder on packed documents, trained for a few steps: what a backend of the ops must not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.distributed.mesh import single_process_mesh
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.initialise import fill_normal, initialise_weights
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.kernels import Kernels
from engine.optim.adamw import FlatAdamW
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep


def packed_batch(documents: Sequence[Sequence[int]], vocab_size: int, seed: int) -> Batch:
    """Random tokens.

    Args:
        documents: of each row, the lengths of its documents; rows are equally long.
    """
    num_rows, length = len(documents), sum(documents[0])
    tokens = torch.randint(0, vocab_size, (num_rows, length), generator=torch.Generator().manual_seed(seed))
    lengths = tuple(one for row in documents for one in row)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    labels = torch.cat((tokens.flatten()[1:], tokens.new_zeros(1)))
    labels[offsets[1:] - 1] = IGNORE_LABEL
    labels[:3] = IGNORE_LABEL  # a prompt
    labels = labels.view(num_rows, length)
    return Batch(
        tokens_BS=tokens,
        labels_BS=labels,
        positions_BS=torch.cat([torch.arange(one) for one in lengths]).view(num_rows, length),
        token_index_BS=torch.arange(num_rows * length).view(num_rows, length),
        loss_weights_BS=(labels != IGNORE_LABEL).float(),
        document_offsets=offsets.to(torch.int32),
        document_lengths=lengths,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallTraining:
    """LoRA of rank 5 on all linears.

    Args:
        config: of the decoder.
        documents: of each row of every batch, the lengths of its documents.
        dropout: on the adapters' input.
        trained: parts of module names; what has one of them in its name trains in full.
        fold: adapters are columns of their linear's weight.
    """

    config: DecoderConfig
    documents: tuple[tuple[int, ...], ...]
    dropout: float
    trained: tuple[str, ...] = ()
    fold: bool = True

    def run(
        self,
        kernels: Kernels,
        *,
        steps: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        start: torch.dtype | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses of `steps` steps of AdamW, fp32 on the CPU, and the fp32 gradients of the first by parameter name.

        Args:
            kernels: the backend.
            steps: of the optimizer; with none the gradients alone.
            device, dtype: of the model.
            start: what the initial weights are rounded to, where that is less than `dtype`.
        """
        settings = AdapterSettings(rank=5, scale=1.5, dropout=self.dropout)
        plan = TrainingPlan(
            trains=lambda module: any(part in module for part in self.trained),
            adapter=lambda module: settings if module.endswith("_proj") else None,
            seed=11,
        )
        layout = TensorLayout(kernels=kernels, fold=self.fold)
        model = Decoder(self.config, layout=layout, plan=plan, device=device, dtype=dtype)
        shards = [entry.shard for entry in shard_entries(model)]
        initialise_weights(shards, 3, 0.1)
        for shard in shards:
            if "lora" in shard.name:
                fill_normal(shard, 0.1, 4)
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data.to(start or dtype))
        flat, mesh = FlatParameters(shard_entries(model), device), single_process_mesh()
        optimizer = FlatAdamW(flat, mesh, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, clip_grad_norm=1.0)
        reducer = GradientReducer(flat, mesh, bucket_bytes=1 << 20)
        step = TrainStep(Stages.whole(ModelStage(model, LanguageModeling(), device)), reducer, optimizer, mesh)
        first = self._batch(0)
        step.gradients([first], float(first.loss_weights_BS.sum()))
        gradients = {entry.name: entry.sink.buffer.clone() for entry in shard_entries(model) if entry.sink is not None}
        flat.gradient.zero_()
        losses = []
        for number in range(steps):
            batch = self._batch(number)
            losses.append(step([batch], float(batch.loss_weights_BS.sum()), 3e-3).loss.cpu())
        return torch.stack(losses) if losses else torch.empty(0), gradients

    def _batch(self, number: int) -> Batch:
        return packed_batch(self.documents, self.config.vocab_size, number)
