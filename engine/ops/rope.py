"""Rotary position embedding, and the split of a fused query-key-value product.

Splitting and rotating are one op: q, k and v leave it contiguous, the fused product is free at once, and backward
writes one fused gradient without a concatenation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from engine.ops.kernels import Kernels


def inverse_frequencies(
    head_dim: int,
    theta: float,
    *,
    kind: str = "default",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_length: int = 8192,
    factors: tuple[float, ...] = (),
) -> Tensor:
    """Returns fp32 [head_dim / 2] angular frequencies theta^(-2i/d), scaled.

    Args:
        kind: "default"; "linear" divides all by `factor`; "llama3" divides the low frequencies by `factor`, leaves the
            high ones, and blends between the wavelengths original_length / low_freq_factor and
            original_length / high_freq_factor (Llama 3.1); "longrope" divides each by its own of `factors`
            (arXiv 2402.13753).
    """
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim)
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / factor
    if kind == "longrope":
        return plain / torch.tensor(factors, dtype=torch.float32)
    assert kind == "llama3", kind
    turns = original_length * plain / (2 * math.pi)
    blend = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return plain * (blend + (1.0 - blend) / factor)


def yarn_frequencies(
    head_dim: int, theta: float, *, factor: float, original_length: int, turns: tuple[float, float], whole_pairs: bool
) -> Tensor:
    """Returns fp32 [head_dim / 2] angular frequencies scaled by YaRN (arXiv 2309.00071, section 3.2).

    Pairs of features that turn often within the length of pretraining keep their frequency, those that turn seldom are
    slowed down by `factor`, and in between the two are blended by the pair's number.

    Args:
        turns: the turns of the slowest and the fastest pair of the band in between within `original_length`.
        whole_pairs: the ends of that band are moved out to whole pairs.
    """
    low, high = (
        head_dim * math.log(original_length / (count * 2 * math.pi)) / (2 * math.log(theta))
        for count in reversed(turns)
    )
    if whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    plain = theta ** (torch.arange(0, head_dim, 2).to(torch.float32) / head_dim)
    width = high - low or 0.001
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return slowed / (factor * plain) + (1.0 - slowed) / plain


class _SplitRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return kernels.split_rotate(qkv, cos, sin, num_heads, num_kv_heads, head_dim)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return ctx.kernels.split_rotate_backward(dq, dk, dv, cos, sin), *([None] * 6)


def split_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits and rotates: fused product [T, (H + 2K) * D] -> rotated q [T, H, D], rotated k [T, K, D], v [T, K, D]."""
    return _SplitRotate.apply(qkv, cos, sin, num_heads, num_kv_heads, head_dim, kernels)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [T, H, D] by plain autograd arithmetic; for queries and keys that were normalised after the split, and
    for heads of which the tables [T, R / 2] turn the first R features only."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def neighbours_apart(x: Tensor, width: int) -> Tensor:
    """Returns [..., D] where pairs of neighbours among the first `width` features lie as pairs of two halves do.

    Scores are the same in any order of features that queries and keys share, so that tables of halves turn both.
    """
    turned, rest = x.split([width, x.shape[-1] - width], dim=-1)
    return torch.cat((turned[..., 0::2], turned[..., 1::2], rest), dim=-1)
