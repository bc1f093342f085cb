"""The gradient that torch's attention is given on a GPU.

torch looks up the plan of cuDNN's backward by the sizes and strides of queries, keys and values, and not by those of
the output's gradient. A plan that was made for one distance between the rows of that gradient gives wrong gradients for
another, without a word: seen with torch 2.11 and cuDNN 9 on an H200. The gradient of a linear with folded adapters has
rows that lie further apart, so each is made dense, which copies those alone.
"""

from __future__ import annotations

from torch import Tensor


def with_dense_gradient(out: Tensor) -> Tensor:
    """Returns `out`, whose gradient reaches what computed it without gaps.

    Args:
        out: attention's output [N, H, L, D], of memory [N, L, H, D], or rows [T, F] that were computed from it.
    """
    if out.is_cuda and out.requires_grad:
        out.register_hook(dense)
    return out


def dense(gradient: Tensor) -> Tensor:
    """Returns the gradient [N, H, L, D] or [T, F] with the rows of a token one after the other."""
    if gradient.dim() == 4:
        return gradient.transpose(1, 2).contiguous().transpose(1, 2)
    return gradient.contiguous()
