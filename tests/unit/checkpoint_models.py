"""Small models made by stock transformers, and their slices under tensor parallelism cut by plain torch."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.checkpoint.reader import TensorReader

HEAD_DIM = 8


def tiny_llama(
    folder: Path, *, tied: bool = False, vocab: int = 37, kv_heads: int = 2, bias: bool = False,
    dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", seed: int = 0,
) -> LlamaForCausalLM:  # fmt: skip
    """Saves a random model; its vocabulary does not divide and head_dim is not hidden / heads."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM, vocab_size=vocab, tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # norms and biases start as ones and zeros, which would hide mistakes
        torch.nn.init.normal_(parameter, std=0.3)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def total_bytes(source: TensorReader) -> int:
    """The bytes of all tensors as stored."""
    return sum(source.dtype(name).itemsize * math.prod(source.shape(name)) for name in source.tensor_names())


def hf_name(logical: str) -> str:
    """The Hugging Face name, written down a second time on purpose."""
    if logical == "lm_head.weight":
        return logical
    for ours, theirs in (
        ("attention.", "self_attn."),
        ("post_self_attn.norm", "post_attention_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("input_norm", "input_layernorm"),
    ):
        logical = logical.replace(ours, theirs)
    return f"model.{logical}"


def expected_slice(logical: str, whole: Tensor, rank: int, size: int, kv_heads: int) -> Tensor:
    """What tensor-parallel rank `rank` of `size` holds of a tensor, zero padding included."""
    module, leaf = logical.split(".")[-2:]
    if module in ("o_proj", "down_proj"):
        return whole.chunk(size, dim=1)[rank] if leaf == "weight" else whole
    if module in ("k_proj", "v_proj") and kv_heads < size:
        head = rank * kv_heads // size
        return whole[head * HEAD_DIM : (head + 1) * HEAD_DIM]
    if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        return whole.chunk(size, dim=0)[rank]
    if module in ("embed_tokens", "lm_head"):
        rows = -(-whole.shape[0] // size)
        padded = torch.cat([whole, torch.zeros(rows * size - whole.shape[0], whole.shape[1], dtype=whole.dtype)])
        return padded[rank * rows : (rank + 1) * rows]
    return whole
