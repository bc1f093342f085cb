"""Bytes that a forward pass keeps for backward, counted storage by storage, and computed from the design.

Legend: h width of the residual stream and of the queries, h_kv of keys (and of values), f of the MLP, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from engine.models.dtypes import TORCH_DTYPES
from rankfold.benchmarking.model import Side, draw_batches
from rankfold.benchmarking.options import ModelOptions
from rankfold.benchmarking.sides import SideKind

_LAYERS = 2
"""Layers of the smaller model. Not 1: below the first layer nothing is trained, so it keeps less than the others."""


def saved_bytes(side: Side, ids_BS: Tensor, own: Iterable[Tensor]) -> int:
    """Returns the bytes of all storages that the graph of a loss keeps, each counted once, without those of `own`.

    Sees tensors saved through autograd, which are all but the closures of non-reentrant checkpointing.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            alive.append(tensor)  # an address identifies one storage only while it is not reused
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        side.loss(ids_BS)
    return sum(kept.values())


def layer_bytes(kind: SideKind, options: ModelOptions, device: torch.device) -> int:
    """Returns the bytes that a model keeps for one additional layer."""
    counts = []
    for layers in (_LAYERS, _LAYERS + 1):
        sized = replace(options, layers=layers)
        side = kind.build(sized, device)
        side.prepare()
        ids = draw_batches(sized, device, 1)[0]
        counts.append(saved_bytes(side, ids, [*side.model.parameters(), *side.model.buffers()]))
    return counts[1] - counts[0]


def plain_bytes(options: ModelOptions) -> int:
    """Returns bytes per token and layer where each op of a LoRA layer keeps its inputs: 6h + 2h_kv + 3f numbers.

    The inputs of two norms and of four products (norms' outputs, attention's output, SwiGLU's output), queries, keys
    and values, gate and up.
    """
    numbers = 6 * options.hidden + 2 * options.kv_width + 3 * options.intermediate
    return numbers * TORCH_DTYPES[options.dtype].itemsize


def designed_bytes(options: ModelOptions, *, bits: bool) -> float:
    """Returns bytes per token and layer of this engine's design: norms and SwiGLU are recomputed, H and statistics are
    kept.

    The residual stream twice, q, attention's output, k, v, [gate | up], H of seven adapters; in fp32 two reciprocal
    norms and attention's logarithm of sums; with dropout a mask for each of four inputs.

    Args:
        options: sizes.
        bits: masks are bits; else a byte per element.
    """
    numbers = 4 * options.hidden + 2 * options.kv_width + 2 * options.intermediate + 7 * options.rank
    statistics = 4 * (2 + options.heads)
    masks = 3 * options.hidden + options.intermediate if options.dropout > 0 else 0
    return numbers * TORCH_DTYPES[options.dtype].itemsize + statistics + masks / (8 if bits else 1)
