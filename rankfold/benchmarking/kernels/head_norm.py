"""RMSNorm of each query and key head and their rotation: forward, and backward without the weights' gradients.

Legend: T tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.ops.head_norm import HeadNorms, norm_rotate
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import Case, Contestant, Results, by_autograd, calling
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.rope import head_gradients, heads_size, heads_sizes, tables_of, wide_tables
from rankfold.benchmarking.kernels.setting import Setting
from rankfold.benchmarking.oracles import EPS, rms_norm, rotated_heads, with_gradients

Split = Callable[[Tensor], Results]
"""[q | k | v] -> q, k and v."""


def _inputs(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the product [T, (H + 2K) D], and the weights of the query and of the key norm."""
    draws, options = setting.draws("head norm"), setting.options
    qkv = draws.normal(options.tokens, (options.heads + 2 * options.kv_heads) * options.head_dim)
    q_weight, k_weight = (draws.normal(options.head_dim, mean=1.0, scale=0.1) for _ in range(2))
    return qkv, q_weight, k_weight


def _plain(setting: Setting, dtype: torch.dtype, *weights: Tensor) -> Split:
    """Computes torch's norm of each head, then transformers' rotation."""
    options, of_q_and_k = setting.options, [weight.to(dtype) for weight in weights]
    tables = wide_tables(setting, dtype)

    def normed(*parts: Tensor) -> list[Tensor]:
        return [rms_norm(x, weight) for x, weight in zip(parts, of_q_and_k, strict=True)]

    return lambda qkv: rotated_heads(qkv, *tables, options.heads, options.kv_heads, normed)


def _contestants(
    setting: Setting, contestant: Callable[[Split], Contestant], q_weight: Tensor, k_weight: Tensor
) -> dict[str, Contestant]:
    """Returns the contestants of every function that splits the product."""
    norms = HeadNorms(q_weight=q_weight, k_weight=k_weight, q_sink=None, k_sink=None, eps=EPS)
    cos, sin = tables_of(setting)
    plain = _plain(setting, setting.dtype, q_weight, k_weight)

    def engine(kernels: Kernels) -> Contestant:
        return contestant(lambda qkv: norm_rotate(qkv, norms, cos, sin, *heads_sizes(setting)[1:], kernels))

    return setting.contestants(
        engine, torch=lambda: contestant(plain), compile=lambda: contestant(torch.compile(plain, dynamic=False))
    )


def _demand(setting: Setting, kind: str) -> Demand:
    return Demand(moved=setting.moved("head_norm", *heads_sizes(setting))[kind])


def forward(setting: Setting) -> Case:
    """Returns the case of the forward pass, which leaves v in place."""
    qkv, *weights = _inputs(setting)
    return Case(
        size=heads_size(setting),
        demand=_demand(setting, "forward"),
        contestants=_contestants(setting, lambda split: calling(split, qkv), *weights),
        answer=lambda: _plain(setting, torch.float64, *weights)(qkv.double()),
    )


def backward(setting: Setting) -> Case:
    """Returns the case of the backward pass, to one gradient of the whole product."""
    qkv, *weights = _inputs(setting)
    gradients = head_gradients(setting, "head norm, gradients")
    return Case(
        size=heads_size(setting),
        demand=_demand(setting, "backward"),
        contestants=_contestants(setting, lambda split: by_autograd(split, qkv, gradients), *weights),
        answer=lambda: with_gradients(_plain(setting, torch.float64, *weights), (qkv,), gradients)[3:],
    )


CASES = {"query and key norm, RoPE": forward, "query and key norm, RoPE, backward": backward}
