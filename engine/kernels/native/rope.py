"""Split and rotation of a fused query-key-value product by the compiled kernels; see engine.ops.rope."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.native.arguments import heads, matrix, threads, type_number, vector
from engine.kernels.native.loader import library


def split_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits and rotates: fused product -> rotated q [T, H, D], rotated k [T, K, D], v [T, K, D].

    Args:
        qkv: fp32 or bfloat16 [T, (H + 2K) * D], rows of any stride.
        cos, sin: fp32 [T, D / 2].
    """
    rows, half = qkv.shape[0], head_dim // 2
    q = qkv.new_empty(rows, num_heads, head_dim)
    k, v = qkv.new_empty(rows, num_kv_heads, head_dim), qkv.new_empty(rows, num_kv_heads, head_dim)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    library().engine_split_rotate(
        threads(),
        type_number(qkv),
        rows,
        num_heads,
        num_kv_heads,
        half,
        *matrix(qkv, width, dtype=qkv.dtype),
        vector(cos, rows * half),
        vector(sin, rows * half),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
    )
    return q, k, v


def split_rotate_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Returns the gradient of the fused product.

    Args:
        dq: fp32 or bfloat16 [T, H, D]; tokens and heads may have any stride (attention gives them transposed).
        dk, dv: [T, K, D].
        cos, sin: [T, D / 2], those of forward.
        out: where [T, (H + 2K) * D] goes, rows of any stride.
    """
    rows, num_heads, head_dim = dq.shape
    num_kv_heads, half = dk.shape[1], head_dim // 2
    width = (num_heads + 2 * num_kv_heads) * head_dim
    gradient = dq.new_empty(rows, width) if out is None else out
    library().engine_split_rotate_backward(
        threads(),
        type_number(dq),
        rows,
        num_heads,
        num_kv_heads,
        half,
        *heads(dq, rows, num_heads, head_dim, dtype=dq.dtype),
        *heads(dk, rows, num_kv_heads, head_dim, dtype=dq.dtype),
        *heads(dv, rows, num_kv_heads, head_dim, dtype=dq.dtype),
        vector(cos, rows * half),
        vector(sin, rows * half),
        *matrix(gradient, width, rows, dtype=dq.dtype),
    )
    return gradient
