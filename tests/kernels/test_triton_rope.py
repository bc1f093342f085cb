"""Rotary kernels against complex multiplication, which is what the rotation is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels import reference
from engine.kernels.triton import rope
from tests.kernels.comparing import assert_as_exact_as_torch, assert_rounded_once, places, random_rows

SHAPES = [(5, 3, 1, 10), (1, 1, 1, 2), (3, 4, 2, 48), (7, 6, 2, 64), (2, 40, 8, 128)]
"""tokens, query heads, key heads, head dimension."""


def _rotated(x_THD: Tensor, angles: Tensor, *, inverse: bool = False) -> Tensor:
    """Each pair (i, i + D / 2) as a complex number, times e^(i angle)."""
    first, second = x_THD.double().chunk(2, -1)
    angles = -angles.double() if inverse else angles.double()
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    return torch.cat((turned.real, turned.imag), -1)


def _tables(place, num_tokens: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    angles = random_rows((place[0], torch.float32), num_tokens, head_dim // 2, seed=9) * 3
    return angles, angles.double().cos().float(), angles.double().sin().float()


def _torchs(x_THD: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    out = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    reference.rope_rotate(x_THD, cos, sin, out, inverse=inverse)
    return out


@places
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_split_and_merge(place, shape: tuple[int, ...]) -> None:
    num_tokens, num_heads, num_kv_heads, head_dim = shape
    angles, cos, sin = _tables(place, num_tokens, head_dim)
    qkv = random_rows(place, num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, gap=7)
    sizes = [num_heads, num_kv_heads, num_kv_heads]
    q_in, k_in, v_in = qkv.unflatten(1, (sum(sizes), head_dim)).split(sizes, dim=1)
    q, k, v = rope.rope_split(qkv, cos, sin, num_heads, num_kv_heads, head_dim)
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert_as_exact_as_torch(q, _torchs(q_in, cos, sin, False), _rotated(q_in, angles), "q")
    assert_as_exact_as_torch(k, _torchs(k_in, cos, sin, False), _rotated(k_in, angles), "k")
    assert_rounded_once(q, _rotated(q_in, angles), "q")
    assert_rounded_once(k, _rotated(k_in, angles), "k")
    assert torch.equal(v, v_in)

    dq = random_rows(place, num_heads, num_tokens, head_dim, seed=1).transpose(0, 1)  # as attention leaves it
    dk, dv = (random_rows(place, num_tokens, num_kv_heads, head_dim, gap=2, seed=seed) for seed in (2, 3))
    merged = rope.rope_merge(dq, dk, dv, cos, sin).unflatten(1, (sum(sizes), head_dim)).split(sizes, dim=1)
    assert_as_exact_as_torch(merged[0], _torchs(dq, cos, sin, True), _rotated(dq, angles, inverse=True), "dq")
    assert_as_exact_as_torch(merged[1], _torchs(dk, cos, sin, True), _rotated(dk, angles, inverse=True), "dk")
    assert_rounded_once(merged[0], _rotated(dq, angles, inverse=True), "dq")
    assert torch.equal(merged[2], dv)


@places
def test_no_tokens(place) -> None:
    _, cos, sin = _tables(place, 0, 8)
    qkv = torch.empty(0, 5 * 8, dtype=place[1], device=place[0])
    q, k, v = rope.rope_split(qkv, cos, sin, 3, 1, 8)
    assert q.shape == (0, 3, 8) and k.shape == v.shape == (0, 1, 8)
    assert rope.rope_merge(q, k, v, cos, sin).shape == (0, 40)
