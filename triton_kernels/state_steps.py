"""A token of each row while text is generated: one kernel for a convolution, and one for each recurrence.

States are updated where they are. A program reads and writes only its own part of one row's state, all of it before
and after the arithmetic, so that a state is moved twice and nothing else of its size is made. What is computed is in
`short_conv`, `delta` and `state_space`; everything inside is fp32, rounded once. Tokens beyond the rows that have
states fill up a pass: their results are zeros.

Legend: T tokens, R rows that have states, G key heads or groups, N heads, K, V features of a key and a value, P
features of a head, S of its state for each, C channels, W taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.delta import _EPS, dense_features
from engine.kernels.triton.launch import ceil_div, kernel, power_of_2, rows_of


@kernel
def _conv_step_kernel(
    x_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    tails_ptr,
    y_ptr,
    num_rows,
    num_channels,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A program of one token and a block of channels."""
    row = tl.program_id(0).to(tl.int64)
    channels_C = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_C = channels_C < num_channels
    if row >= num_rows:
        tl.store(y_ptr + row * num_channels + channels_C, tl.zeros([CHANNELS], tl.float32), mask=ok_C)
        return
    x_C = tl.load(x_ptr + row * x_stride + channels_C, mask=ok_C, other=0.0)
    u_C = x_C.to(tl.float32) * tl.load(weight_ptr + channels_C * WIDTH + WIDTH - 1, mask=ok_C, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        u_C += tl.load(bias_ptr + channels_C, mask=ok_C, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        place_C = tails_ptr + (row * (WIDTH - 1) + tap) * num_channels + channels_C
        tail_C = tl.load(place_C, mask=ok_C, other=0.0)
        weight_C = tl.load(weight_ptr + channels_C * WIDTH + tap, mask=ok_C, other=0.0)
        u_C += tail_C.to(tl.float32) * weight_C.to(tl.float32)
        if tap > 0:
            tl.store(place_C - num_channels, tail_C, mask=ok_C)
    if WIDTH > 1:
        tl.store(tails_ptr + (row * (WIDTH - 1) + WIDTH - 2) * num_channels + channels_C, x_C, mask=ok_C)
    if SILU:
        u_C = u_C * tl.sigmoid(u_C)
    tl.store(y_ptr + row * num_channels + channels_C, u_C, mask=ok_C)


@triton.jit
def _unit(ptr, row, stride_t, stride_g, head, keys_K, num_keys, eps):
    """Loads a query or a key and divides it by its norm, fp32 [K]."""
    x_K = tl.load(ptr + row * stride_t + head * stride_g + keys_K, mask=keys_K < num_keys, other=0.0).to(tl.float32)
    return x_K * tl.rsqrt(tl.sum(x_K * x_K, 0) + eps)


@kernel
def _delta_step_kernel(
    q_ptr,
    q_stride_t,
    q_stride_g,
    k_ptr,
    k_stride_t,
    k_stride_g,
    v_ptr,
    v_stride_t,
    v_stride_n,
    decay_ptr,
    beta_ptr,
    states_ptr,
    out_ptr,
    num_rows,
    num_heads,
    num_key_heads,
    num_keys,
    num_values,
    scale,
    eps,
    BY_CHANNEL: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """A program of one token, head and block of the values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys_K, values_V = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    ok_V = values_V < num_values
    place_V = out_ptr + (row * num_heads + head) * num_values + values_V
    if row >= num_rows:
        tl.store(place_V, tl.zeros([VALUES], tl.float32), mask=ok_V)
        return
    ok_K, one = keys_K < num_keys, row * num_heads + head
    key_head = head // (num_heads // num_key_heads)
    q_K = _unit(q_ptr, row, q_stride_t, q_stride_g, key_head, keys_K, num_keys, eps) * scale
    k_K = _unit(k_ptr, row, k_stride_t, k_stride_g, key_head, keys_K, num_keys, eps)
    v_V = tl.load(v_ptr + row * v_stride_t + head * v_stride_n + values_V, mask=ok_V, other=0.0).to(tl.float32)
    state_ptrs = states_ptr + (one * num_keys + keys_K)[:, None] * num_values + values_V[None, :]
    ok_KV = ok_K[:, None] & ok_V[None, :]
    state_KV = tl.load(state_ptrs, mask=ok_KV, other=0.0)
    if BY_CHANNEL:
        state_KV *= tl.exp(tl.load(decay_ptr + one * num_keys + keys_K, mask=ok_K, other=0.0))[:, None]
    else:
        state_KV *= tl.exp(tl.load(decay_ptr + one))
    added_V = (v_V - tl.sum(state_KV * k_K[:, None], 0)) * tl.load(beta_ptr + one)
    state_KV += k_K[:, None] * added_V[None, :]
    tl.store(state_ptrs, state_KV, mask=ok_KV)
    tl.store(place_V, tl.sum(state_KV * q_K[:, None], 0), mask=ok_V)


@kernel
def _state_space_step_kernel(
    x_ptr,
    x_stride_t,
    x_stride_n,
    dt_ptr,
    a_ptr,
    b_ptr,
    b_stride_t,
    b_stride_g,
    c_ptr,
    c_stride_t,
    c_stride_g,
    d_ptr,
    states_ptr,
    y_ptr,
    num_rows,
    num_heads,
    num_groups,
    num_features,
    state_size,
    FEATURES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A program of one token, head and block of its features."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    features_P, size_S = tl.program_id(2) * FEATURES + tl.arange(0, FEATURES), tl.arange(0, SIZE)
    ok_P, ok_S = features_P < num_features, size_S < state_size
    place_P = y_ptr + (row * num_heads + head) * num_features + features_P
    if row >= num_rows:
        tl.store(place_P, tl.zeros([FEATURES], tl.float32), mask=ok_P)
        return
    one, group = row * num_heads + head, head // (num_heads // num_groups)
    x_P = tl.load(x_ptr + row * x_stride_t + head * x_stride_n + features_P, mask=ok_P, other=0.0).to(tl.float32)
    b_S = tl.load(b_ptr + row * b_stride_t + group * b_stride_g + size_S, mask=ok_S, other=0.0).to(tl.float32)
    c_S = tl.load(c_ptr + row * c_stride_t + group * c_stride_g + size_S, mask=ok_S, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + one)
    state_ptrs = states_ptr + (one * num_features + features_P)[:, None] * state_size + size_S[None, :]
    ok_PS = ok_P[:, None] & ok_S[None, :]
    state_PS = tl.load(state_ptrs, mask=ok_PS, other=0.0) * tl.exp(dt * tl.load(a_ptr + head))
    state_PS += (dt * x_P)[:, None] * b_S[None, :]
    tl.store(state_ptrs, state_PS, mask=ok_PS)
    y_P = tl.sum(state_PS * c_S[None, :], 1)
    if d_ptr is not None:
        y_P += x_P * tl.load(d_ptr + head).to(tl.float32)
    tl.store(place_P, y_P, mask=ok_P)


_TILE = 2048
"""Numbers of a state that a program has in registers, 16 a thread of 4 warps."""


def conv_step(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, tails_RWC: Tensor, *, activation: str | None
) -> Tensor:
    """Computes the convolution's output, dense [T, C] in the dtype of x, and moves tails on.

    Args:
        x_TC: dense channels, rows any distance apart.
        tails_RWC: contiguous [R, W - 1, C].
        activation: "silu" or None.
    """
    x_TC, (num_channels, width) = rows_of(x_TC), weight_CW.shape
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    channels = power_of_2(num_channels, 1, 512)
    _conv_step_kernel[(x_TC.shape[0], ceil_div(num_channels, channels))](
        x_TC,
        x_TC.stride(0),
        weight_CW.contiguous(),
        bias_C,
        tails_RWC,
        y_TC,
        tails_RWC.shape[0],
        num_channels,
        SILU=activation == "silu",
        WIDTH=width,
        CHANNELS=channels,
        num_warps=4,
    )
    return y_TC


def delta_step(
    q_TGK: Tensor, k_TGK: Tensor, v_TNV: Tensor, decay: Tensor, beta_TN: Tensor, states_RNKV: Tensor, *, scale: float
) -> Tensor:
    """Computes the gated delta rule, dense [T, N, V] in the dtype of v, and updates the states.

    Args:
        q_TGK, k_TGK, v_TNV: dense features; tokens and heads any distance apart.
        decay, beta_TN: fp32, [T, N]; decay of each channel [T, N, K].
        states_RNKV: fp32, contiguous.
    """
    q_TGK, k_TGK, v_TNV = dense_features(q_TGK), dense_features(k_TGK), dense_features(v_TNV)
    num_tokens, num_heads, num_values = v_TNV.shape
    out_TNV = torch.empty(v_TNV.shape, dtype=v_TNV.dtype, device=v_TNV.device)
    keys = power_of_2(k_TGK.shape[2])
    values = power_of_2(num_values, 1, max(1, _TILE // keys))
    _delta_step_kernel[(num_tokens, num_heads, ceil_div(num_values, values))](
        q_TGK,
        *q_TGK.stride()[:2],
        k_TGK,
        *k_TGK.stride()[:2],
        v_TNV,
        *v_TNV.stride()[:2],
        decay.contiguous(),
        beta_TN.contiguous(),
        states_RNKV,
        out_TNV,
        states_RNKV.shape[0],
        num_heads,
        k_TGK.shape[1],
        k_TGK.shape[2],
        num_values,
        scale,
        _EPS,
        BY_CHANNEL=decay.dim() == 3,
        KEYS=keys,
        VALUES=values,
        num_warps=4,
    )
    return out_TNV


def state_space_step(
    x_TNP: Tensor,
    dt_TN: Tensor,
    a_N: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    d_N: Tensor | None,
    states_RNPS: Tensor,
) -> Tensor:
    """Computes a state space, dense [T, N, P] in the dtype of x, and updates the states.

    Args:
        x_TNP, b_TGS, c_TGS: dense features; tokens and heads any distance apart.
        dt_TN, a_N: fp32.
        d_N: or None.
        states_RNPS: fp32, contiguous.
    """
    x_TNP, b_TGS, c_TGS = dense_features(x_TNP), dense_features(b_TGS), dense_features(c_TGS)
    num_tokens, num_heads, num_features = x_TNP.shape
    y_TNP = torch.empty(x_TNP.shape, dtype=x_TNP.dtype, device=x_TNP.device)
    size = power_of_2(b_TGS.shape[2])
    features = power_of_2(num_features, 1, max(1, _TILE // size))
    _state_space_step_kernel[(num_tokens, num_heads, ceil_div(num_features, features))](
        x_TNP,
        *x_TNP.stride()[:2],
        dt_TN.contiguous(),
        a_N,
        b_TGS,
        *b_TGS.stride()[:2],
        c_TGS,
        *c_TGS.stride()[:2],
        d_N,
        states_RNPS,
        y_TNP,
        states_RNPS.shape[0],
        num_heads,
        b_TGS.shape[1],
        num_features,
        b_TGS.shape[2],
        FEATURES=features,
        SIZE=size,
        num_warps=4,
    )
    return y_TNP


def bytes_moved(
    num_rows: int, num_heads: int, num_keys: int, num_values: int, num_channels: int, width: int, itemsize: int
) -> dict[str, int]:
    """Returns the compulsory bytes of a token of each row: states and tails in and out, and the convolution's input and
    output; the other vectors are small beside them."""
    tails = num_rows * (width - 1) * num_channels * itemsize
    states = num_rows * num_heads * num_keys * num_values * 4
    return {"convolution": 2 * tails + 2 * num_rows * num_channels * itemsize, "recurrence": 2 * states}
