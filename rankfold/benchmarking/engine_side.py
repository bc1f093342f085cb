"""The engine's side of the step, wired as in its trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.distributed.mesh import single_process_mesh
from engine.distributed.sharding import NamedShard
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder
from engine.models.dtypes import TORCH_DTYPES
from engine.models.families import family_of
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.backends import choose_kernels
from engine.optim.adamw import FlatAdamW
from engine.optim.backends import choose_backend
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep
from rankfold.benchmarking.model import (
    BETAS,
    CLIP_GRAD_NORM,
    EPS,
    LEARNING_RATE,
    LORA_ALPHA_OVER_RANK,
    TARGETS,
    WEIGHT_DECAY,
    Outcome,
    draw,
    hf_config,
)
from rankfold.benchmarking.options import ModelOptions

_BUCKET_BYTES = 32 * 2**20


class EngineSide:
    """The engine's training step; see `model.Side`."""

    def __init__(self, options: ModelOptions, device: torch.device) -> None:
        self._options, self._device = options, device
        family, text = family_of(hf_config(options))
        self._names = family.names
        settings = AdapterSettings(rank=options.rank, scale=float(LORA_ALPHA_OVER_RANK), dropout=options.dropout)
        plan = TrainingPlan(adapter=lambda module: settings if module.rpartition(".")[2] in TARGETS else None)
        dtype = TORCH_DTYPES[options.dtype]
        kernels, self.kernels = choose_kernels(options.kernels, device=device, dtype=dtype)
        self.model = Decoder(
            family.config_from_hf(text),
            layout=TensorLayout(kernels=kernels),
            plan=plan,
            device=device,
            dtype=dtype,
        )
        self._entries = list(shard_entries(self.model))
        self._fill([entry.shard for entry in self._entries])

    def _fill(self, shards: list[NamedShard]) -> None:
        for shard in shards:
            module, _, leaf = shard.name.rpartition(".")
            draw(f"{self._names.module_to_hf(module)}.{leaf}", shard.tensor)

    def prepare(self) -> None:
        mesh = single_process_mesh()
        flat = FlatParameters(self._entries, self._device)
        self._fill(flat.master_shards())  # unrounded, also where the model computes in bfloat16
        flat.publish()
        optimizer = FlatAdamW(
            flat,
            mesh,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            clip_grad_norm=CLIP_GRAD_NORM,
            backend=choose_backend("auto", device=self._device)[0],
        )
        self.optimizer = optimizer
        reducer = GradientReducer(flat, mesh, bucket_bytes=_BUCKET_BYTES)
        stages = Stages.whole(ModelStage(self.model, LanguageModeling(), self._device))
        self._step = TrainStep(stages, reducer, optimizer, mesh)

    def _batch(self, ids_BS: Tensor) -> Batch:
        rows, length = ids_BS.shape
        labels = torch.full_like(ids_BS, IGNORE_LABEL)
        labels[:, :-1] = ids_BS[:, 1:]
        tokens = torch.arange(rows * length, device=ids_BS.device).view(rows, length)
        return Batch(
            tokens_BS=ids_BS,
            labels_BS=labels,
            positions_BS=tokens % length,
            token_index_BS=tokens,
            loss_weights_BS=(labels != IGNORE_LABEL).float(),
            document_offsets=torch.arange(0, (rows + 1) * length, length, dtype=torch.int32),
            document_lengths=(length,) * rows,
        )

    def step(self, ids_BS: Tensor) -> Outcome:
        targets = ids_BS.shape[0] * (ids_BS.shape[1] - 1)
        result = self._step([self._batch(ids_BS)], float(targets), LEARNING_RATE)
        return Outcome(result.loss, result.grad_norm)

    def loss(self, ids_BS: Tensor, *, dropout: bool = True) -> Tensor:
        batch = self._batch(ids_BS)
        losses = self.model(batch, torch.zeros((), dtype=torch.int64, device=self._device), training=dropout)
        return LanguageModeling().loss_sum(losses, batch) / batch.loss_weights_BS.sum()

    def linear_weights(self) -> list[tuple[Tensor, bool]]:
        """Returns each frozen product's weight [out, in] in forward order, and whether backward needs its input's
        gradient: nothing below the first layer's queries, keys and values is trained."""
        linears = [m for m in self.model.modules() if isinstance(m, (ColumnParallelLinear, RowParallelLinear))]
        return [(linear.weight_view(), place > 0) for place, linear in enumerate(linears)]
