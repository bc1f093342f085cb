"""The engine's side of the step, wired as in its trainer, and the products that its floor consists of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.batch import Batch
from engine.distributed.mesh import Mesh, single_process_mesh
from engine.distributed.sharding import NamedShard, shard_of
from engine.experts.layers.grouped_linear import GroupedLinear
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.encoded_storage import EncodedEntry, encoded_entries, fill_encoded
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.module import shard_entries
from engine.models.decoder import build_decoder
from engine.models.dtypes import TORCH_DTYPES
from engine.models.families import family_of
from engine.models.names import fused_parts
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.attention.varlen import choose_attention
from engine.ops.backends import choose_kernels
from engine.ops.kernels import Kernels
from engine.optim.adamw import FlatAdamW
from engine.optim.backends import choose_backend
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.training.base_encoding import named_encoding
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep
from rankfold.benchmarking.floor import GemmFloor, WeightProduct
from rankfold.benchmarking.model import (
    ADAMW,
    CLIP_GRAD_NORM,
    EXPERT_TARGETS,
    LORA_ALPHA_OVER_RANK,
    TARGETS,
    Outcome,
    document_lengths,
    draw,
    hf_config,
    learning_rate,
    packed_batch,
)
from rankfold.benchmarking.options import MERGE_AWARE, ExpertsOptions, ModelOptions, method_of

_BUCKET_BYTES = 32 * 2**20
_PEFT_LEAVES = {"lora_magnitude": "lora_magnitude_vector"}
"""Last component of a tensor's name -> PEFT's, where it differs."""


def _chosen_kernels(options: ModelOptions, device: torch.device) -> tuple[Kernels, str]:
    """Returns the kernels of a run with these options, and sentences about the choice."""
    dtype = TORCH_DTYPES[options.dtype]
    kernels, sentence = choose_kernels(options.kernels, device=device, dtype=dtype)
    if options.documents == 1:
        return kernels, sentence
    head_dim = options.hidden // options.heads
    choice = choose_attention(kernels, "auto", device=device, dtype=dtype, head_dim=head_dim, packed=True)
    return choice.kernels, f"{sentence}; {choice.sentence}"


class EngineSide:
    """The engine's training step; see `model.Side`.

    Args:
        options: sizes.
        device: where it runs.
        kernels: whose attention reads packed documents; chosen by the options where None.
    """

    def __init__(self, options: ModelOptions, device: torch.device, kernels: Kernels | None = None) -> None:
        self._options, self._device = options, device
        family, text = family_of(hf_config(options), options.implementation)
        self._names = family.names
        self._method = method_of(options)
        settings = AdapterSettings(
            rank=options.rank,
            scale=float(LORA_ALPHA_OVER_RANK),
            dropout=options.dropout,
            dora=self._method == "dora",
        )
        config = family.config_from_hf(text)
        adopted = [name.rpartition(".")[2] for name in config.all_linears]
        targets = EXPERT_TARGETS if isinstance(options, ExpertsOptions) else adopted or TARGETS
        if config.mixer_linears:
            targets = (*TARGETS, *config.mixer_linears)
        plan = TrainingPlan(
            adapter=lambda module: settings if module.rpartition(".")[2] in targets else None,
            fused=lambda module: module.rpartition(".")[2] in targets,
            merge_aware=self._method == MERGE_AWARE,
        )
        if self._method == "full":
            plan = TrainingPlan(trains=lambda module: True)
        dtype = TORCH_DTYPES[options.dtype]
        self.kernels = ""
        if kernels is None:
            kernels, self.kernels = _chosen_kernels(options, device)
        self._backend = kernels
        base = None if options.base_dtype == "none" else named_encoding(options.base_dtype, options.kernels, device)
        self.model = build_decoder(
            config,
            layout=TensorLayout(kernels=kernels, base=base),
            plan=plan,
            device=device,
            dtype=dtype,
        )
        self.entries = list(shard_entries(self.model))
        self.fill([entry.shard for entry in self.entries])
        fill_encoded(encoded_entries(self.model), self._drawn)

    def fill(self, shards: Iterable[NamedShard]) -> None:
        """Draws parameters by their Hugging Face names; see `model.draw`."""
        for shard in shards:
            module, _, leaf = shard.name.rpartition(".")
            name = self._names.module_to_hf(fused_parts(module)[0])
            if ".experts." in name:  # one adapter of gate and up is drawn by their common name
                name = f"{name.rpartition('.')[0]}.{module.rpartition('.')[2]}"
            leaf = _PEFT_LEAVES.get(leaf, leaf)
            name = name if self._names.is_parameter(module) else f"{name}.{leaf}"
            whole = shard.tensor.new_empty(shard.spec.global_shape)
            draw(name, whole)
            shard.tensor.copy_(shard_of(whole, shard.spec))  # whose rows may lie in another order

    def _drawn(self, entry: EncodedEntry) -> Tensor:
        """Draws the weight that is stored encoded."""
        weight = torch.empty(entry.spec.local_shape, dtype=TORCH_DTYPES[self._options.dtype], device=self._device)
        self.fill([NamedShard(entry.name, weight, entry.spec)])
        return weight

    def prepare(self, mesh: Mesh | None = None) -> None:
        """Builds the optimizer and the step, on one process without a mesh; see `model.Side`."""
        mesh = mesh or single_process_mesh()
        flat = FlatParameters(self.entries, self._device)
        self.fill(flat.master_shards())  # unrounded, also where the model computes in bfloat16
        flat.publish()
        backend, _ = choose_backend("auto", device=self._device)
        self.optimizer = FlatAdamW(flat, mesh, **ADAMW, clip_grad_norm=CLIP_GRAD_NORM, backend=backend)
        reducer = GradientReducer(flat, mesh, bucket_bytes=_BUCKET_BYTES)
        stages = Stages.whole(ModelStage(self.model, LanguageModeling(), self._device))
        self.train_step = TrainStep(stages, reducer, self.optimizer, mesh)

    def _batch(self, ids_BS: Tensor) -> Batch:
        return packed_batch(ids_BS, document_lengths(self._options))

    def step(self, ids_BS: Tensor) -> Outcome:
        targets = ids_BS.shape[0] * (ids_BS.shape[1] - self._options.documents)
        result = self.train_step([self._batch(ids_BS)], float(targets), learning_rate(self._options))
        return Outcome(result.loss, result.grad_norm)

    def checked_step(self, ids_BS: Tensor) -> Outcome:
        """Runs a step; see `model.Side`."""
        return self.step(ids_BS)

    def loss(self, ids_BS: Tensor, *, dropout: bool = True) -> Tensor:
        batch = self._batch(ids_BS)
        losses = self.model(batch, torch.zeros((), dtype=torch.int64, device=self._device), training=dropout)
        return LanguageModeling().loss_sum(losses, batch) / batch.loss_weights_BS.sum()

    def floor(self) -> GemmFloor:
        """Returns the floor of this side's steps."""
        return GemmFloor(self.products(), self._backend)

    def products(self) -> list[WeightProduct]:
        """Returns each weight's product in forward order. Beside adapters nothing below the first layer's queries, keys
        and values is trained, so that the input's gradient is needed of all others; in full the embedding is. For
        encoded weights others of --dtype stand in, one for each shape."""
        options, kinds = self._options, (ColumnParallelLinear, RowParallelLinear, GroupedLinear)
        linears = [module for module in self.model.modules() if isinstance(module, kinds)]
        dtype, trains = TORCH_DTYPES[options.dtype], self._method == "full"
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
            WeightProduct(instead.get(weight.shape, weight), place > 0 or trains, trains, rows)
            for place, (weight, rows) in enumerate(found)
        ]
