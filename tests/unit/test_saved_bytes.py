"""What a layer keeps for backward, counted in the autograd graph, against the formula of a plain implementation.

A LoRA layer that keeps what each of its ops asks for holds 6 h + 2 h_kv + 3 f numbers a token: the inputs of two norms
and of four projections, queries, keys and values, attention's output, gate, up and their product. Here norms and SwiGLU
are made again in backward.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from engine.kernels.native.loader import native_status
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.initialise import initialise_weights
from engine.models.ropes import Rope
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.backends import NATIVE
from engine.ops.kernels import REFERENCE, Kernels
from engine.optim.flat import FlatParameters

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, RANK = 96, 160, 6, 2, 16, 4
TOKENS = 64
CPU = torch.device("cpu")


def _decoder(layers: int, dropout: float, kernels: Kernels) -> Decoder:
    config = DecoderConfig(
        family="llama", hidden=HIDDEN, intermediate=INTERMEDIATE, num_layers=layers, num_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=50, norm_eps=1e-5, ropes=(Rope(theta=1e4),),
    )  # fmt: skip
    settings = AdapterSettings(rank=RANK, scale=2.0, dropout=dropout)
    plan = TrainingPlan(adapter=lambda module: settings if module.endswith("_proj") else None)
    model = Decoder(config, layout=TensorLayout(kernels=kernels), plan=plan, device=CPU, dtype=torch.float32)
    initialise_weights([entry.shard for entry in shard_entries(model)], 1, 0.1)
    return model


def _kept_bytes(layers: int, dropout: float, kernels: Kernels) -> int:
    """Returns the bytes of all storages that the graph of a loss holds, without those of parameters."""
    model = _decoder(layers, dropout, kernels)
    flat = FlatParameters(shard_entries(model), CPU)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), flat.master)}
    own |= {entry.shard.tensor.untyped_storage().data_ptr() for entry in shard_entries(model)}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append(tensor)  # an address counts once only while it cannot be given out again
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(TOKENS).view(2, -1) % 50
    index = torch.arange(TOKENS).view(2, -1)
    batch = Batch(
        tokens_BS=tokens, labels_BS=tokens, positions_BS=index % (TOKENS // 2), token_index_BS=index,
        loss_weights_BS=torch.ones(2, TOKENS // 2), document_offsets=torch.tensor([0, 32, 64], dtype=torch.int32),
        document_lengths=(32, 32),
    )  # fmt: skip
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        LanguageModeling().loss_sum(model(batch, torch.zeros((), dtype=torch.int64)), batch)
    return sum(kept.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kernels", [REFERENCE, NATIVE], ids=lambda kernels: kernels.name)
def test_a_layer_keeps_less_than_a_plain_one(kernels: Kernels, dropout: float) -> None:
    if kernels is NATIVE and not native_status().available:
        pytest.skip(native_status().reason)
    layer = _kept_bytes(4, dropout, kernels) - _kept_bytes(3, dropout, kernels)
    width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    plain = 4 * TOKENS * (6 * HIDDEN + 2 * kv_width + 3 * INTERMEDIATE)
    # the residual stream twice, q, k, v, attention's output, [gate | up], H of seven adapters, 1 / rms twice, lse
    numbers = 2 * HIDDEN + 2 * width + 2 * kv_width + 2 * INTERMEDIATE + 7 * RANK + 2 + HEADS
    # a mask is a byte each, or bits in rows of whole 8 bytes
    bytes_of_mask = {REFERENCE.name: lambda size: size, NATIVE.name: lambda size: -(-size // 64) * 8}[kernels.name]
    masks = TOKENS * sum(bytes_of_mask(size) for size in (HIDDEN, width, HIDDEN, INTERMEDIATE)) if dropout else 0
    assert layer == 4 * TOKENS * numbers + masks
    assert dropout or layer < 0.75 * plain
