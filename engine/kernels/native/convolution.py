"""Short causal convolutions by the compiled kernels; the plain specification is `engine.hybrids.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.arguments import matrix, optional_vector, pointer, threads, type_number, vector
from engine.kernels.native.loader import library
from engine.kernels.native.recurrence import Runs, run_table


def conv_forward(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    pieces: Runs,
    tail: Tensor | None,
    *,
    activation: str | None,
) -> Tensor:
    """Computes a causal convolution of each channel within runs; see `engine.hybrids.reference.conv_forward`.

    Args:
        x_TC: fp32 or bfloat16, rows of any stride.
        weight_CW, bias_C: read as fp32.
        tail: [R, W - 1, C], read in the dtype of x.
        activation: "silu" or None.

    Returns:
        [T, C] in the dtype of x.
    """
    y = torch.empty(x_TC.shape, dtype=x_TC.dtype)
    table, weight, bias = run_table(pieces), _wide(weight_CW), None if bias_C is None else _wide(bias_C)
    before = _tail(x_TC, tail, pieces, weight.shape[1])
    library().engine_conv_forward(
        *_call(x_TC, weight, table, activation),
        *matrix(x_TC, dtype=x_TC.dtype),
        pointer(weight),
        optional_vector(bias, x_TC.shape[1]),
        None if before is None else pointer(before),
        y.data_ptr(),
    )
    return y


def conv_backward(
    dy: Tensor,
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    pieces: Runs,
    tail: Tensor | None,
    *,
    activation: str | None,
    weight_gradient: Tensor | None,
    bias_gradient: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of x and of the tail, and adds those of weight and bias to fp32 buffers where given."""
    dx = torch.empty(x_TC.shape, dtype=x_TC.dtype)
    table, weight, bias = run_table(pieces), _wide(weight_CW), None if bias_C is None else _wide(bias_C)
    before = _tail(x_TC, tail, pieces, weight.shape[1])
    d_tail = None if before is None else torch.empty(before.shape, dtype=before.dtype)
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    library().engine_conv_backward(
        *_call(x_TC, weight, table, activation),
        *matrix(dy, x_TC.shape[1], x_TC.shape[0], dtype=x_TC.dtype),
        *matrix(x_TC, dtype=x_TC.dtype),
        pointer(weight),
        optional_vector(bias, x_TC.shape[1]),
        None if before is None else pointer(before),
        dx.data_ptr(),
        None if d_tail is None else d_tail.data_ptr(),
        optional_vector(weight_gradient, weight.numel()),
        optional_vector(bias_gradient, weight.shape[0]),
    )
    return dx, d_tail if d_tail is None or tail is None else d_tail.to(tail.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32).contiguous()


def _tail(x: Tensor, tail: Tensor | None, pieces: Runs, taps: int) -> Tensor | None:
    if tail is None:
        return None
    assert tail.shape == (len(pieces.received), taps - 1, x.shape[1]), (tail.shape, pieces.received)
    return tail.to(x.dtype).contiguous()


def _call(x: Tensor, weight: Tensor, table: Tensor, activation: str | None) -> tuple[object, ...]:
    assert activation in (None, "silu"), activation
    assert weight.shape[0] == x.shape[1], (weight.shape, x.shape)
    runs = vector(table, table.numel(), torch.int64)
    return (
        threads(), type_number(x), table.shape[0], runs, x.shape[1], weight.shape[1], int(activation == "silu"),
    )  # fmt: skip
