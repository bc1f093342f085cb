"""The build context of layers: what trains, how tensors lie, and on which device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engine.choices import ExpertFactors
from engine.distributed.mesh import Axis, ExpertAxes, Mesh
from engine.layers.shared_base import FrozenStorages, Storage
from engine.ops.attention.blocks import REFERENCE_BLOCKS, AttentionBlocks
from engine.ops.attention.context_parallel import Method
from engine.ops.encoded_weight import BaseEncoding
from engine.ops.kernels import REFERENCE, Kernels

LORA_LEAVES = ("lora_A", "lora_B", "lora_magnitude", "lora_bias")
"""Last components of the names of an adapter's tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSettings:
    """The hyperparameters of one adapter.

    Args:
        rank: r.
        scale: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (arXiv 2312.03732).
        dropout: probability of dropping an element of the adapter's input.
        dora: whether the lengths of the output rows are trained beside it (see ops.magnitude).
        bias: whether its output has a bias of its own, which is scaled with it.
    """

    rank: int
    scale: float
    dropout: float
    dora: bool = False
    bias: bool = False


def _nothing(module: str) -> bool:
    return False


def _no_adapter(module: str) -> AdapterSettings | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """The modules that train, and how.

    Args:
        trains: engine module name -> whether its own weight and bias are trained in full.
        adapter: engine module name -> its adapter, or None.
        fused: engine module name, `layers.{i}.attention.qkv_proj` or `layers.{i}.mlp.gate_up_proj` -> whether one
            adapter, asked for by that name, stands over all of its parts instead of one on each.
        experts: the factors that the adapters of a layer's experts share.
        merge_aware: weights that are stored encoded take their adapters before they are rounded (see
            ops.merged_weight).
        seed: of dropout masks and initial weights.
    """

    trains: Callable[[str], bool] = _nothing
    adapter: Callable[[str], AdapterSettings | None] = _no_adapter
    fused: Callable[[str], bool] = _nothing
    experts: ExpertFactors = "per_expert"
    merge_aware: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """The way tensors are spread over the tensor-parallel ranks.

    Args:
        tp: the axis.
        kv_replica: ranks that hold the same key/value heads.
        pp_ends: first and last pipeline rank, where they are different ones and this is one of them.
        sequence_parallel: tokens are split over tp between the linears.
        joint_reduce: column linears all-reduce [dX, dH] together (see ops.parallel_linear).
        fold: adapters may be columns of their linear's weight, in the directions that the backend's `folds` says.
        kernels: the backend of the ops.
        cp: ranks that hold parts of each row of tokens.
        context_method: how attention reaches the tokens of other ranks; see ops.context_attention.
        attention_blocks: the backend of attention between ranks.
        base: how linears store weights that do not train; None for the dtype they compute in.
        experts: how the experts of a mixture are spread; None where tensor ranks share each one's inner features and
            nothing else divides them.
    """

    tp: Axis = field(default_factory=lambda: Axis("tp"))
    kv_replica: Axis = field(default_factory=lambda: Axis("kv_replica"))
    pp_ends: Axis = field(default_factory=lambda: Axis("pp_ends"))
    sequence_parallel: bool = False
    joint_reduce: bool = False
    fold: bool = True
    kernels: Kernels = REFERENCE
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    context_method: Method = "ring"
    attention_blocks: AttentionBlocks = REFERENCE_BLOCKS
    base: BaseEncoding | None = None
    experts: ExpertAxes | None = None

    @classmethod
    def over(cls, mesh: Mesh, **more: Any) -> TensorLayout:
        """Returns the layout over the axes of a mesh.

        Args:
            more: fields that the mesh does not tell, or that differ from it.
        """
        axes = {
            "tp": mesh.tp,
            "kv_replica": mesh.kv_replica,
            "pp_ends": mesh.pp_ends,
            "cp": mesh.cp,
            "experts": mesh.experts,
        }
        return cls(**{**axes, **more})

    @property
    def expert_axes(self) -> ExpertAxes:
        """How experts are spread."""
        return self.experts or ExpertAxes(ep=Axis("ep"), tp=self.tp, data="dp_cp")

    @property
    def routes_local_tokens(self) -> bool:
        """Whether each tensor rank has tokens of its own before whole experts."""
        return self.tp.size > self.expert_axes.tp.size

    @property
    def splits_tokens(self) -> bool:
        return self.sequence_parallel and self.tp.size > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerContext:
    """The arguments that every layer is built with.

    Args:
        layout: of tensors over ranks, and the backends of the ops.
        plan: what is trained.
        device, dtype: of weights and activations.
        defers_reduce: linears leave sums over tensor ranks, of a column linear's input gradient and of a row linear's
            output, to the code around them.
        norm_readers: sets of linears that read a norm's output, and add to the gradient of its weight.
        frozen: the storages of all weights but adapters, where several models read them; None where this one has its
            own.
    """

    layout: TensorLayout
    plan: TrainingPlan
    device: torch.device
    dtype: torch.dtype
    defers_reduce: bool = False
    norm_readers: int = 1
    frozen: FrozenStorages | None = None

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Makes storage of weights that a loader or an initialiser fills, or takes that of the base which several
        models read."""
        return self.once(lambda: self.factor(shape))

    def factor(self, shape: tuple[int, ...]) -> Tensor:
        """Makes storage of an adapter, which no other model reads; padding rows must read as zero, hence zeros."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def once(self, make: Callable[[], Storage]) -> Storage:
        """Returns what `make` returns, the same for all models that read one base."""
        return make() if self.frozen is None else self.frozen.take(make)


def deferred_sums(build: LayerContext) -> LayerContext:
    """Returns the arguments of modules, and of the norms before them, that leave sums over tensor ranks to the boundary
    with the residual stream."""
    layout = replace(build.layout, sequence_parallel=False, joint_reduce=False)
    return replace(build, layout=layout, defers_reduce=True)
