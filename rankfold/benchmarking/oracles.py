"""Each op by plain torch: in float64 the oracle of tests and benchmarks, in the tested dtype the measure of the error
allowed, or a peer; and the odd shapes that an op is tested at.

Nothing here calls the engine's code, which is judged by it.

Legend: T tokens, F features, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-5
"""Of every norm."""
ODD_SHAPES = ((5, 123), (1, 123), (0, 64), (1, 1), (37, 8), (64, 256), (19, 1000))
"""(tokens, features): odd, one row, empty, one element, short, round, several tiles with a remainder."""


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalises the last dimension of x [..., F] by its root mean square, times weight [F]."""
    return functional.rms_norm(x, weight.shape, weight, EPS)


def swiglu(gate_up: Tensor) -> Tensor:
    """Computes silu(gate) * up of [gate | up], [..., 2F], as [..., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def halves_twice(table: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a table of cos or sin, [T, D / 2], in transformers' layout, [1, T, D]."""
    return torch.cat((table, table), dim=-1)[None].to(dtype)


def rotated_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    change: Callable[..., Sequence[Tensor]] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the product of queries, keys and values and rotates q and k, as transformers does.

    Args:
        qkv: [T, (H + 2K) D].
        cos, sin: tables in transformers' layout and the dtype of qkv, [1, T, D].
        heads, kv_heads: H and K.
        change: applied to q and k before the rotation.

    Returns:
        q, k, v: [T, heads, D].
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    num = heads + 2 * kv_heads
    q, k, v = qkv.unflatten(1, (num, qkv.shape[1] // num))[None].split([heads, kv_heads, kv_heads], dim=2)
    q, k = (q, k) if change is None else change(q, k)
    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    return q[0], k[0], v[0]


def attention_by_document(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float | None = None
) -> Tensor:
    """Computes causal attention one document after the other.

    Args:
        q, k, v: [T, H, D], [T, K, D], [T, K, D].
        lengths: tokens of each document.
        scale: of scores; D^-0.5 where None.
    """
    parts = zip(*(x.transpose(0, 1).split(list(lengths), dim=1) for x in (q, k, v)), strict=True)
    outs = [
        functional.scaled_dot_product_attention(
            *(x[None] for x in part), is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        for part in parts
    ]
    return torch.cat([out[0].transpose(0, 1) for out in outs])


def with_gradients(
    function: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """Returns the results of a function of some inputs and, by autograd, the gradient of each input.

    Args:
        function: of copies of the inputs in `dtype`.
        inputs: whose gradients are wanted.
        gradients: of the results.
        dtype: of the computation.
    """
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    found = function(*leaves)
    results = (found,) if isinstance(found, Tensor) else tuple(found)
    backward = torch.autograd.grad(results, leaves, [gradient.to(dtype) for gradient in gradients])
    return *(result.detach() for result in results), *backward
