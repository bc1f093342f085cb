"""The pieces of a rank's tokens cut into chunks, on the device: which tokens each program of a kernel takes.

A piece is a run of tokens of one document; no state and no tap of a convolution crosses its ends. Offsets are read on
the device, so that the host waits for nothing and a graph may run again with others: the number of chunks is bounded by
tokens and pieces, and programs of chunks that are not there return. Pieces may be empty.

Legend: T tokens, P pieces, L tokens of a chunk, C chunks at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import kernel

_BLOCK = 256


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """The chunks of the pieces, in the order of their tokens.

    Args:
        table: int32 [C, 4], of each chunk its first token, and number, first token and end of its piece. A chunk that
            is not there begins at the end of an empty piece.
        firsts: int32 [P + 1], the first chunk of each piece, and the number of chunks.
        num_chunks: C.
    """

    table: Tensor
    firsts: Tensor
    num_chunks: int


@triton.jit
def load_chunk(table_ptr, chunk):
    """Returns the first token of a chunk, and number, first token and end of its piece, the tokens as int64."""
    row = table_ptr + chunk.to(tl.int64) * 4
    return (
        tl.load(row).to(tl.int64),
        tl.load(row + 1),
        tl.load(row + 2).to(tl.int64),
        tl.load(row + 3).to(tl.int64),
    )


@kernel
def _chunks_kernel(
    offsets_ptr, table_ptr, firsts_ptr, num_pieces, num_chunks, LENGTH: tl.constexpr, BLOCK: tl.constexpr
):
    """A program for each piece, which counts the chunks before it, and one for what is not there."""
    piece = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, piece, BLOCK):
        others = start + tl.arange(0, BLOCK)
        ok = others < piece
        first = tl.load(offsets_ptr + others, mask=ok, other=0)
        end = tl.load(offsets_ptr + others + 1, mask=ok, other=0)
        before += (end - first + LENGTH - 1) // LENGTH
    chunk = tl.sum(before, 0)
    tl.store(firsts_ptr + piece, chunk)
    there = piece < num_pieces
    first = tl.load(offsets_ptr + piece, mask=there, other=0)
    end = tl.load(offsets_ptr + piece + 1, mask=there, other=0)
    count = tl.where(there, (end - first + LENGTH - 1) // LENGTH, num_chunks - chunk)
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        ok = places < count
        row = table_ptr + (chunk + places).to(tl.int64) * 4
        tl.store(row, tl.where(there, first + places * LENGTH, 0), mask=ok)
        tl.store(row + 1, tl.where(there, piece, -1) + places * 0, mask=ok)
        tl.store(row + 2, first + places * 0, mask=ok)
        tl.store(row + 3, end + places * 0, mask=ok)


def chunks_at_most(num_tokens: int, num_pieces: int, length: int) -> int:
    """Returns the most chunks that so many tokens in so many pieces can have."""
    return num_tokens // length + min(num_pieces, num_tokens)


def cut(offsets: Tensor, num_tokens: int, length: int) -> ChunkTable:
    """Cuts pieces into chunks of at most `length` tokens.

    Args:
        offsets: int32 [P + 1], cumulative.
        num_tokens: T, the last of the offsets.
    """
    num_pieces = offsets.shape[0] - 1
    num_chunks = chunks_at_most(num_tokens, num_pieces, length)
    table = torch.empty(num_chunks, 4, dtype=torch.int32, device=offsets.device)
    firsts = torch.empty(num_pieces + 1, dtype=torch.int32, device=offsets.device)
    if num_chunks > 0:
        _chunks_kernel[(num_pieces + 1,)](
            offsets, table, firsts, num_pieces, num_chunks, LENGTH=length, BLOCK=_BLOCK, num_warps=4
        )
    return ChunkTable(table, firsts, num_chunks)
