"""What norm and rotation of query and key heads should give, by torch's rms_norm and arithmetic of its autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rankfold.benchmarking.oracles import halves_twice, rms_norm, rotated_heads, with_gradients

SHAPES = [(5, 3, 1, 10), (1, 4, 4, 2), (0, 2, 1, 8), (9, 6, 2, 32), (3, 2, 1, 80), (37, 5, 3, 6), (2, 40, 8, 64)]
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


def expected(given: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """q, k, v and the gradients of the product and of both weights, computed in `dtype`."""
    heads, kv_heads, _ = given.sizes
    tables = [halves_twice(table, dtype) for table in (given.cos, given.sin)]

    def split(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
        return rotated_heads(qkv, *tables, heads, kv_heads, lambda q, k: (rms_norm(q, q_weight), rms_norm(k, k_weight)))

    found = with_gradients(split, (given.qkv, *given.weights), given.gradients, dtype)
    return dict(zip(("q", "k", "v", "dqkv", "dw of q", "dw of k"), found, strict=True))
