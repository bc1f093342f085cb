"""Attention to keys in pages against torch's over the keys of each row, in fp64 and in the tested dtype.

On a GPU: python -m pytest -m gpu tests/kernels/test_triton_paged_attention.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels.triton import paged_attention as module
from engine.kernels.triton.paged_attention import paged_attention
from tests.kernels.comparing import assert_as_exact_as_torch, places

SPLIT = 48
"""Keys of a split here, so that few keys have several; tiles of 64 keys end inside of one."""
COUNTS = (1, 16, 17, 0, 131, 47, 48, 49, 144)
"""Around the ends of pages and of splits; a row without keys; three splits."""
PAGE = 16


@dataclass(frozen=True)
class Heads:
    """Heads of a layer; scores are capped, or heads have sinks, where that is set."""

    heads: int
    kv_heads: int
    head_dim: int
    softcap: float | None = None
    sinks: bool = False


HEADS = (
    Heads(3, 3, 64),
    Heads(6, 2, 40, softcap=2.0),
    Heads(8, 1, 128, sinks=True),
    Heads(2, 2, 5),
    Heads(20, 1, 24, sinks=True),
    Heads(4, 2, 256, softcap=30.0, sinks=True),
)
heads = pytest.mark.parametrize("kind", HEADS, ids=lambda one: f"{one.heads}x{one.head_dim}")


class Problem(NamedTuple):
    """A row's places in the pool are nobody else's, and the pool is NaN wherever no row has a key."""

    q: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    counts: Tensor
    scale: float
    softcap: float | None
    sinks: Tensor | None

    def found(self, rows: slice = slice(None), pages: int | None = None) -> Tensor:
        """The kernel's result for some rows, whose table is as wide as asked for."""
        return paged_attention(
            self.q[rows],
            self.keys,
            self.values,
            self.table[rows, :pages],
            self.counts[rows],
            page=PAGE,
            scale=self.scale,
            softcap=self.softcap,
            sinks_H=self.sinks,
        )

    def expected(self, dtype: torch.dtype) -> Tensor:
        """Torch's, row by row, in this dtype."""
        out = torch.zeros(self.q.shape, dtype=dtype, device=self.q.device)
        group = self.q.shape[1] // self.keys.shape[1]
        for row, count in enumerate(self.counts.tolist()):
            at = _places(self.table[row], count)
            k, v = (pool[at].to(dtype).repeat_interleave(group, 1).transpose(0, 1) for pool in (self.keys, self.values))
            scores = (self.q[row].to(dtype)[:, None] @ k.transpose(1, 2)) * self.scale
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks.to(dtype)[:, None, None]), -1)
            out[row] = (scores.softmax(-1)[..., :count] @ v)[:, 0]
        return out


def _assert_exact(given: Problem) -> Tensor:
    """Within twice torch's error in 16 bits. In fp32 both are as good as their order of sums: a weight is off by what
    its score is, a rounding of the products' size or two, and a result by that share of the values.

    Returns:
        the kernel's result.
    """
    found, exact = given.found(), given.expected(torch.float64)
    if found.dtype != torch.float32:
        assert_as_exact_as_torch(found, given.expected(found.dtype), exact, "out")
        return found
    q, keys = (one.nan_to_num().norm(dim=-1).max().item() for one in (given.q, given.keys))
    largest = given.values.nan_to_num().abs().max().item()
    allowed = 2 * torch.finfo(torch.float32).eps * max(1.0, given.scale * q * keys) * largest
    assert (found - exact).abs().max().item() <= allowed
    return found


def _places(pages: Tensor, count: int) -> Tensor:
    return torch.cat([torch.arange(PAGE, device=pages.device) + PAGE * page for page in pages.tolist()])[:count]


def _problem(kind: Heads, device: str, dtype: torch.dtype, counts: tuple[int, ...] = COUNTS, gap: int = 0) -> Problem:
    """Heads of queries and of the pool lie `gap` features further apart than they are long."""
    generator = torch.Generator().manual_seed(kind.heads * kind.head_dim)
    width, most = kind.head_dim, -(-max(counts) // PAGE)
    num_pages = 1 + sum(-(-count // PAGE) for count in counts)
    q = 2 * torch.randn(len(counts), kind.heads + (gap > 0), width + gap, generator=generator)
    pools = [torch.full((num_pages * PAGE, kind.kv_heads, width + gap), torch.nan) for _ in range(2)]
    table = torch.zeros(len(counts), most, dtype=torch.int32)  # behind a row's last page, that of nobody
    pages = (
        (1 + torch.randperm(num_pages - 1, generator=generator)).int().split([-(-count // PAGE) for count in counts])
    )
    for row, (own, count) in enumerate(zip(pages, counts, strict=True)):
        table[row, : len(own)] = own
        if count:
            at = _places(own, count)
            for pool in pools:
                pool[at] = torch.randn(count, kind.kv_heads, width + gap, generator=generator)
    sinks = torch.randn(kind.heads, generator=generator).to(dtype).to(device) if kind.sinks else None
    q, keys, values = (one.to(dtype).to(device) for one in (q, *pools))
    return Problem(
        q=q[:, : kind.heads, :width],
        keys=keys[..., :width],
        values=values[..., :width],
        table=table.to(device),
        counts=torch.tensor(counts, device=device),
        scale=kind.head_dim**-0.5,
        softcap=kind.softcap,
        sinks=sinks,
    )


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "split_length", lambda group: SPLIT)


@places
@heads
@pytest.mark.usefixtures("short_splits")
def test_rows_read_their_own_pages(place, kind: Heads) -> None:
    given = _problem(kind, *place)
    found = _assert_exact(given)
    assert found.dtype == place[1] and found.is_contiguous()
    assert not found[COUNTS.index(0)].any()


@places
@pytest.mark.usefixtures("short_splits")
def test_a_row_has_the_same_bits_beside_others(place) -> None:
    """Also where the others are shorter, so that its keys are in a table, and in as many splits, as they need."""
    counts = (1, 48, 49, 131)
    given = _problem(HEADS[2], *place, counts=counts)
    whole = given.found()
    for row, count in enumerate(counts):
        alone = given.found(slice(row, row + 1), -(-count // PAGE))
        assert torch.equal(alone, whole[row : row + 1]), count


@places
def test_strides_and_the_launchers_own_splits(place) -> None:
    """Queries are part of a wider product, and a pool's heads may be too."""
    given = _problem(Heads(4, 2, 24), *place, counts=(513, 30, 1030), gap=8)
    _assert_exact(given)


@places
def test_scores_of_any_size_in_many_splits(place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far beyond the range of exponentials, and all equal: nothing overflows, and a cap holds. A row has more splits
    than are merged at a time."""
    monkeypatch.setattr(module, "split_length", lambda group: 8)
    for size, softcap in ((0.0, None), (1.0, None), (300.0, None), (0.02, 5.0), (300.0, 5.0)):
        given = _problem(Heads(8, 1, 16, softcap=softcap), *place, counts=(100, 5, 93))
        _assert_exact(given._replace(q=given.q * size))
