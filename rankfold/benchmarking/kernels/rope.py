"""Cases of rotary embedding: the fused product split into rotated q, k and v, and the three gradients merged again.

Legend: T tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from engine.kernels.reference import rope_tables
from engine.ops.rope import inverse_frequencies
from rankfold.benchmarking.case import TORCH, Case, Contestant, Results, deviation
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting


def tables_of(setting: Setting) -> tuple[Tensor, Tensor]:
    options = setting.options
    positions = torch.arange(options.tokens, device=setting.device) % options.length
    return rope_tables(positions, inverse_frequencies(options.head_dim, 10000.0).to(setting.device))


def halves_twice(table: Tensor, like: Tensor) -> Tensor:
    """Returns [1, T, D] in the dtype of q and k, with cos and sin in transformers' layout."""
    return torch.cat((table, table), dim=-1)[None].to(like.dtype)


def _plain_split(setting: Setting, qkv: Tensor, cos: Tensor, sin: Tensor) -> Results:
    """Computes transformers' rotation, on tables of its layout."""
    options = setting.options
    heads = qkv.view(1, options.tokens, -1, options.head_dim)
    q, k, v = heads.split([options.heads, options.kv_heads, options.kv_heads], dim=2)
    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    return q[0], k[0], v[0].contiguous()


def _demand(setting: Setting) -> Demand:
    from engine.kernels.triton.rope import bytes_moved

    options = setting.options
    moved = bytes_moved(options.tokens, options.heads, options.kv_heads, options.head_dim, setting.itemsize)
    return Demand(moved=moved["split"])


def _size(setting: Setting) -> str:
    options = setting.options
    return f"{options.tokens}x({options.heads}+2*{options.kv_heads})x{options.head_dim}"


def split(setting: Setting) -> Case:
    options = setting.options
    heads = options.heads + 2 * options.kv_heads
    qkv = setting.draws("rope split").normal(options.tokens, heads * options.head_dim)
    cos, sin = tables_of(setting)
    sizes = (options.heads, options.kv_heads, options.head_dim)
    tables = halves_twice(cos, qkv), halves_twice(sin, qkv)
    contestants = {
        name: Contestant(run=lambda kernels=kernels: kernels.split_rotate(qkv, cos, sin, *sizes))
        for name, kernels in setting.backends.items()
    }
    if TORCH in setting.peers:
        contestants[TORCH] = Contestant(run=lambda: _plain_split(setting, qkv, *tables))
    if "compile" in setting.peers:
        compiled = setting.compiled(lambda qkv, cos, sin: _plain_split(setting, qkv, cos, sin))
        contestants["torch.compile"] = Contestant(run=lambda: compiled(qkv, *tables))
    if "liger" in setting.peers:
        contestants["liger"] = _liger_split(setting, qkv, cos, sin)
    return Case(
        size=_size(setting),
        demand=_demand(setting),
        contestants=contestants,
        answer=lambda: _answer(setting, qkv, cos, sin),
    )


def _answer(setting: Setting, qkv: Tensor, cos: Tensor, sin: Tensor) -> Results:
    """Computes the answer in float64, differentiable."""
    wide = qkv.double()
    return _plain_split(setting, wide, halves_twice(cos, wide), halves_twice(sin, wide))


def _liger_split(setting: Setting, qkv: Tensor, cos: Tensor, sin: Tensor) -> Contestant:
    """Rotates q and k in place; v is unchanged."""
    from liger_kernel.ops import LigerRopeFunction

    options = setting.options
    heads = qkv.view(1, options.tokens, -1, options.head_dim)
    first = [part.contiguous() for part in heads.split([options.heads, options.kv_heads, options.kv_heads], dim=2)[:2]]
    q, k = (part.clone() for part in first)
    tables = halves_twice(cos, qkv), halves_twice(sin, qkv)

    def run() -> Results:
        turned = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), *tables)
        return [x.transpose(1, 2)[0] for x in turned]

    def reset() -> None:
        q.copy_(first[0])
        k.copy_(first[1])

    def error(results: Results) -> float:
        return deviation(results, _answer(setting, qkv, cos, sin)[:2])

    return Contestant(
        run=run, reset=reset, error=error, note="liger rotates q and k in place and does not touch v: it moves less."
    )


def merge(setting: Setting) -> Case:
    options = setting.options
    draws = setting.draws("rope merge")
    gradients = tuple(
        draws.normal(options.tokens, heads, options.head_dim)
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    )
    cos, sin = tables_of(setting)
    leaf = setting.draws("rope merge, product").normal(options.tokens, sum(g[0].numel() for g in gradients))
    leaf.requires_grad_()
    tables = halves_twice(cos, leaf), halves_twice(sin, leaf)

    def inverse(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Results:
        dq, dk = apply_rotary_pos_emb(dq[None], dk[None], cos, -sin, unsqueeze_dim=2)
        return (torch.cat((dq[0], dk[0], dv), dim=1).flatten(1),)

    contestants = {
        name: Contestant(run=lambda kernels=kernels: (kernels.split_rotate_backward(*gradients, cos, sin),))
        for name, kernels in setting.backends.items()
    }
    if TORCH in setting.peers:
        parts = _plain_split(setting, leaf, *tables)
        contestants[TORCH] = Contestant(run=lambda: torch.autograd.grad(parts, leaf, gradients, retain_graph=True))
    if "compile" in setting.peers:
        compiled = setting.compiled(inverse)
        contestants["torch.compile"] = Contestant(run=lambda: compiled(*gradients, *tables))

    def answer() -> Results:
        wide = [gradient.double() for gradient in gradients]
        return torch.autograd.grad(_answer(setting, leaf, cos, sin), leaf, wide)

    return Case(size=_size(setting), demand=_demand(setting), contestants=contestants, answer=answer)


CASES = {"RoPE split": split, "RoPE merge": merge}
