"""The compiled kernels of generation: attention to pages against torch's in fp64, and the choice of a token against the
sums that torch makes of the same draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.distributed.mesh import Axis
from engine.inference.options import Sampling
from engine.inference.sampling import Chooser
from engine.kernels.native.generation import gumbel_argmax, paged_attention
from engine.kernels.reference import paged_attention as reference
from tests.kernels.native_support import ON_EVERY_INSTRUCTION_SET, assert_same_on_any_threads

pytestmark = ON_EVERY_INSTRUCTION_SET

HEADS = ((8, 8, 64), (6, 2, 40), (4, 1, 128), (3, 3, 5))
"""(heads, key/value heads, head size)"""
COUNTS = torch.tensor([1, 16, 17, 64, 33, 5, 31, 48, 2, 63])


def _inputs(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(heads * dim)
    q = torch.randn(len(COUNTS), heads + 1, dim + 3, generator=generator)[:, :heads, :dim].to(dtype)
    pools = (torch.randn(50 * 16, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
    table = torch.randperm(50, generator=generator)[: 4 * len(COUNTS)].view(-1, 4).int()
    table[5] = table[1]  # two rows that share their first page
    return q, *pools, table, COUNTS


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_attention_reads_the_pages_of_each_row(heads: int, kv_heads: int, dim: int) -> None:
    q, keys, values, table, counts = _inputs(heads, kv_heads, dim, torch.float32)
    scale = dim**-0.5
    found = paged_attention(q, keys, values, table, counts, page=16, scale=scale)
    for row, count in enumerate(counts.tolist()):
        places = (table[row].long()[:, None] * 16 + torch.arange(16)).flatten()[:count]
        k, v = (pool[places].double().repeat_interleave(heads // kv_heads, 1) for pool in (keys, values))
        weights = (torch.einsum("hd,chd->hc", q[row].double(), k) * scale).softmax(-1)
        expected = torch.einsum("hc,chd->hd", weights, v)
        # fp32's last places at the size of a sum of 64 products
        assert (found[row] - expected).abs().max() < 2e-6
    torch.testing.assert_close(found, reference(q, keys, values, table, counts, page=16, scale=scale))


def test_attention_in_bfloat16() -> None:
    """Sums are in fp32, and the result is rounded once."""
    inputs = _inputs(6, 2, 40, torch.bfloat16)
    found = paged_attention(*inputs, page=16, scale=0.2)
    q, keys, values, table, counts = inputs
    expected = reference(q.float(), keys.float(), values.float(), table, counts, page=16, scale=0.2)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-6)


def test_attention_is_the_same_on_any_threads_and_beside_other_rows() -> None:
    q, keys, values, table, counts = _inputs(6, 2, 40, torch.float32)
    assert_same_on_any_threads(lambda: (paged_attention(q, keys, values, table, counts, page=16, scale=0.2),))
    whole = paged_attention(q, keys, values, table, counts, page=16, scale=0.2)
    for row in range(len(counts)):
        own = slice(row, row + 1)
        alone = paged_attention(q[own], keys, values, table[own], counts[own], page=16, scale=0.2)
        assert torch.equal(alone, whole[own])


@pytest.mark.parametrize(("first", "num"), [(0, 1000), (3, 700), (1, 5), (6, 257), (128, 128), (2, 4000)])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0, 60.0])
def test_tokens_are_those_of_torch(first: int, num: int, spread: float) -> None:
    """Flat scores, for which all draws count, to peaked ones, for which most are never made. With a bound a tenth as
    large, most flat rows get another token."""
    kwargs: Any = {"tp": Axis("tp"), "first_id": first, "num_ids": num, "vocab_size": first + num, "slots": 60,
                   "device": torch.device("cpu")}  # fmt: skip
    generator = torch.Generator().manual_seed(num)
    logits = torch.randn(60, num, generator=generator) * spread + 200 * (spread == 6.0)
    rows, positions = (torch.randint(high, (60,), generator=generator) for high in (2**40, 5000))
    slots = torch.zeros_like(rows)
    for settings in (Sampling(temperature=0.9, seed=7), Sampling(temperature=1.0, seed=8, top_k=3)):
        by_torch = Chooser(settings, **kwargs).choose(logits.clone(), slots, rows, positions)
        found = Chooser(settings, gumbel_argmax=gumbel_argmax, **kwargs).choose(logits, slots, rows, positions)
        assert found.tolist() == by_torch.tolist()


def test_scores_of_which_none_can_be_drawn() -> None:
    """As torch's argmax of sums that are all -inf."""
    scores, rows = torch.full((2, 40), -torch.inf), torch.arange(2)
    scores[1, 7] = -3.0
    sums, places = gumbel_argmax(scores, rows, rows, first_id=0, key=(1, 2))
    assert places.tolist() == [0, 7] and sums[0] == -torch.inf
