"""Causal attention within documents, and attention of one query a row to a cache in pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.kernels.native import attention, generation
from engine.kernels.records import Documents
from engine.ops.attention.packed import attention_by_document
from engine.ops.kernels.op import Cost, Op, like, wide


class Attention(Protocol):
    """Differentiable causal attention within documents; see engine.ops.attention.packed.causal_attention. A backend
    reads lengths on the host or offsets on the device, as it needs."""

    def __call__(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, documents: Documents, *, scale: float
    ) -> Tensor: ...


class _Attention(torch.autograd.Function):
    """Keeps q, k, v, the output and the log sum exp; the scores are never written.

    A GPU's flash attention adds up dq in fp32 and writes dk and dv for every query head before it sums those of a
    group; `on_gpu` says so.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, on_gpu: bool) -> Tensor:
        out, lse = like(q), wide(q, q.shape[:2])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.on_gpu = on_gpu
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, _, lse = ctx.saved_tensors
        gradients = like(q), like(k), like(v)
        if ctx.on_gpu:
            _buffers = wide(q, q.shape), wide(q, lse.shape), like(q), like(q)
        return *gradients, None


def attention_shape(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, scale: float, on_gpu: bool = False
) -> Tensor:
    """Stands for a library's or a compiled attention on the meta device."""
    out: Tensor = _Attention.apply(q, k, v, on_gpu)
    return out


ATTENTION = Op(
    reference=attention_by_document,
    native=attention.attention_by_document,
    # torch's own: its flash and cuDNN kernels are the libraries to beat on a GPU; for packed documents a run takes
    # engine.ops.attention.varlen in its place
    triton=attention_by_document,
    shape=attention_shape,
    triton_shape=partial(attention_shape, on_gpu=True),
)


class AttendPages(Protocol):
    """Attention of one query a row to the keys that the row has in pages of a pool; not differentiable. The plain spec
    is engine.kernels.reference.paged_attention."""

    def __call__(
        self,
        q_NHD: Tensor,
        keys_SKD: Tensor,
        values_SKD: Tensor,
        table_NP: Tensor,
        counts_N: Tensor,
        *,
        page: int,
        scale: float,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedAttention:
    """Attention that reads pages where they are.

    Args:
        attend: the kernel, an `AttendPages`.
        lacks: head size, whether scores are capped, whether heads have sinks -> the feature that the kernel does not
            compute, in words; None where it computes all.
    """

    attend: AttendPages
    lacks: Callable[[int, bool, bool], str | None]


def _pages_shape(q_NHD: Tensor, *_: object, **__: object) -> Tensor:
    return like(q_NHD)


def _pages_cost(
    q_NHD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    table_NP: Tensor,
    counts_N: Tensor,
    *,
    page: int,
    **_: object,
) -> Cost:
    """Counts all pages of the table, and two kernels: parts of each row's keys, and their sum."""
    keys = table_NP.numel() * page
    read = keys * (keys_SKD[0].nbytes + values_SKD[0].nbytes)
    return Cost(2, read + 2 * q_NHD.nbytes, 4.0 * keys * q_NHD[0].numel())


def _pages_lacks(head_dim: int, capped: bool, sinks: bool) -> str | None:
    """See `engine.kernels.triton.ops.paged_attention_lacks`, which imports Triton."""
    return None if head_dim <= 256 else f"heads of {head_dim} features"


PAGED_ATTENTION = Op(
    native=PagedAttention(attend=generation.paged_attention, lacks=generation.paged_attention_lacks),
    triton=PagedAttention(
        attend="engine.kernels.triton.paged_attention:paged_attention",  # type: ignore[arg-type]  # resolved late
        lacks="engine.kernels.triton.ops:paged_attention_lacks",  # type: ignore[arg-type]
    ),
    shape=PagedAttention(attend=_pages_shape, lacks=generation.paged_attention_lacks),
    triton_shape=PagedAttention(attend=_pages_shape, lacks=_pages_lacks),
    triton_cost=_pages_cost,
)
