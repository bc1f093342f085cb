"""The gated delta rule (arXiv 2412.06464), forward, in chunks of L tokens: kernels, and the launchers of a whole pass.

A head has a state S [K, V]. With k and q normalised and q scaled,

    S_t = (I - beta_t k_t k_t^T) exp(decay_t) S_{t-1} + beta_t k_t v_t^T        out_t = S_t^T q_t

Within a chunk that begins with S, with g the cumulative sum of decay from the chunk's start and g_L its last,

    A_ij = beta_i exp(g_i - g_j) k_i . k_j for j < i        X = (I + A)^-1
    U = X (beta v)      W = X (beta exp(g) k)      N = U - W S
    out = exp(g) q S + P N,  P_ij = exp(g_i - g_j) q_i . k_j for j <= i
    S' = exp(g_L) S + (exp(g_L - g) k)^T N

N is written over U. X, which is a triangular solve, is kept for backward (see `delta_gradients`); U, W and the states
are not: they are computed again, by the same kernels. Only the walk over the chunks of a piece is sequential, one
program for each piece, head and block of V; all else is one program for each chunk and head.

X comes of rows of blocks of 16, one after the other in fp32, all blocks at once, and then of two steps that double the
blocks: with D the inverse of the diagonal blocks and E what lies between two of them, the inverse of both is D - D E D.

Legend: T tokens, G key heads, N value heads (head n reads key head n // (N / G)), K, V features of a key and a value, L
tokens of a chunk, C chunks, P pieces, R received states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.chunks import ChunkTable, cut, load_chunk
from engine.kernels.triton.launch import SMALLEST_DOT, ceil_div, dot_options, kernel, num_warps, power_of_2

CHUNK = 64
"""L."""
_EPS = 1e-6
"""Of the norms of queries and keys."""


@triton.jit
def head_tile(ptr, stride_t, stride_n, tokens_L, ok_L, head, features_F, num_features):
    """Loads the features of one head of some tokens as they are, [L, F]."""
    ok_LF = ok_L[:, None] & (features_F < num_features)[None, :]
    place = tokens_L[:, None] * stride_t + head.to(tl.int64) * stride_n + features_F[None, :]
    return tl.load(ptr + place, mask=ok_LF, other=0.0)


@triton.jit
def store_head_tile(ptr, stride_t, stride_n, tokens_L, ok_L, head, features_F, num_features, value_LF):
    ok_LF = ok_L[:, None] & (features_F < num_features)[None, :]
    place = tokens_L[:, None] * stride_t + head.to(tl.int64) * stride_n + features_F[None, :]
    tl.store(ptr + place, value_LF, mask=ok_LF)


@triton.jit
def state_place(chunk, num_heads, head, num_keys, num_values, keys_K, values_V):
    """Returns offsets [K, V] of a state among [C, N, K, V], and which exist."""
    base = (chunk.to(tl.int64) * num_heads + head) * num_keys * num_values
    ok_KV = (keys_K < num_keys)[:, None] & (values_V < num_values)[None, :]
    return base + keys_K[:, None] * num_values + values_V[None, :], ok_KV


@triton.jit
def decays_between(g_L, ok_L, LENGTH: tl.constexpr):
    """Returns exp(g_i - g_j) for j <= i, else 0: what lies above would overflow."""
    order = tl.arange(0, LENGTH)
    ok_LL = (order[:, None] >= order[None, :]) & ok_L[:, None]
    return tl.where(ok_LL, tl.exp(tl.where(ok_LL, g_L[:, None] - g_L[None, :], 0.0)), 0.0)


@kernel
def _normalise_kernel(
    x_ptr,
    stride_t,
    stride_g,
    y_ptr,
    num_rows,
    num_heads,
    num_keys,
    scale,
    eps,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    rows_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    keys_K = tl.arange(0, KEYS)
    ok_RK = (rows_R < num_rows)[:, None] & (keys_K < num_keys)[None, :]
    place_R = (rows_R // num_heads) * stride_t + (rows_R % num_heads) * stride_g
    x_RK = tl.load(x_ptr + place_R[:, None] + keys_K[None, :], mask=ok_RK, other=0.0).to(tl.float32)
    y_RK = x_RK * (tl.rsqrt(tl.sum(x_RK * x_RK, 1) + eps) * scale)[:, None]
    tl.store(y_ptr + rows_R[:, None] * num_keys + keys_K[None, :], y_RK, mask=ok_RK)


@triton.jit
def inverse(at_LL, SOLVE: tl.constexpr, LENGTH: tl.constexpr):
    """Returns X = (I + A)^-1 of A^T, which is 0 on and below its diagonal.

    The rows of X are found from the columns of A: within blocks of 16 one by one, then from what lies between blocks.
    """
    order = tl.arange(0, LENGTH)
    x_LL = tl.where(order[:, None] == order[None, :], 1.0, 0.0)
    same_LL = (order[:, None] // 16) == (order[None, :] // 16)
    for row in range(1, 16):
        # the row of each diagonal block, as a column
        row_L = tl.sum(tl.where(same_LL & (order % 16 == row)[None, :], at_LL, 0.0), 1)
        known_L = tl.sum(row_L[:, None] * x_LL, 0)
        x_LL -= tl.where(same_LL & (order % 16 == row)[:, None], known_L[None, :], 0.0)
    for size in tl.static_range(4, 6):
        between_LL = ((order[:, None] >> size) != (order[None, :] >> size)) & (
            (order[:, None] >> (size + 1)) == (order[None, :] >> (size + 1))
        )
        e_LL = tl.trans(tl.where(between_LL, at_LL, 0.0))
        half_LL = tl.dot(e_LL, x_LL, input_precision=SOLVE)
        x_LL -= tl.dot(x_LL, half_LL, input_precision=SOLVE)
    return x_LL


@kernel
def _solve_kernel(
    k_ptr,
    decay_ptr,
    beta_ptr,
    g_ptr,
    x_ptr,
    table_ptr,
    num_heads,
    num_key_heads,
    num_keys,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Computes g [T, N] and X [T, N, L]."""
    start, _, _, end = load_chunk(table_ptr, tl.program_id(0))
    if start >= end:
        return
    head = tl.program_id(1)
    order = tl.arange(0, LENGTH)
    tokens_L, keys_K = start + order, tl.arange(0, KEYS)
    ok_L = tokens_L < end
    one = tokens_L * num_heads + head
    g_L = tl.cumsum(tl.load(decay_ptr + one, mask=ok_L, other=0.0), 0)
    tl.store(g_ptr + one, g_L, mask=ok_L)
    beta_L = tl.load(beta_ptr + one, mask=ok_L, other=0.0)
    key_head = head // (num_heads // num_key_heads)
    k_LK = head_tile(k_ptr, num_key_heads * num_keys, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys).to(DOT)
    products_LL = tl.dot(k_LK, tl.trans(k_LK), input_precision=PRECISION)
    # A transposed, because the products are symmetric
    above_LL = (order[:, None] < order[None, :]) & ok_L[None, :]
    apart_LL = tl.where(above_LL, g_L[None, :] - g_L[:, None], 0.0)
    at_LL = tl.where(above_LL, products_LL * tl.exp(apart_LL) * beta_L[None, :], 0.0)
    x_LL = inverse(at_LL, SOLVE, LENGTH)
    store_head_tile(x_ptr, num_heads * LENGTH, LENGTH, tokens_L, ok_L, head, order, LENGTH, x_LL)


@kernel
def _rows_kernel(
    x_ptr,
    k_ptr,
    v_ptr,
    v_stride_t,
    v_stride_n,
    g_ptr,
    beta_ptr,
    w_ptr,
    u_ptr,
    table_ptr,
    num_heads,
    num_key_heads,
    num_keys,
    num_values,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Computes W [T, N, K] and U [T, N, V]; without g, of keys that decayed from the chunk's start already."""
    start, _, _, end = load_chunk(table_ptr, tl.program_id(0))
    if start >= end:
        return
    head = tl.program_id(1)
    order = tl.arange(0, LENGTH)
    tokens_L, keys_K = start + order, tl.arange(0, KEYS)
    ok_L = tokens_L < end
    one = tokens_L * num_heads + head
    beta_L = tl.load(beta_ptr + one, mask=ok_L, other=0.0)
    decayed_L = beta_L
    if g_ptr is not None:
        decayed_L *= tl.exp(tl.load(g_ptr + one, mask=ok_L, other=0.0))
    x_LL = head_tile(x_ptr, num_heads * LENGTH, LENGTH, tokens_L, ok_L, head, order, LENGTH).to(DOT)
    key_head = head // (num_heads // num_key_heads)
    k_LK = head_tile(k_ptr, num_key_heads * num_keys, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys)
    right_LK = (k_LK.to(tl.float32) * decayed_L[:, None]).to(DOT)
    w_LK = tl.dot(x_LL, right_LK, input_precision=PRECISION)
    store_head_tile(w_ptr, num_heads * num_keys, num_keys, tokens_L, ok_L, head, keys_K, num_keys, w_LK)
    for first in range(0, num_values, VALUES):
        values_V = first + tl.arange(0, VALUES)
        v_LV = head_tile(v_ptr, v_stride_t, v_stride_n, tokens_L, ok_L, head, values_V, num_values)
        right_LV = (v_LV.to(tl.float32) * beta_L[:, None]).to(DOT)
        u_LV = tl.dot(x_LL, right_LV, input_precision=PRECISION)
        store_head_tile(u_ptr, num_heads * num_values, num_values, tokens_L, ok_L, head, values_V, num_values, u_LV)


@triton.jit
def place_of(piece, rows_ptr):
    """Returns the row of a piece's state, -1 where it has none."""
    row = piece
    if rows_ptr is not None:
        row = tl.load(rows_ptr + piece)
    return row


@triton.jit
def chunk_decays(g_ptr, last, tokens_L, ok_L, head, num_heads, num_keys, keys_K, BY_CHANNEL: tl.constexpr):
    """Returns what decays over a chunk: the state, and tokens from its start and to its end.

    Where each channel decays by itself, g is [T, N, K], and queries and keys have the last two in them already.
    """
    if BY_CHANNEL:
        ok_K = keys_K < num_keys
        whole_K = tl.exp(tl.load(g_ptr + (last * num_heads + head) * num_keys + keys_K, mask=ok_K, other=0.0))
        return whole_K[:, None], 1.0, 1.0
    else:
        g_last = tl.load(g_ptr + last * num_heads + head)
        g_L = tl.load(g_ptr + tokens_L * num_heads + head, mask=ok_L, other=0.0)
        to_end_L = tl.exp(tl.where(ok_L, g_last - g_L, 0.0))
        return tl.exp(g_last), tl.exp(g_L)[:, None], to_end_L[:, None]


@kernel
def _states_kernel(
    k_ptr,
    w_ptr,
    u_ptr,
    g_ptr,
    states_ptr,
    initial_ptr,
    initial_rows_ptr,
    final_ptr,
    final_rows_ptr,
    offsets_ptr,
    firsts_ptr,
    num_heads,
    num_key_heads,
    num_keys,
    num_values,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Walks over the chunks of a piece: writes the state that each begins with [C, N, K, V], and N over U.

    Without W, N is U: what `state_space` computes.
    """
    piece, head = tl.program_id(0), tl.program_id(1)
    keys_K, values_V = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    order = tl.arange(0, LENGTH)
    key_head = head // (num_heads // num_key_heads)
    begin = tl.load(offsets_ptr + piece).to(tl.int64)
    end = tl.load(offsets_ptr + piece + 1).to(tl.int64)
    first = tl.load(firsts_ptr + piece)
    count = tl.load(firsts_ptr + piece + 1) - first
    state_KV = tl.zeros([KEYS, VALUES], tl.float32)
    if initial_ptr is not None:
        row = place_of(piece, initial_rows_ptr)
        place, ok_KV = state_place(tl.maximum(row, 0), num_heads, head, num_keys, num_values, keys_K, values_V)
        given_KV = tl.load(initial_ptr + place, mask=ok_KV, other=0.0)
        state_KV += tl.where(row >= 0, given_KV, 0.0)
    for index in range(count):
        tokens_L = begin + index * LENGTH + order
        ok_L = tokens_L < end
        place, ok_KV = state_place(first + index, num_heads, head, num_keys, num_values, keys_K, values_V)
        tl.store(states_ptr + place, state_KV, mask=ok_KV)
        u_LV = head_tile(u_ptr, num_heads * num_values, num_values, tokens_L, ok_L, head, values_V, num_values)
        k_LK = head_tile(k_ptr, num_key_heads * num_keys, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys)
        new_LV = u_LV.to(tl.float32)
        if w_ptr is not None:
            w_LK = head_tile(w_ptr, num_heads * num_keys, num_keys, tokens_L, ok_L, head, keys_K, num_keys).to(DOT)
            new_LV -= tl.dot(w_LK, state_KV.to(DOT), input_precision=PRECISION)
            v_stride = num_heads * num_values
            store_head_tile(u_ptr, v_stride, num_values, tokens_L, ok_L, head, values_V, num_values, new_LV)
        last = tl.minimum(begin + index * LENGTH + LENGTH, end) - 1
        whole, _, to_end = chunk_decays(g_ptr, last, tokens_L, ok_L, head, num_heads, num_keys, keys_K, BY_CHANNEL)
        added_LV = (new_LV * to_end).to(DOT)
        state_KV = state_KV * whole + tl.dot(tl.trans(k_LK.to(DOT)), added_LV, input_precision=PRECISION)
    if final_ptr is not None:
        row = place_of(piece, final_rows_ptr)
        if row >= 0:
            place, ok_KV = state_place(row, num_heads, head, num_keys, num_values, keys_K, values_V)
            tl.store(final_ptr + place, state_KV, mask=ok_KV)


@kernel
def _outputs_kernel(
    q_ptr,
    k_ptr,
    new_ptr,
    g_ptr,
    p_ptr,
    states_ptr,
    past_ptr,
    past_stride_t,
    past_stride_n,
    past_weight_ptr,
    out_ptr,
    table_ptr,
    num_heads,
    num_key_heads,
    num_keys,
    num_values,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Computes out = exp(g) q S + P N, and adds what passes by the state, a number for each head times `past`.

    Where P is given, queries decayed from the chunk's start already.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, _, _, end = load_chunk(table_ptr, chunk)
    if start >= end:
        return
    order, keys_K = tl.arange(0, LENGTH), tl.arange(0, KEYS)
    tokens_L = start + order
    ok_L = tokens_L < end
    key_head = head // (num_heads // num_key_heads)
    q_LK = head_tile(q_ptr, num_key_heads * num_keys, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys).to(DOT)
    if p_ptr is not None:
        p_LL = head_tile(p_ptr, num_heads * LENGTH, LENGTH, tokens_L, ok_L, head, order, LENGTH).to(DOT)
    else:
        g_L = tl.load(g_ptr + tokens_L * num_heads + head, mask=ok_L, other=0.0)
        k_LK = head_tile(k_ptr, num_key_heads * num_keys, num_keys, tokens_L, ok_L, key_head, keys_K, num_keys).to(DOT)
        p_LL = tl.dot(q_LK, tl.trans(k_LK), input_precision=PRECISION) * decays_between(g_L, ok_L, LENGTH)
        p_LL = p_LL.to(DOT)
    for first in range(0, num_values, VALUES):
        values_V = first + tl.arange(0, VALUES)
        place, ok_KV = state_place(chunk, num_heads, head, num_keys, num_values, keys_K, values_V)
        state_KV = tl.load(states_ptr + place, mask=ok_KV, other=0.0).to(DOT)
        new_LV = head_tile(new_ptr, num_heads * num_values, num_values, tokens_L, ok_L, head, values_V, num_values)
        out_LV = tl.dot(q_LK, state_KV, input_precision=PRECISION)
        if p_ptr is None:
            out_LV *= tl.exp(g_L)[:, None]
        out_LV += tl.dot(p_LL, new_LV.to(DOT), input_precision=PRECISION)
        if past_weight_ptr is not None:
            past_LV = head_tile(past_ptr, past_stride_t, past_stride_n, tokens_L, ok_L, head, values_V, num_values)
            out_LV += past_LV.to(tl.float32) * tl.load(past_weight_ptr + head).to(tl.float32)
        store_head_tile(out_ptr, num_heads * num_values, num_values, tokens_L, ok_L, head, values_V, num_values, out_LV)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Head counts and widths, and what a kernel is compiled for.

    Args:
        options: DOT and PRECISION.
        keys, values: blocks of K, whole, and of V.
    """

    num_tokens: int
    num_heads: int
    num_key_heads: int
    num_keys: int
    num_values: int
    options: dict[str, object]
    keys: int
    values: int

    @classmethod
    def of(cls, k_TGK: Tensor, v_TNV: Tensor) -> Sizes:
        """Reads them off the inputs. Products of fp32 run outside the tensor cores, on blocks that registers hold."""
        options = dot_options(v_TNV)
        return cls(
            num_tokens=v_TNV.shape[0],
            num_heads=v_TNV.shape[1],
            num_key_heads=k_TGK.shape[1],
            num_keys=k_TGK.shape[2],
            num_values=v_TNV.shape[2],
            options=options,
            keys=power_of_2(k_TGK.shape[2], SMALLEST_DOT),
            values=power_of_2(v_TNV.shape[2], SMALLEST_DOT, 16 if options["DOT"] == tl.float32 else 32),
        )

    @property
    def heads(self) -> tuple[int, int, int]:
        """N, G and K, as kernels take them."""
        return self.num_heads, self.num_key_heads, self.num_keys

    @property
    def blocks(self) -> dict[str, object]:
        """The constants of a kernel that reads values."""
        return {**self.options, "LENGTH": CHUNK, "KEYS": self.keys, "VALUES": self.values}

    @property
    def solving(self) -> str:
        """The precision of a triangular solve's products, which is that of fp32."""
        return "ieee" if self.options["DOT"] == tl.float32 else "tf32x3"

    @property
    def warps(self) -> int:
        """Warps of programs whose sums are chunks by keys."""
        return 4 if self.keys <= 64 else 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """The states at the ends of pieces.

    Args:
        initial: fp32 [R, N, K, V], or None.
        initial_rows: int32 [P], each piece's row of it, -1 for none; None where piece i has row i.
        num_final: states asked for.
        final_rows: the same of these.
    """

    initial: Tensor | None = None
    initial_rows: Tensor | None = None
    num_final: int = 0
    final_rows: Tensor | None = None


def dense_features(x: Tensor) -> Tensor:
    """Returns x with features that lie one after the other; tokens and heads may be any distance apart."""
    return x if x.shape[2] <= 1 or x.stride(2) == 1 else x.contiguous()


def normalised(x_TGK: Tensor, scale: float) -> Tensor:
    """Returns x / |x| * scale, dense."""
    x_TGK = dense_features(x_TGK)
    num_tokens, num_heads, num_keys = x_TGK.shape
    y_TGK = torch.empty(x_TGK.shape, dtype=x_TGK.dtype, device=x_TGK.device)
    rows, keys = norm_tile(num_keys)
    _normalise_kernel[(ceil_div(num_tokens * num_heads, rows),)](
        x_TGK,
        x_TGK.stride(0),
        x_TGK.stride(1),
        y_TGK,
        num_tokens * num_heads,
        num_heads,
        num_keys,
        scale,
        _EPS,
        ROWS=rows,
        KEYS=keys,
        num_warps=num_warps(rows * keys),
    )
    return y_TGK


def norm_tile(num_keys: int) -> tuple[int, int]:
    """Returns rows and columns of a tile of heads' keys, about 4096 elements."""
    keys = power_of_2(num_keys)
    return max(1, min(32, 4096 // keys)), keys


def solve(k_TGK: Tensor, decay_TN: Tensor, beta_TN: Tensor, chunks: ChunkTable, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Returns X [T, N, L] in the dtype of k, and g, fp32 [T, N]."""
    shape = (sizes.num_tokens, sizes.num_heads)
    x_TNL = torch.empty(*shape, CHUNK, dtype=k_TGK.dtype, device=k_TGK.device)
    g_TN = torch.empty(shape, dtype=torch.float32, device=k_TGK.device)
    _solve_kernel[(chunks.num_chunks, sizes.num_heads)](
        k_TGK,
        decay_TN,
        beta_TN,
        g_TN,
        x_TNL,
        chunks.table,
        *sizes.heads,
        **sizes.options,
        SOLVE=sizes.solving,
        LENGTH=CHUNK,
        KEYS=sizes.keys,
        num_warps=4,
    )
    return x_TNL, g_TN


def walk(
    k_TGK: Tensor,
    v_TNV: Tensor,
    beta_TN: Tensor,
    solved: tuple[Tensor, Tensor],
    chunks: ChunkTable,
    offsets: Tensor,
    ends: Ends,
    sizes: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Computes the states.

    Args:
        k_TGK: normalised.
        solved: of `solve`.

    Returns:
        W [T, N, K], N [T, N, V] and the states [C, N, K, V], in the dtype of v; the last states, fp32 [num_final, N, K,
        V], or None.
    """
    x_TNL, g_TN = solved
    w_TNK, u_TNV = rows(k_TGK, v_TNV, g_TN, beta_TN, x_TNL, chunks, sizes)
    states, final = walk_chunks(k_TGK, w_TNK, u_TNV, g_TN, chunks, offsets, ends, sizes)
    return w_TNK, u_TNV, states, final


def rows(
    k_TGK: Tensor,
    v_TNV: Tensor,
    g_TN: Tensor | None,
    beta_TN: Tensor,
    x_TNL: Tensor,
    chunks: ChunkTable,
    sizes: Sizes,
) -> tuple[Tensor, Tensor]:
    """Returns W [T, N, K] and U [T, N, V] in the dtype of v; without g, of keys that decayed already."""
    head = (sizes.num_heads, sizes.num_keys)
    w_TNK = torch.empty(sizes.num_tokens, *head, dtype=v_TNV.dtype, device=v_TNV.device)
    u_TNV = torch.empty(v_TNV.shape, dtype=v_TNV.dtype, device=v_TNV.device)
    _rows_kernel[(chunks.num_chunks, sizes.num_heads)](
        x_TNL,
        k_TGK,
        v_TNV,
        v_TNV.stride(0),
        v_TNV.stride(1),
        g_TN,
        beta_TN,
        w_TNK,
        u_TNV,
        chunks.table,
        *sizes.heads,
        sizes.num_values,
        **sizes.blocks,
        num_warps=4,
    )
    return w_TNK, u_TNV


def walk_chunks(
    k_TGK: Tensor,
    w_TNK: Tensor | None,
    u_TNV: Tensor,
    g_TN: Tensor,
    chunks: ChunkTable,
    offsets: Tensor,
    ends: Ends,
    sizes: Sizes,
) -> tuple[Tensor, Tensor | None]:
    """Returns the states that chunks begin with and the last ones, as of `walk`, and writes N over U.

    Args:
        g_TN: [T, N, K] where each channel decays by itself, and keys to the chunk's end already.
    """
    head = (sizes.num_heads, sizes.num_keys, sizes.num_values)
    states = torch.empty(chunks.num_chunks, *head, dtype=u_TNV.dtype, device=u_TNV.device)
    initial = None if ends.initial is None else ends.initial.contiguous()
    final = None
    if ends.num_final > 0:
        final = torch.empty(ends.num_final, *head, dtype=torch.float32, device=u_TNV.device)
    _states_kernel[(offsets.shape[0] - 1, sizes.num_heads, ceil_div(sizes.num_values, sizes.values))](
        k_TGK,
        w_TNK,
        u_TNV,
        g_TN,
        states,
        initial,
        ends.initial_rows,
        final,
        ends.final_rows,
        offsets,
        chunks.firsts,
        *sizes.heads,
        sizes.num_values,
        BY_CHANNEL=g_TN.dim() == 3,
        **sizes.blocks,
        num_warps=4,
        num_stages=2,
    )
    return states, final


def outputs(
    q_TGK: Tensor,
    k_TGK: Tensor | None,
    new_TNV: Tensor,
    g_TN: Tensor | None,
    states: Tensor,
    chunks: ChunkTable,
    sizes: Sizes,
    past_TNV: Tensor | None = None,
    past_weight_N: Tensor | None = None,
    *,
    p_TNL: Tensor | None = None,
) -> Tensor:
    """Returns out [T, N, V]; with P, of queries that decayed already, and without keys and g."""
    out_TNV = torch.empty_like(new_TNV)
    past_strides = (0, 0) if past_TNV is None else past_TNV.stride()[:2]
    _outputs_kernel[(chunks.num_chunks, sizes.num_heads)](
        q_TGK,
        k_TGK,
        new_TNV,
        g_TN,
        p_TNL,
        states,
        past_TNV,
        *past_strides,
        past_weight_N,
        out_TNV,
        chunks.table,
        *sizes.heads,
        sizes.num_values,
        **sizes.blocks,
        num_warps=4,
        num_stages=2,
    )
    return out_TNV


def delta_forward(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    decay_TN: Tensor,
    beta_TN: Tensor,
    offsets: Tensor,
    ends: Ends,
    *,
    scale: float,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:
    """Computes the rule within pieces.

    Args:
        q_TGK, k_TGK, v_TNV: one dtype; tokens and heads any distance apart.
        decay_TN, beta_TN: fp32.
        offsets: int32 [P + 1], of the pieces.

    Returns:
        out [T, N, V] in the dtype of v; the last states, fp32, or None; X and g, for backward.
    """
    v_TNV, sizes = dense_features(v_TNV), Sizes.of(k_TGK, v_TNV)
    decay_TN, beta_TN = decay_TN.contiguous(), beta_TN.contiguous()
    chunks = cut(offsets, sizes.num_tokens, CHUNK)
    q_TGK, k_TGK = normalised(q_TGK, scale), normalised(k_TGK, 1.0)
    solved = solve(k_TGK, decay_TN, beta_TN, chunks, sizes)
    _, new_TNV, states, final = walk(k_TGK, v_TNV, beta_TN, solved, chunks, offsets, ends, sizes)
    return outputs(q_TGK, k_TGK, new_TNV, solved[1], states, chunks, sizes), final, solved


def bytes_moved(
    num_tokens: int, num_key_heads: int, num_heads: int, num_keys: int, num_values: int, itemsize: int
) -> dict[str, int]:
    """Returns the compulsory bytes: inputs read once, results written once, decay and beta in fp32."""
    queries = 2 * num_tokens * num_key_heads * num_keys * itemsize
    values = num_tokens * num_heads * num_values * itemsize
    single = 2 * num_tokens * num_heads * 4
    return {"forward": queries + 2 * values + single, "backward": 2 * queries + 3 * values + 2 * single}
