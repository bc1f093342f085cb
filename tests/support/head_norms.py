"""What norm and rotation of query and key heads should give, by torch's rms_norm and arithmetic of its autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-5
SHAPES = [(5, 3, 1, 10), (1, 4, 4, 2), (0, 2, 1, 8), (9, 6, 2, 32), (37, 5, 3, 6), (2, 40, 8, 64)]
"""Tokens, query heads, key and value heads, head dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One problem; the product's rows and the gradients may lie any distance apart."""

    qkv: Tensor
    weights: tuple[Tensor, Tensor]
    gradients: tuple[Tensor, Tensor, Tensor]
    cos: Tensor
    sin: Tensor
    sizes: tuple[int, int, int]


def problem(shape: tuple[int, int, int, int], *, device: str, dtype: torch.dtype) -> Problem:
    """Normal numbers; gradients come as attention leaves them, heads before tokens."""
    tokens, heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def draw(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype).to(device)

    angles = draw(tokens, dim // 2, dtype=torch.float32) * 3
    width = (heads + 2 * kv_heads) * dim
    gradients = tuple(draw(number, tokens, dim).transpose(0, 1) for number in (heads, kv_heads, kv_heads))
    return Problem(
        qkv=draw(tokens, width + 5)[:, :width],
        weights=(draw(dim) + 1, draw(dim) + 1),
        gradients=(gradients[0], gradients[1], gradients[2]),
        cos=angles.cos(),
        sin=angles.sin(),
        sizes=(heads, kv_heads, dim),
    )


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """transformers' way: x * cos + rotate_half(x) * sin."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = (torch.cat((table, table), -1)[:, None].to(x.dtype) for table in (cos, sin))
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def expected(given: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """q, k, v and the gradients of the product and of both weights, computed in `dtype`."""
    heads, kv_heads, dim = given.sizes
    qkv = given.qkv.to(dtype).detach().clone().requires_grad_()
    weights = [weight.to(dtype).detach().clone().requires_grad_() for weight in given.weights]
    parts = list(qkv.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1))
    for index, weight in enumerate(weights):
        normed = torch.nn.functional.rms_norm(parts[index], (dim,), weight, EPS)
        parts[index] = _turned(normed, given.cos, given.sin)
    found = torch.autograd.grad(parts, [qkv, *weights], [gradient.to(dtype) for gradient in given.gradients])
    named = zip(("dqkv", "dw of q", "dw of k"), found, strict=True)
    return {**{name: part.detach() for name, part in zip("qkv", parts, strict=True)}, **dict(named)}
