"""Mamba2's state spaces (arXiv 2405.21060), by the kernels of the gated delta rule: see `delta` and `delta_gradients`.

    h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t^T        y_t = h_t c_t + d x_t

is that rule with b as keys, c as queries, dt a as decay and N = dt x, which no state changes: there is nothing to solve
and no W. The states of these kernels are [S, P], the other way round. Here are what makes N, and what takes the
gradients of N and of the decays to those of the inputs:

    dx = dt dN + d dy        ddt = x . dN + a ddecay        da = sum of dt ddecay        dd = sum of dy . x

Legend: T tokens, N heads, G groups (head n reads group n // (N / G)), P features of a head, S of its state per feature,
L tokens of a chunk, C chunks, R received states.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.chunks import cut, load_chunk
from engine.kernels.triton.delta import (
    CHUNK,
    Ends,
    Sizes,
    dense_features,
    head_tile,
    outputs,
    store_head_tile,
    walk_chunks,
)
from engine.kernels.triton.delta_gradients import gradients, walk_back
from engine.kernels.triton.launch import kernel
from engine.kernels.triton.partial_sums import Sum, sum_all


@kernel
def _weigh_kernel(
    x_ptr,
    x_stride_t,
    x_stride_n,
    dt_ptr,
    a_ptr,
    g_ptr,
    new_ptr,
    table_ptr,
    num_heads,
    num_values,
    LENGTH: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Computes N = dt x, and the cumulative sum of dt a."""
    start, _, _, end = load_chunk(table_ptr, tl.program_id(0))
    if start >= end:
        return
    head = tl.program_id(1)
    tokens_L = start + tl.arange(0, LENGTH)
    ok_L = tokens_L < end
    one = tokens_L * num_heads + head
    dt_L = tl.load(dt_ptr + one, mask=ok_L, other=0.0)
    tl.store(g_ptr + one, tl.cumsum(dt_L * tl.load(a_ptr + head), 0), mask=ok_L)
    for first in range(0, num_values, VALUES):
        values_V = first + tl.arange(0, VALUES)
        x_LV = head_tile(x_ptr, x_stride_t, x_stride_n, tokens_L, ok_L, head, values_V, num_values).to(tl.float32)
        new_LV = x_LV * dt_L[:, None]
        stride = num_heads * num_values
        store_head_tile(new_ptr, stride, num_values, tokens_L, ok_L, head, values_V, num_values, new_LV)


@kernel
def _inputs_kernel(
    x_ptr,
    x_stride_t,
    x_stride_n,
    dy_ptr,
    dnew_ptr,
    dt_ptr,
    a_ptr,
    d_ptr,
    ddecay_ptr,
    dx_ptr,
    ddt_ptr,
    da_ptr,
    dd_ptr,
    table_ptr,
    num_heads,
    num_values,
    LENGTH: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Computes dx and ddt, and the partial sums of da and dd [C, N]; programs of no chunk write zeros."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, _, _, end = load_chunk(table_ptr, chunk)
    tokens_L = start + tl.arange(0, LENGTH)
    ok_L = tokens_L < end
    one = tokens_L * num_heads + head
    dt_L = tl.load(dt_ptr + one, mask=ok_L, other=0.0)
    ddecay_L = tl.load(ddecay_ptr + one, mask=ok_L, other=0.0)
    ddt_L = ddecay_L * tl.load(a_ptr + head)
    past = 0.0
    if d_ptr is not None:
        past = tl.load(d_ptr + head).to(tl.float32)
    stride = num_heads * num_values
    dd_L = tl.zeros([LENGTH], tl.float32)
    for first in range(0, num_values, VALUES):
        values_V = first + tl.arange(0, VALUES)
        x_LV = head_tile(x_ptr, x_stride_t, x_stride_n, tokens_L, ok_L, head, values_V, num_values).to(tl.float32)
        dy_LV = head_tile(dy_ptr, stride, num_values, tokens_L, ok_L, head, values_V, num_values).to(tl.float32)
        dnew_LV = head_tile(dnew_ptr, stride, num_values, tokens_L, ok_L, head, values_V, num_values).to(tl.float32)
        ddt_L += tl.sum(x_LV * dnew_LV, 1)
        dd_L += tl.sum(x_LV * dy_LV, 1)
        dx_LV = dnew_LV * dt_L[:, None] + dy_LV * past
        store_head_tile(dx_ptr, stride, num_values, tokens_L, ok_L, head, values_V, num_values, dx_LV)
    tl.store(ddt_ptr + one, ddt_L, mask=ok_L)
    tl.store(da_ptr + chunk * num_heads + head, tl.sum(ddecay_L * dt_L, 0))
    tl.store(dd_ptr + chunk * num_heads + head, tl.sum(dd_L, 0))


def _turned(ends: Ends) -> Ends:
    """Returns the ends with initial states [R, N, S, P]."""
    return ends if ends.initial is None else replace(ends, initial=ends.initial.transpose(2, 3).contiguous())


def _weighed(x_TNP: Tensor, dt_TN: Tensor, a_N: Tensor, table: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    new_TNP = torch.empty(x_TNP.shape, dtype=x_TNP.dtype, device=x_TNP.device)
    g_TN = torch.empty(dt_TN.shape, dtype=torch.float32, device=x_TNP.device)
    _weigh_kernel[(table.shape[0], sizes.num_heads)](
        x_TNP,
        x_TNP.stride(0),
        x_TNP.stride(1),
        dt_TN,
        a_N,
        g_TN,
        new_TNP,
        table,
        sizes.num_heads,
        sizes.num_values,
        LENGTH=CHUNK,
        VALUES=sizes.values,
        num_warps=4,
    )
    return new_TNP, g_TN


def ssd_forward(
    x_TNP: Tensor,
    dt_TN: Tensor,
    a_N: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    d_N: Tensor | None,
    offsets: Tensor,
    ends: Ends,
) -> tuple[Tensor, Tensor | None]:
    """Computes the state space within pieces.

    Args:
        x_TNP: dense features; tokens and heads any distance apart.
        dt_TN, a_N: fp32.
        b_TGS, c_TGS: of the dtype of x; copied where they are columns of a wider tensor.
        d_N: or None.
        offsets: int32 [P + 1], of the pieces.
        ends: with initial states [R, N, P, S].

    Returns:
        y [T, N, P] in the dtype of x; the last states, fp32 [num_final, N, P, S], or None.
    """
    x_TNP, b_TGS, c_TGS = dense_features(x_TNP), b_TGS.contiguous(), c_TGS.contiguous()
    sizes, dt_TN = Sizes.of(b_TGS, x_TNP), dt_TN.contiguous()
    chunks = cut(offsets, sizes.num_tokens, CHUNK)
    new_TNP, g_TN = _weighed(x_TNP, dt_TN, a_N, chunks.table, sizes)
    states, final = walk_chunks(b_TGS, None, new_TNP, g_TN, chunks, offsets, _turned(ends), sizes)
    past = (None, None) if d_N is None else (x_TNP, d_N)
    y_TNP = outputs(c_TGS, b_TGS, new_TNP, g_TN, states, chunks, sizes, *past)
    return y_TNP, None if final is None else final.transpose(2, 3).contiguous()


def ssd_backward(
    dy: Tensor,
    d_final: Tensor | None,
    x_TNP: Tensor,
    dt_TN: Tensor,
    a_N: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    d_N: Tensor | None,
    offsets: Tensor,
    ends: Ends,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Computes the gradients of x, dt, a, b, c, d and the initial states; those of x, b and c are in their dtype."""
    x_TNP, b_TGS, c_TGS, dy = dense_features(x_TNP), b_TGS.contiguous(), c_TGS.contiguous(), dy.contiguous()
    sizes, dt_TN, ends = Sizes.of(b_TGS, x_TNP), dt_TN.contiguous(), _turned(ends)
    chunks = cut(offsets, sizes.num_tokens, CHUNK)
    new_TNP, g_TN = _weighed(x_TNP, dt_TN, a_N, chunks.table, sizes)
    begin = Ends(initial=ends.initial, initial_rows=ends.initial_rows)
    states, _ = walk_chunks(b_TGS, None, new_TNP, g_TN, chunks, offsets, begin, sizes)
    d_last = None if d_final is None else d_final.transpose(2, 3)
    dnew_TNP, dstates, d_initial = walk_back(c_TGS, b_TGS, None, dy, d_last, g_TN, states, chunks, offsets, ends, sizes)
    dc_TNS, db_TNS, ddecay_TN = gradients(
        c_TGS, b_TGS, None, g_TN, None, None, new_TNP, dnew_TNP, dy, states, dstates, None, None, chunks, sizes
    )
    dx_TNP, ddt_TN = torch.empty_like(new_TNP), torch.empty_like(g_TN)
    partial = torch.empty(2, chunks.num_chunks, 1, sizes.num_heads, dtype=torch.float32, device=dy.device)
    _inputs_kernel[(chunks.num_chunks, sizes.num_heads)](
        x_TNP,
        x_TNP.stride(0),
        x_TNP.stride(1),
        dy,
        dnew_TNP,
        dt_TN,
        a_N,
        d_N,
        ddecay_TN,
        dx_TNP,
        ddt_TN,
        partial[0],
        partial[1],
        chunks.table,
        sizes.num_heads,
        sizes.num_values,
        LENGTH=CHUNK,
        VALUES=sizes.values,
        num_warps=4,
        # two threads that add each other's product to their own would round one product each, and the sums that
        # threads and warps have of the same tokens would differ
        enable_fp_fusion=False,
    )
    sums = torch.empty(2, 1, sizes.num_heads, dtype=torch.float32, device=dy.device)
    sum_all([Sum(partial_SMN=partial[index], out_MN=sums[index]) for index in range(2)])
    copies = sizes.num_heads // sizes.num_key_heads
    db, dc = (one.unflatten(1, (-1, copies)).sum(2).to(b_TGS.dtype) for one in (db_TNS, dc_TNS))
    if d_initial is not None:
        d_initial = d_initial.transpose(2, 3).contiguous()
    return dx_TNP, ddt_TN, sums[0, 0], db, dc, None if d_N is None else sums[1, 0].to(d_N.dtype), d_initial


def bytes_moved(
    num_tokens: int, num_heads: int, num_groups: int, num_features: int, state_size: int, itemsize: int
) -> dict[str, int]:
    """Returns the compulsory bytes: inputs read once, results written once, dt in fp32."""
    whole = num_tokens * num_heads * num_features * itemsize
    shared = 2 * num_tokens * num_groups * state_size * itemsize
    single = num_tokens * num_heads * 4
    return {"forward": 2 * whole + shared + single, "backward": 3 * whole + 2 * shared + 2 * single}
