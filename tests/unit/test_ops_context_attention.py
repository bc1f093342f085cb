"""What context attention sends, by hand; which heads Ulysses can spread."""

from __future__ import annotations

import pytest

from engine.errors import UserError
from engine.ops.attention.ulysses import check_context_heads
from engine.zigzag import ContextLayout
from tests.support.wire_bytes import bytes_on_the_wire

BF16 = 2


def _one_document(size: int, length: int) -> ContextLayout:
    return ContextLayout.even(size=size, num_rows=1, row_length=length, document_lengths=(length,))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ring_of_one_document(size: int):
    """Each rank has S / c tokens. The ranks before it need all of them, those after it the early half."""
    length, key_bytes = 1024, 2 * 2 * 64 * BF16
    found = bytes_on_the_wire(
        "ring", _one_document(size, length), num_heads=8, num_kv_heads=2, head_dim=64, itemsize=BF16
    )
    tokens = length // size
    sent = [rank * tokens + (size - 1 - rank) * tokens // 2 for rank in range(size)]
    # it sends gradients of what it received: all of the later ranks' tokens, half of the earlier ones'
    home = [(size - 1 - rank) * tokens + rank * tokens // 2 for rank in range(size)]
    assert found.forward == tuple(key_bytes * one for one in sent)
    assert found.backward == tuple(key_bytes * (one + two) for one, two in zip(sent, home, strict=True))
    # three quarters of what a buffer handed from neighbour to neighbour carries
    assert sum(found.forward) == key_bytes * length * (size - 1) * 3 // 4


def test_ring_sends_only_what_crosses():
    """Row of 16 on 2 ranks, rank 0 with columns 0-3 and 12-15; documents 0-5, 6-15.

    Rank 0's keys 0-3 are seen by rank 1's queries 4, 5; rank 1's keys 6-11 by rank 0's queries 12-15.
    """
    layout = ContextLayout.even(size=2, num_rows=1, row_length=16, document_lengths=(6, 10))
    found = bytes_on_the_wire("ring", layout, num_heads=4, num_kv_heads=3, head_dim=10, itemsize=4)
    row = 2 * 3 * 10 * 4
    assert found.forward == (4 * row, 6 * row)
    assert found.backward == (10 * row, 10 * row)


def test_ring_sends_nothing_for_documents_within_chunks():
    layout = ContextLayout.even(size=4, num_rows=1, row_length=64, document_lengths=(8,) * 8)
    found = bytes_on_the_wire("ring", layout, num_heads=4, num_kv_heads=2, head_dim=8, itemsize=4)
    assert found.forward == found.backward == (0,) * 4


@pytest.mark.parametrize(("num_kv_heads", "sent_kv_heads"), [(8, 8), (4, 4), (2, 4), (1, 4)])
def test_ulysses(num_kv_heads: int, sent_kv_heads: int):
    """q and out 8 heads, k and v at least one for each of 4 ranks; a quarter of everything stays at home."""
    found = bytes_on_the_wire(
        "ulysses", _one_document(4, 1024), num_heads=8, num_kv_heads=num_kv_heads, head_dim=64, itemsize=BF16
    )
    leaves = 256 * (8 + 8 + 2 * sent_kv_heads) * 64 * BF16 * 3 // 4
    assert found.forward == found.backward == (leaves,) * 4


def test_ulysses_with_uneven_tokens():
    """13 columns on 2 ranks: cuts 0 3 6 9 13, so 7 and 6 tokens. Each rank has 1 of 2 heads and 1 of 2 k/v heads."""
    found = bytes_on_the_wire("ulysses", _one_document(2, 13), num_heads=2, num_kv_heads=2, head_dim=1, itemsize=1)
    # q, k, v of my tokens with the other's head; out of the other's tokens with mine
    assert found.forward == (3 * 7 + 6, 3 * 6 + 7)
    assert found.backward == (7 + 3 * 6, 6 + 3 * 7)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 4), (8, 2, 4), (8, 1, 8), (12, 6, 3), (5, 5, 1)])
def test_heads_that_spread(heads: int, kv_heads: int, size: int):
    check_context_heads(heads, kv_heads, size)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "words"),
    [
        (6, 2, 4, "6 attention heads on a tensor rank do not divide over parallel.context 4"),
        (12, 6, 4, "cannot spread 6 key/value heads on a tensor rank over parallel.context 4"),
        (12, 4, 6, "cannot spread 4 key/value heads on a tensor rank over parallel.context 6"),
    ],
)
def test_heads_that_do_not(heads: int, kv_heads: int, size: int, words: str):
    with pytest.raises(UserError, match=words):
        check_context_heads(heads, kv_heads, size)
