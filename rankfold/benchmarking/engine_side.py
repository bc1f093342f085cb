"""The engine's side of the step, wired as in its trainer, and the floor: its matrix products alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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
from rankfold.benchmarking.model import (
    ADAMW,
    CLIP_GRAD_NORM,
    EXPERT_TARGETS,
    LEARNING_RATE,
    LORA_ALPHA_OVER_RANK,
    TARGETS,
    Outcome,
    document_lengths,
    draw,
    hf_config,
    packed_batch,
)
from rankfold.benchmarking.options import ExpertsOptions, ModelOptions


class FrozenProduct(NamedTuple):
    """One product of a step.

    Args:
        weight: [out, in].
        needs_gradient: whether its input's gradient is needed.
        rows: tokens that meet it.
    """

    weight: Tensor
    needs_gradient: bool
    rows: int


class GemmFloor:
    """The necessary matrix products of one LoRA step, and nothing else.

    Forward and input-gradient product of every frozen linear and of the head, with the weights of the model itself and
    outputs made beforehand. Projections that share an input are one product (queries, keys and values; gate and up). No
    attention, no adapters, no norms, no loss, no optimizer: a step cannot reach it, and the figure is the ratio.
    Tokens are dealt out to experts evenly. Rows of a weight are contiguous here: the cost to its product of adapters
    folded beside it is part of the step alone.

    Args:
        products: in forward order.
    """

    def __init__(self, products: list[FrozenProduct]) -> None:
        copies: dict[torch.Size, Tensor] = {}
        self._products = [one._replace(weight=_dense(one.weight, copies)) for one in products]
        sample, most = products[0].weight, max(one.rows for one in products)
        widths = {width for one in products for width in one.weight.shape}
        self._operands = {w: torch.randn(most, w, dtype=sample.dtype, device=sample.device) for w in widths}
        self._results = {w: torch.empty_like(operand) for w, operand in self._operands.items()}

    def run(self) -> None:
        """Runs all products once, in the order of a step."""
        for weight, _, rows in self._products:
            out_width, in_width = weight.shape
            torch.mm(self._operands[in_width][:rows], weight.t(), out=self._results[out_width][:rows])
        for weight, needs_gradient, rows in reversed(self._products):
            out_width, in_width = weight.shape
            if needs_gradient:
                torch.mm(self._operands[out_width][:rows], weight, out=self._results[in_width][:rows])

    def operations(self) -> int:
        """Returns the floating-point operations of `run`."""
        return sum(2 * one.rows * one.weight.numel() * (1 + one.needs_gradient) for one in self._products)


def _dense(weight: Tensor, copies: dict[torch.Size, Tensor]) -> Tensor:
    """Returns the weight with contiguous rows. On a GPU one copy serves all weights of its shape: a second model may
    not fit, and a layer's weights are larger than the caches."""
    if weight.is_contiguous() or weight.device.type == "cpu":
        return weight.contiguous()
    if weight.shape not in copies:
        copies[weight.shape] = weight.contiguous()
    return copies[weight.shape]


_BUCKET_BYTES = 32 * 2**20


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
        settings = AdapterSettings(rank=options.rank, scale=float(LORA_ALPHA_OVER_RANK), dropout=options.dropout)
        config = family.config_from_hf(text)
        adopted = [name.rpartition(".")[2] for name in config.all_linears]
        targets = EXPERT_TARGETS if isinstance(options, ExpertsOptions) else adopted or TARGETS
        if config.mixer_linears:
            targets = (*TARGETS, *config.mixer_linears)
        plan = TrainingPlan(
            adapter=lambda module: settings if module.rpartition(".")[2] in targets else None,
            fused=lambda module: module.rpartition(".")[2] in targets,
        )
        dtype = TORCH_DTYPES[options.dtype]
        self.kernels = ""
        if kernels is None:
            kernels, self.kernels = _chosen_kernels(options, device)
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
        result = self.train_step([self._batch(ids_BS)], float(targets), LEARNING_RATE)
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
