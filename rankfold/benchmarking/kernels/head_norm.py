"""RMSNorm of each query and key head and their rotation: forward, and backward without the weights' gradients.

Legend: T tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from engine.ops.head_norm import HeadNorms, norm_rotate
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import TORCH, Case, Contestant, Results
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.norm import EPS
from rankfold.benchmarking.kernels.rope import halves_twice, tables_of
from rankfold.benchmarking.kernels.setting import Setting

Split = Callable[[Tensor], Results]
"""[q | k | v] -> q, k and v."""


def _inputs(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the product [T, (H + 2K) D], and the weights of the query and of the key norm."""
    draws, options = setting.draws("head norm"), setting.options
    qkv = draws.normal(options.tokens, (options.heads + 2 * options.kv_heads) * options.head_dim)
    q_weight, k_weight = (draws.normal(options.head_dim, mean=1.0, scale=0.1) for _ in range(2))
    return qkv, q_weight, k_weight


def _plain(setting: Setting, dtype: torch.dtype, q_weight: Tensor, k_weight: Tensor) -> Split:
    """Computes torch's norm of each head, then transformers' rotation."""
    options = setting.options
    sizes = [options.heads, options.kv_heads, options.kv_heads]
    weights = (q_weight.to(dtype), k_weight.to(dtype))
    cos, sin = (halves_twice(table, weights[0]) for table in tables_of(setting))

    def run(qkv: Tensor) -> Results:
        q, k, v = qkv.view(options.tokens, -1, options.head_dim).split(sizes, dim=1)
        q, k = (rms_norm(x, weight.shape, weight, EPS) for x, weight in zip((q, k), weights, strict=True))
        q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
        return q[0], k[0], v

    return run


def _engine(setting: Setting, kernels: Kernels, q_weight: Tensor, k_weight: Tensor) -> Split:
    options = setting.options
    norms = HeadNorms(q_weight=q_weight, k_weight=k_weight, q_sink=None, k_sink=None, eps=EPS)
    cos, sin = tables_of(setting)
    sizes = (options.heads, options.kv_heads, options.head_dim)
    return lambda qkv: norm_rotate(qkv, norms, cos, sin, *sizes, kernels)


def _splits(setting: Setting, q_weight: Tensor, k_weight: Tensor) -> dict[str, Split]:
    """Returns the contestants' functions, by name."""
    splits = {name: _engine(setting, kernels, q_weight, k_weight) for name, kernels in setting.backends.items()}
    plain = _plain(setting, setting.dtype, q_weight, k_weight)
    if TORCH in setting.peers:
        splits[TORCH] = plain
    if "compile" in setting.peers:
        splits["torch.compile"] = setting.compiled(plain)
    return splits


def _demand(setting: Setting, kind: str) -> Demand:
    from engine.kernels.triton.head_norm import bytes_moved

    options = setting.options
    moved = bytes_moved(options.tokens, options.heads, options.kv_heads, options.head_dim, setting.itemsize)
    return Demand(moved=moved[kind])


def _size(setting: Setting) -> str:
    options = setting.options
    return f"{options.tokens}x({options.heads}+2*{options.kv_heads})x{options.head_dim}"


def forward(setting: Setting) -> Case:
    """Returns the case of the forward pass, which leaves v in place."""
    qkv, *weights = _inputs(setting)
    return Case(
        size=_size(setting),
        demand=_demand(setting, "forward"),
        contestants={
            name: Contestant(run=lambda split=split: split(qkv)) for name, split in _splits(setting, *weights).items()
        },
        answer=lambda: _plain(setting, torch.float64, *weights)(qkv.double()),
    )


def backward(setting: Setting) -> Case:
    """Returns the case of the backward pass, to one gradient of the whole product."""
    options = setting.options
    qkv, *weights = _inputs(setting)
    draws = setting.draws("head norm, gradients")
    counts = (options.heads, options.kv_heads, options.kv_heads)
    gradients = tuple(draws.normal(options.tokens, count, options.head_dim) for count in counts)
    leaf = qkv.requires_grad_()

    def contestant(split: Split) -> Contestant:
        parts = split(leaf)
        return Contestant(run=lambda: torch.autograd.grad(parts, leaf, gradients, retain_graph=True))

    def answer() -> Results:
        wide = qkv.detach().double().requires_grad_()
        parts = _plain(setting, torch.float64, *weights)(wide)
        return torch.autograd.grad(parts, wide, [gradient.double() for gradient in gradients])

    return Case(
        size=_size(setting),
        demand=_demand(setting, "backward"),
        contestants={name: contestant(split) for name, split in _splits(setting, *weights).items()},
        answer=answer,
    )


CASES = {"query and key norm, RoPE": forward, "query and key norm, RoPE, backward": backward}
