"""Cases of rotary embedding: the fused product split into rotated q, k and v, and the three gradients merged again.

Legend: T tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.reference import rope_tables
from engine.ops.rope import inverse_frequencies
from rankfold.benchmarking.case import Case, Contestant, Results, by_autograd, calling, deviation
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting
from rankfold.benchmarking.oracles import halves_twice, rotated_heads, with_gradients


def tables_of(setting: Setting) -> tuple[Tensor, Tensor]:
    options = setting.options
    positions = torch.arange(options.tokens, device=setting.device) % options.length
    return rope_tables(positions, inverse_frequencies(options.head_dim, 10000.0).to(setting.device))


def wide_tables(setting: Setting, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns cos and sin in transformers' layout."""
    return tuple(halves_twice(table, dtype) for table in tables_of(setting))


def _plain_split(setting: Setting, qkv: Tensor, cos: Tensor, sin: Tensor) -> Results:
    """Computes transformers' rotation, on tables of its layout; v is copied, as the engine's is."""
    q, k, v = rotated_heads(qkv, cos, sin, setting.options.heads, setting.options.kv_heads)
    return q, k, v.contiguous()


def _answer(setting: Setting, qkv: Tensor) -> Results:
    """Computes the answer in float64, differentiable."""
    return _plain_split(setting, qkv.double(), *wide_tables(setting, torch.float64))


def _demand(setting: Setting) -> Demand:
    options = setting.options
    return Demand(
        moved=setting.moved("rope", options.tokens, options.heads, options.kv_heads, options.head_dim)["split"]
    )


def heads_sizes(setting: Setting) -> tuple[int, int, int, int]:
    """Returns T, H, K and D."""
    options = setting.options
    return options.tokens, options.heads, options.kv_heads, options.head_dim


def heads_size(setting: Setting) -> str:
    """Returns the size of the product of queries, keys and values."""
    tokens, heads, kv_heads, head_dim = heads_sizes(setting)
    return f"{tokens}x({heads}+2*{kv_heads})x{head_dim}"


def head_gradients(setting: Setting, name: str) -> list[Tensor]:
    """Returns drawn gradients of q, k and v, [T, heads, D]."""
    options, draws = setting.options, setting.draws(name)
    counts = (options.heads, options.kv_heads, options.kv_heads)
    return [draws.normal(options.tokens, count, options.head_dim) for count in counts]


def split(setting: Setting) -> Case:
    options = setting.options
    width = (options.heads + 2 * options.kv_heads) * options.head_dim
    qkv = setting.draws("rope split").normal(options.tokens, width)
    cos, sin = tables_of(setting)

    def plain(qkv: Tensor, cos: Tensor, sin: Tensor) -> Results:
        return _plain_split(setting, qkv, cos, sin)

    return Case(
        size=heads_size(setting),
        demand=_demand(setting),
        contestants=setting.contestants(
            lambda kernels: calling(kernels.split_rotate, qkv, cos, sin, *heads_sizes(setting)[1:]),
            **setting.plain(plain, qkv, *wide_tables(setting, qkv.dtype)),
            liger=lambda: _liger_split(setting, qkv),
        ),
        answer=lambda: _answer(setting, qkv),
    )


def _liger_split(setting: Setting, qkv: Tensor) -> Contestant:
    """Rotates q and k in place; v is unchanged."""
    from liger_kernel.ops import LigerRopeFunction

    options = setting.options
    heads = qkv.view(1, options.tokens, -1, options.head_dim)
    first = [part.contiguous() for part in heads.split([options.heads, options.kv_heads, options.kv_heads], dim=2)[:2]]
    q, k = (part.clone() for part in first)
    tables = wide_tables(setting, qkv.dtype)

    def run() -> Results:
        turned = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), *tables)
        return [x.transpose(1, 2)[0] for x in turned]

    def reset() -> None:
        q.copy_(first[0])
        k.copy_(first[1])

    return Contestant(
        run=run,
        reset=reset,
        error=lambda found: deviation(found, _answer(setting, qkv)[:2]),
        note="liger rotates q and k in place and does not touch v: it moves less.",
    )


def merge(setting: Setting) -> Case:
    gradients = head_gradients(setting, "rope merge")
    cos, sin = tables_of(setting)
    leaf = setting.draws("rope merge, product").normal(setting.options.tokens, sum(g[0].numel() for g in gradients))
    tables = wide_tables(setting, leaf.dtype)

    def inverse(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Results:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        dq, dk = apply_rotary_pos_emb(dq[None], dk[None], cos, -sin, unsqueeze_dim=2)
        return (torch.cat((dq[0], dk[0], dv), dim=1).flatten(1),)

    return Case(
        size=heads_size(setting),
        demand=_demand(setting),
        contestants=setting.contestants(
            lambda kernels: calling(kernels.split_rotate_backward, *gradients, cos, sin),
            torch=lambda: by_autograd(lambda leaf: _plain_split(setting, leaf, *tables), leaf, gradients),
            compile=lambda: setting.compiled(inverse, *gradients, *tables),
        ),
        answer=lambda: with_gradients(lambda leaf: _answer(setting, leaf), (leaf,), gradients)[3:],
    )


CASES = {"RoPE split": split, "RoPE merge": merge}
