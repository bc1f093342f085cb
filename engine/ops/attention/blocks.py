"""Attention of ranges of queries to ranges of keys, with the statistics that let several such results be merged.

Where the keys of a query are spread over several calls, each call's output is a softmax over its own keys alone:

    out_i = sum_j exp(s_ij - lse_i) v_j,    lse_i = log sum_j exp(s_ij),    s_ij = scale q_i . k_j

`merge_` turns two of them into that over both sets of keys. Backward needs no merging: given the output and lse of all
keys of a query, a call's gradients are the exact share of its own keys, and the shares add up:

    p_ij = exp(s_ij - lse_i),    dv_j = sum_i p_ij dout_i,    ds_ij = p_ij (dout_i . v_j - dout_i . out_i)
    dq_i = scale sum_j ds_ij k_j,    dk_j = scale sum_i ds_ij q_i

Knows nothing of ranks. Legend: T queries, N keys, H query heads, K key/value heads, D head size; Q and M are the
queries and keys of one block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels.native.attention import Segment, attention_backward, attention_forward, table_of
from engine.kernels.native.loader import native_status
from engine.spans import Block


class BlocksForward(Protocol):
    """See `AttentionBlocks`."""

    def __call__(
        self, q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, blocks: tuple[Block, ...], *, scale: float
    ) -> tuple[Tensor, Tensor]: ...


class BlocksBackward(Protocol):
    """See `AttentionBlocks`."""

    def __call__(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        blocks: tuple[Block, ...],
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBlocks:
    """One backend of ring attention. Head h reads key/value head h // (H / K); every last dimension is contiguous.

    Args:
        name: as it is asked for.
        forward: q [T, H, D], k and v [N, K, D], blocks that share no query, scale -> out [T, H, D] in q's dtype or a
            wider one, lse [T, H] in fp32 (fp64 for fp64). Undefined for queries in no block.
        backward: dout, q, k, v, out, lse, blocks that share neither query nor key, scale -> dq, dk, dv in their
            tensor's dtype or a wider one. `out` (q's dtype) and `lse` are those of all keys of each query, also those
            of other calls. Undefined for queries and keys in no block.
    """

    name: str
    forward: BlocksForward
    backward: BlocksBackward


def merge_(out_QHD: Tensor, lse_QH: Tensor, other_QHD: Tensor, other_lse_QH: Tensor) -> None:
    """Adds the keys behind `other` to those behind `out` and `lse`, in place.

    In the dtype of `out`, fp32 or wider. The other keys' share of the sum of exponentials is
    exp(other_lse) / (exp(lse) + exp(other_lse)), written so that nothing overflows.
    """
    share = torch.sigmoid(other_lse_QH - lse_QH)
    out_QHD.lerp_(other_QHD.to(out_QHD.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse_QH, other_lse_QH, out=lse_QH)


def merge_round_(
    out_THD: Tensor,
    lse_TH: Tensor,
    blocks: AttentionBlocks,
    inputs: tuple[Tensor, Tensor, Tensor],
    round_blocks: tuple[Block, ...],
    *,
    scale: float,
) -> None:
    """Adds the keys of some blocks to those behind `out` and `lse`, in place.

    Args:
        out_THD, lse_TH: fp32 or wider; computed where the blocks have queries.
        inputs: q [T, H, D], k and v [N, K, D].
        round_blocks: none of them share queries or keys.
    """
    found, found_lse = blocks.forward(*inputs, round_blocks, scale=scale)
    for start, stop in (block.query for block in round_blocks):
        merge_(out_THD[start:stop], lse_TH[start:stop], found[start:stop], found_lse[start:stop])


def add_round_(
    gradients: tuple[Tensor, Tensor, Tensor],
    blocks: AttentionBlocks,
    saved: tuple[Tensor, ...],
    round_blocks: tuple[Block, ...],
    *,
    scale: float,
) -> None:
    """Adds the gradients of some blocks to others, in place.

    Args:
        gradients: dq [T, H, D], dk and dv [N, K, D], fp32 or wider.
        saved: dout, q, k, v, out and lse; see `AttentionBlocks`.
        round_blocks: none of them share queries or keys.
    """
    found = blocks.backward(*saved, round_blocks, scale=scale)
    for query, key, _ in round_blocks:
        for total, part, (start, stop) in zip(gradients, found, (query, key, key), strict=True):
            total[start:stop] += part[start:stop]


# Plain torch: the reference.


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Returns scores [K, H / K, Q, M], minus infinity where a query does not see a key."""
    scores = torch.einsum("qkgd,mkd->kgqm", q, k) * scale
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf
        )
    return scores


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """Groups heads: [Q, H, ...] -> [Q, K, H / K, ...] in fp32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.unflatten(1, (num_kv_heads, -1))


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q4 = _grouped(q, k.shape[1])
    scores = _scores(q4, k.to(q4.dtype), causal, scale)
    out = torch.einsum("kgqm,mkd->qkgd", scores.softmax(-1), v.to(q4.dtype))
    return out.flatten(1, 2), scores.logsumexp(-1).flatten(0, 1).t()


def _reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, out = (_grouped(x, k.shape[1]) for x in (dout, q, out))
    k, v = k.to(q.dtype), v.to(q.dtype)
    p = torch.exp(_scores(q, k, causal, scale) - lse.t().unflatten(0, q.shape[1:3]).unsqueeze(-1))
    dv = torch.einsum("kgqm,qkgd->mkd", p, dout)
    dp = torch.einsum("qkgd,mkd->kgqm", dout, v)
    ds = p * (dp - (dout * out).sum(-1).permute(1, 2, 0).unsqueeze(-1)) * scale
    return torch.einsum("kgqm,mkd->qkgd", ds, k).flatten(1, 2), torch.einsum("kgqm,qkgd->mkd", ds, q), dv


# torch's fused kernels. They take [1, heads, tokens, D], here as views.


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(0, 1).unsqueeze(0) for x in tensors)


def _tokens_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.squeeze(0).transpose(0, 1) for x in tensors)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_first(q, k, v), 0.0, causal, scale=scale
    )
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).t()


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_heads_first(dout, q, k, v, out), lse.t().unsqueeze(0), 0.0, causal, scale=scale
    )
    return _tokens_first(*gradients)


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *_heads_first(q, k, v), 0.0, causal, False, scale=scale
    )
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).t()


def _cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    # the kernel reads lse as a dense [1, H, Q]; without dropout it draws nothing, but its state must be a tensor
    no_state = torch.empty(2, dtype=torch.uint64, device=q.device)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *_heads_first(dout, q, k, v, out),
        lse.t().contiguous().unsqueeze(0),
        None,
        None,
        q.shape[0],
        k.shape[0],
        0.0,
        causal,
        no_state,
        no_state,
        scale=scale,
    )
    return _tokens_first(*gradients)


# One block after the other.


def _each_forward(
    one: Callable[..., tuple[Tensor, Tensor]],
    q_THD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    blocks: tuple[Block, ...],
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    out, lse = torch.empty_like(q_THD, dtype=wide), q_THD.new_empty(q_THD.shape[:2], dtype=wide)
    for query, key, causal in blocks:
        queries, keys = slice(*query), slice(*key)
        out[queries], lse[queries] = one(q_THD[queries], k_NKD[keys], v_NKD[keys], causal, scale)
    return out, lse


def _each_backward(
    one: Callable[..., tuple[Tensor, ...]],
    dout_THD: Tensor,
    q_THD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    blocks: tuple[Block, ...],
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    dq, dk, dv = (torch.empty_like(x, dtype=wide) for x in (q_THD, k_NKD, v_NKD))
    for query, key, causal in blocks:
        of_query = (x[slice(*query)] for x in (dout_THD, q_THD))
        of_key = (x[slice(*key)] for x in (k_NKD, v_NKD))
        statistics = (x[slice(*query)] for x in (out_THD, lse_TH))
        dq[slice(*query)], dk[slice(*key)], dv[slice(*key)] = one(*of_query, *of_key, *statistics, causal, scale)
    return dq, dk, dv


def one_by_one(
    name: str, forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., tuple[Tensor, ...]]
) -> AttentionBlocks:
    return AttentionBlocks(
        name=name, forward=partial(_each_forward, forward), backward=partial(_each_backward, backward)
    )


# All blocks in one call of the compiled kernel.


def _segments(blocks: tuple[Block, ...]) -> Tensor:
    return table_of(
        Segment(first_query=query.start, queries=query.length, first_key=key.start, keys=key.length, causal=causal)
        for query, key, causal in blocks
    )


def _native_forward(
    q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, blocks: tuple[Block, ...], *, scale: float
) -> tuple[Tensor, Tensor]:
    return attention_forward(q_THD, k_NKD, v_NKD, _segments(blocks), scale=scale)


def _native_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    blocks: tuple[Block, ...],
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return attention_backward(dout_THD, q_THD, k_NKD, v_NKD, out_THD, lse_TH, _segments(blocks), scale=scale)


REFERENCE_BLOCKS = one_by_one("reference", _reference_forward, _reference_backward)
CPU_BLOCKS = one_by_one("torch_cpu", _cpu_forward, _cpu_backward)
CUDA_BLOCKS = one_by_one("torch_cuda", _cuda_forward, _cuda_backward)
NATIVE_BLOCKS = AttentionBlocks(name="native", forward=_native_forward, backward=_native_backward)

_BY_NAME = {blocks.name: blocks for blocks in (REFERENCE_BLOCKS, CPU_BLOCKS, CUDA_BLOCKS, NATIVE_BLOCKS)}


def choose_attention_blocks(name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBlocks:
    """Returns the backend for ring attention of tensors of `dtype` on `device`.

    Args:
        name: "auto" (the fastest that can run), "reference", "torch_cpu", "torch_cuda" or "native".

    Raises:
        UserError: the name is unknown, or that backend cannot run here; says why.
    """
    if name == "auto":
        order = (NATIVE_BLOCKS, CPU_BLOCKS, CUDA_BLOCKS, REFERENCE_BLOCKS)
        return next(blocks for blocks in order if _why_not(blocks, device, dtype, head_dim) is None)
    if name not in _BY_NAME:
        raise UserError(f"there are no attention blocks {name}: use auto, {', '.join(sorted(_BY_NAME))}.")
    why = _why_not(_BY_NAME[name], device, dtype, head_dim)
    if why is not None:
        raise UserError(f"attention blocks {name} cannot run: {why}; use auto or reference.")
    return _BY_NAME[name]


def _why_not(blocks: AttentionBlocks, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if blocks is NATIVE_BLOCKS:
        if device.type != "cpu" or dtype != torch.float32:
            return f"they compute in float32 on a CPU, not in {dtype} on {device.type}"
        return None if native_status().available else native_status().reason
    if blocks is CPU_BLOCKS and device.type != "cpu":
        return f"they run on a CPU, not on {device.type}"
    if blocks is CUDA_BLOCKS:
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return f"they compute in bfloat16 or float16 on a GPU, not in {dtype} on {device.type}"
        if head_dim % 8 or head_dim > 256:
            return f"they need a head size that is a multiple of 8 up to 256, not {head_dim}"
    return None
