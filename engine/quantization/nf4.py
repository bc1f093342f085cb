"""NF4 with double quantisation, as in bitsandbytes, stored so that it can be cut (arXiv 2305.14314).

A block is 64 columns of a row, its scale the largest magnitude in it, and each weight the nearest of sixteen values.
The scales themselves are 8-bit codes: less their mean over the matrix, in groups of 256 in the order of the matrix's
rows, each group with an fp32 scale.

bitsandbytes cuts blocks and groups from the flattened matrix. Where the columns divide by 64 that is the same: the
codes and decoded weights here are its own of the whole logical matrix. Elsewhere its blocks continue into the
next row; here a row's last block is short. Its mean is an fp32 sum in an order that depends on the device and the
number of threads; here it is summed in fp64, so that it is the same everywhere, and may differ from its by the last
bits. Its CPU library looks the 8-bit codes up in a table of 65536 entries, and so picks the neighbour for a number that
is almost between two; here, as in its other backends, they are the nearest.

A group may span many rows and be cut by any shard. So each row has the offset, the scales of the groups that it
touches, and the place of its first block in the first of them: 13 bytes a row of up to 16448 columns, where
bitsandbytes has 4 bytes to 16384 weights. Shards and stacks then need nothing but their own rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels.codec import PLAIN, Arithmetic
from engine.kernels.formats import Format
from engine.kernels.reference_quantize import NF4_BLOCK, NF4_GROUP, scale_codes
from engine.quantization.encoded_parts import WholeMatrix, bounds, require_finite


def num_groups(blocks: int) -> int:
    """Returns how many groups a run of `blocks` scales can touch, wherever it begins."""
    return (blocks + NF4_GROUP - 2) // NF4_GROUP + 1 if blocks else 0


@dataclass(frozen=True, slots=True)
class Nf4:
    """The NF4 encoding, whose parts are `codes` uint8 [rows, ceil(columns / 2)], the first of two weights in the upper
    half; `scales` uint8 [rows, blocks]; `groups` fp32 [rows, 1 + g], the offset and the groups' scales; `phase` uint8
    [rows].

    Args:
        arithmetic: the backend.
    """

    arithmetic: Arithmetic = PLAIN

    @property
    def name(self) -> str:
        return "nf4"

    @property
    def format(self) -> Format | None:
        return None

    @property
    def block(self) -> int:
        return NF4_BLOCK

    def parts(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        blocks = -(-columns // NF4_BLOCK)
        return {
            "codes": ((rows, -(-columns // 2)), torch.uint8),
            "scales": ((rows, blocks), torch.uint8),
            "groups": ((rows, 1 + num_groups(blocks)), torch.float32),
            "phase": ((rows,), torch.uint8),
        }

    def stacked(self, bounds: Iterable[int]) -> Nf4:
        return self

    def absmax(self, weight: Tensor) -> Tensor:
        absmax = self.arithmetic.block_absmax(weight, NF4_BLOCK)
        require_finite(absmax, self.name)
        return absmax

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        return torch.cat(tuple(shards), dim=dim)

    def encode(self, weight: Tensor, whole: WholeMatrix | None = None) -> dict[str, Tensor]:
        absmax = self.absmax(weight)
        if whole is None:
            whole = WholeMatrix(absmax=absmax)
        first_block, all_blocks = _first_block(whole.first_column), whole.absmax.shape[1]
        # only the groups that these rows touch: a matrix may be encoded a few rows at a time
        start, stop = whole.first_row * all_blocks, (whole.first_row + weight.shape[0]) * all_blocks
        before = start % NF4_GROUP
        flat = whole.absmax.flatten()[start - before : -(-stop // NF4_GROUP) * NF4_GROUP]
        offset = mean_absmax(whole.absmax)
        scales, largest = scale_codes(flat, offset)
        here = scales[before : before + stop - start].view(-1, all_blocks)[:, first_block:][:, : absmax.shape[1]]
        groups, phase = _row_groups(largest, offset, here.shape, all_blocks, before, first_block)
        return {
            "codes": self.arithmetic.nf4_codes(weight, absmax),
            "scales": here.contiguous(),
            "groups": groups,
            "phase": phase,
        }

    def cut(self, parts: Mapping[str, Tensor], rows: slice, columns: slice) -> dict[str, Tensor]:
        blocks = parts["scales"].shape[1]
        start, stop = bounds(columns, blocks * NF4_BLOCK)
        first, last = _first_block(start), -(-stop // NF4_BLOCK)
        if stop % NF4_BLOCK and last < blocks:
            raise UserError(_inside(stop))
        phase = parts["phase"][rows].long() + first
        count = last - first
        local = torch.arange(num_groups(count), device=phase.device)
        source = (phase[:, None] // NF4_GROUP + local).clamp(max=max(parts["groups"].shape[1] - 2, 0))
        groups = parts["groups"][rows]
        return {
            "codes": parts["codes"][rows, start // 2 : -(-stop // 2)],
            "scales": parts["scales"][rows, first:last],
            "groups": torch.cat((groups[:, :1], _touched(groups[:, 1:].gather(1, source), phase, count)), 1),
            "phase": (phase % NF4_GROUP).to(torch.uint8),
        }

    def decode(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        self.arithmetic.nf4_decode(parts["codes"], parts["scales"], parts["groups"], parts["phase"], out)


def mean_absmax(absmax: Tensor) -> Tensor:
    """Returns the offset of a whole matrix's scales, fp32 []: their mean, summed in fp64."""
    return absmax.double().mean().float() if absmax.numel() else absmax.new_zeros(())


def _first_block(column: int) -> int:
    if column % NF4_BLOCK:
        raise UserError(_inside(column))
    return column // NF4_BLOCK


def _inside(column: int) -> str:
    return (
        f"nf4 stores {NF4_BLOCK} columns under one scale, and a cut at column {column} divides such a block: use a "
        f"parallel.tensor that leaves each rank a multiple of {NF4_BLOCK} columns, or another model.base_dtype."
    )


def _row_groups(
    largest: Tensor, offset: Tensor, shape: torch.Size, all_blocks: int, before: int, first_block: int
) -> tuple[Tensor, Tensor]:
    """Returns `groups` and `phase` of a shard.

    Args:
        largest: fp32, scales of the groups from the one in which the shard's first row of the whole begins.
        offset: fp32 [].
        shape: rows and blocks of the shard.
        all_blocks: blocks of a whole row.
        before: scales of the first group that belong to earlier rows.
        first_block: where the shard begins in its rows.
    """
    rows, blocks = shape
    flat = before + torch.arange(rows, device=largest.device) * all_blocks + first_block
    local = torch.arange(num_groups(blocks), device=largest.device)
    source = (flat[:, None] // NF4_GROUP + local).clamp(max=max(largest.numel() - 1, 0))
    phase = flat % NF4_GROUP
    groups = torch.cat((offset.expand(rows, 1), _touched(largest[source], phase, blocks)), 1)
    return groups, phase.to(torch.uint8)


def _touched(groups: Tensor, phase: Tensor, blocks: int) -> Tensor:
    """Returns zero where a row of `blocks` scales does not reach into the group, so that parts are the same on all
    ways.
    """
    reached = (phase % NF4_GROUP + blocks - 1) // NF4_GROUP
    local = torch.arange(groups.shape[1], device=groups.device)
    return torch.where(local <= reached[:, None], groups, 0.0)
