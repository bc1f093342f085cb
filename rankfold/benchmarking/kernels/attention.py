"""Causal attention, forward and backward, on documents of one length.

Legend: T tokens, H query heads, K key/value heads, D head dimension, S tokens of a document.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels.records import Documents
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import TORCH, Case, Contestant, Results
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting

_SDPA = {
    "torch, flash": SDPBackend.FLASH_ATTENTION,
    "torch, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch, efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _dense(length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes attention by torch's own choice of a kernel; [T, H, D] in and out."""
    num = q.shape[0] // length
    q4, k4, v4 = (x.unflatten(0, (num, -1)).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q4, k4, v4, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


def causal(setting: Setting) -> Case:
    options, draws = setting.options, setting.draws("attention")
    first = [
        draws.normal(options.tokens, heads, options.head_dim)
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    ]
    dout = draws.normal(*first[0].shape)
    leaves = [tensor.clone().requires_grad_() for tensor in first]
    lengths = (options.length,) * (options.tokens // options.length)
    offsets = torch.arange(len(lengths) + 1, dtype=torch.int32, device=setting.device) * options.length
    documents = Documents(lengths=lengths, offsets=offsets, max_length=options.length)

    def contestant(attend: Callable[..., Tensor], note: str = "") -> Contestant:
        def run() -> Results:
            out = attend(*leaves)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

        return Contestant(run=run, note=note)

    def engine(kernels: Kernels) -> Contestant:
        return contestant(lambda q, k, v: kernels.attention(q, k, v, documents, scale=options.head_dim**-0.5))

    contestants = {name: engine(kernels) for name, kernels in setting.backends.items()}
    if TORCH in setting.peers:
        contestants[TORCH] = contestant(lambda *qkv: _dense(options.length, *qkv))
        contestants |= {name: contestant(_pinned(setting, backend)) for name, backend in _usable(setting, leaves)}
    if "flash-attn" in setting.peers:
        from flash_attn import flash_attn_func

        contestants["flash-attn"] = contestant(_flash(setting, flash_attn_func))
    if "flash-attn-4" in setting.peers:
        from flash_attn.cute import flash_attn_func as newer

        contestants["flash-attn-4"] = contestant(_flash(setting, lambda *qkv, causal: newer(*qkv, causal=causal)[0]))

    return Case(
        size=f"{len(lengths)}x{options.length}, {options.heads}/{options.kv_heads} heads of {options.head_dim}",
        demand=_demand(setting),
        contestants=contestants,
        answer=lambda: _answer(options.length, first, dout),
        trace=True,
    )


def _answer(length: int, qkv: list[Tensor], dout: Tensor) -> Results:
    """Computes the answer in float64 by plain products, one document at a time, since all its scores are kept."""
    parts = []
    for start in range(0, dout.shape[0], length):
        document = slice(start, start + length)
        wide = [tensor[document].double().requires_grad_() for tensor in qkv]
        with sdpa_kernel(SDPBackend.MATH):
            out = _dense(length, *wide)
            parts.append((out.detach(), *torch.autograd.grad(out, wide, dout[document].double())))
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


def _demand(setting: Setting) -> Demand:
    """Returns the demand. Half of the square is masked: 2 T S H D operations forward; backward recomputes scores and
    has 2.5 times as many. Forward reads q, k, v and writes out; backward reads those and dout and writes three
    gradients.
    """
    options = setting.options
    query = options.tokens * options.heads * options.head_dim
    key = options.tokens * options.kv_heads * options.head_dim
    return Demand(
        moved=(6 * query + 6 * key) * setting.itemsize,
        operations=7 * options.tokens * options.length * options.heads * options.head_dim,
    )


def _usable(setting: Setting, leaves: list[Tensor]) -> list[tuple[str, SDPBackend]]:
    """Returns torch's kernels that take this problem; it has one on a CPU."""
    if setting.device.type != "cuda":
        return []
    found = []
    for name, backend in _SDPA.items():
        try:
            _pinned(setting, backend)(*leaves)
        except RuntimeError:  # "No available kernel": this GPU, dtype or head size has none
            continue
        found.append((name, backend))
    return found


def _pinned(setting: Setting, backend: SDPBackend) -> Callable[..., Tensor]:
    def attend(*qkv: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return _dense(setting.options.length, *qkv)

    return attend


def _flash(setting: Setting, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapts a package's function, which takes [B, S, H, D]."""
    num = setting.options.tokens // setting.options.length

    def attend(*qkv: Tensor) -> Tensor:
        out = function(*(x.unflatten(0, (num, -1)) for x in qkv), causal=True)
        return out.flatten(0, 1)

    return attend


CASES = {"causal attention, forward and backward": causal}
