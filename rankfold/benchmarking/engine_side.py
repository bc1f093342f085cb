"""The engine's side of the step, wired as in its trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.distributed.mesh import single_process_mesh
from engine.distributed.sharding import NamedShard
from engine.experts.layers.routed_experts import GroupedLinear
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.encoded_storage import EncodedEntry, encoded_entries, fill_encoded
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder
from engine.models.dtypes import TORCH_DTYPES
from engine.models.families import family_of
from engine.models.names import fused_parts
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.attention.varlen import choose_attention
from engine.ops.backends import choose_kernels
from engine.optim.adamw import FlatAdamW
from engine.optim.backends import choose_backend
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.training.base_encoding import named_encoding
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep
from rankfold.benchmarking.floor import FrozenProduct
from rankfold.benchmarking.model import (
    BETAS,
    CLIP_GRAD_NORM,
    EPS,
    EXPERT_TARGETS,
    LEARNING_RATE,
    LORA_ALPHA_OVER_RANK,
    TARGETS,
    WEIGHT_DECAY,
    Outcome,
    document_lengths,
    draw,
    hf_config,
)
from rankfold.benchmarking.options import ExpertsOptions, ModelOptions

_BUCKET_BYTES = 32 * 2**20


class EngineSide:
    """The engine's training step; see `model.Side`."""

    def __init__(self, options: ModelOptions, device: torch.device) -> None:
        self._options, self._device = options, device
        family, text = family_of(hf_config(options))
        self._names = family.names
        settings = AdapterSettings(rank=options.rank, scale=float(LORA_ALPHA_OVER_RANK), dropout=options.dropout)
        targets = EXPERT_TARGETS if isinstance(options, ExpertsOptions) else TARGETS
        plan = TrainingPlan(
            adapter=lambda module: settings if module.rpartition(".")[2] in targets else None,
            fused=lambda module: module.rpartition(".")[2] in targets,
        )
        dtype = TORCH_DTYPES[options.dtype]
        kernels, self.kernels = choose_kernels(options.kernels, device=device, dtype=dtype)
        if options.documents > 1:
            head_dim = options.hidden // options.heads
            choice = choose_attention(kernels, "auto", device=device, dtype=dtype, head_dim=head_dim, packed=True)
            kernels, self.kernels = choice.kernels, f"{self.kernels}; {choice.sentence}"
        base = None if options.base_dtype == "none" else named_encoding(options.base_dtype, options.kernels, device)
        self.model = Decoder(
            family.config_from_hf(text),
            layout=TensorLayout(kernels=kernels, base=base),
            plan=plan,
            device=device,
            dtype=dtype,
        )
        self._entries = list(shard_entries(self.model))
        self._fill([entry.shard for entry in self._entries])
        fill_encoded(encoded_entries(self.model), self._drawn)

    def _fill(self, shards: list[NamedShard]) -> None:
        for shard in shards:
            module, _, leaf = shard.name.rpartition(".")
            name = self._names.module_to_hf(fused_parts(module)[0])
            if ".experts." in name:  # one adapter of gate and up is drawn by their common name
                name = f"{name.rpartition('.')[0]}.{module.rpartition('.')[2]}"
            draw(f"{name}.{leaf}", shard.tensor)

    def _drawn(self, entry: EncodedEntry) -> Tensor:
        """Draws the weight that is stored encoded."""
        weight = torch.empty(entry.spec.local_shape, dtype=TORCH_DTYPES[self._options.dtype], device=self._device)
        self._fill([NamedShard(entry.name, weight, entry.spec)])
        return weight

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
        lengths = document_lengths(self._options)
        ends = torch.tensor([0, *lengths], device=ids_BS.device).cumsum(0)
        labels = ids_BS.flatten().roll(-1)
        labels[ends[1:] - 1] = IGNORE_LABEL
        labels = labels.view(rows, length)
        tokens = torch.arange(rows * length, device=ids_BS.device).view(rows, length)
        positions = torch.cat([torch.arange(one, device=ids_BS.device) for one in lengths]).view(rows, length)
        return Batch(
            tokens_BS=ids_BS,
            labels_BS=labels,
            positions_BS=positions,
            token_index_BS=tokens,
            loss_weights_BS=(labels != IGNORE_LABEL).float(),
            document_offsets=ends.to(torch.int32),
            document_lengths=lengths,
        )

    def step(self, ids_BS: Tensor) -> Outcome:
        targets = ids_BS.shape[0] * (ids_BS.shape[1] - self._options.documents)
        result = self._step([self._batch(ids_BS)], float(targets), LEARNING_RATE)
        return Outcome(result.loss, result.grad_norm)

    def loss(self, ids_BS: Tensor, *, dropout: bool = True) -> Tensor:
        batch = self._batch(ids_BS)
        losses = self.model(batch, torch.zeros((), dtype=torch.int64, device=self._device), training=dropout)
        return LanguageModeling().loss_sum(losses, batch) / batch.loss_weights_BS.sum()

    def products(self) -> list[FrozenProduct]:
        """Returns each frozen product in forward order: nothing below the first layer's queries, keys and values is
        trained, so that the input's gradient is needed of all others. For encoded weights others of --dtype stand in,
        one for each shape."""
        options, kinds = self._options, (ColumnParallelLinear, RowParallelLinear, GroupedLinear)
        linears = [module for module in self.model.modules() if isinstance(module, kinds)]
        dtype = TORCH_DTYPES[options.dtype]
        found: list[tuple[Tensor, int]] = []
        for linear in linears:
            if isinstance(linear, GroupedLinear):
                assert isinstance(options, ExpertsOptions)
                rows = options.tokens * options.per_token // options.experts
                found += [(weight, rows) for weight in linear.storage[..., : linear.operands.in_features]]
            else:
                found.append((linear.weight_view(), options.tokens))
        instead = {
            shape: torch.randn(shape, device=self._device).to(dtype)
            for shape in {weight.shape for weight, _ in found if weight.is_meta}
        }
        return [
            FrozenProduct(instead.get(weight.shape, weight), place > 0, rows)
            for place, (weight, rows) in enumerate(found)
        ]
