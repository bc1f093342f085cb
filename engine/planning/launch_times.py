"""The seconds that a launch takes on a machine: the longest of its arithmetic, its bytes, and the launch itself.

A product is cut into tiles, one for each multiprocessor at a time, so that it takes as many waves as there are tiles,
divided by multiprocessors and rounded up. Where large tiles are few, smaller ones or a division of the inner
dimension (split-K) fill the device at a price; the fastest of these is taken, as a library would choose it. Beside its
inner products each tile is begun and written.

Products of many experts in one launch are slower, the more so the fewer inner products they have; their rows do not end
where tiles do, so that each expert takes half a tile in vain.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from engine.planning.launches import Launch
from engine.planning.machine import Machine


class _Tile(NamedTuple):
    """Rows and columns of a result that one multiprocessor computes at a time, and its speed beside the best."""

    rows: int
    columns: int
    speed: float


TILES = (_Tile(256, 128, 1.0), _Tile(128, 256, 1.0), _Tile(128, 128, 0.9), _Tile(64, 128, 0.7), _Tile(128, 64, 0.7))
SPLITS = (1, 2, 4, 8)
"""Parts into which the inner dimension is cut."""
BEGIN = 128
"""Inner products in whose time a tile is begun and written."""
EXPERT_TILE = _Tile(128, 128, 1.0)
EXPERT_BEGIN = 1024
"""The same of products of many experts, their descriptions among it."""
BEST = (8192, 8192, 8192)
"""Rows, columns and inner products of the product whose speed a machine's `products` is."""


def launch_limits(launch: Launch, machine: Machine) -> dict[str, float]:
    """Returns the seconds that each of a machine's limits allows a launch: its arithmetic, its bytes, and the launch
    itself."""
    return {
        "memory": launch.nbytes / (machine.copies * 1e9),
        "products": launch.flops / (speed(launch, machine) * 1e12) if launch.flops else 0.0,
        "launches": launch.count * (machine.launch - machine.gap),
    }


def launch_seconds(launch: Launch, machine: Machine) -> float:
    """Returns the seconds that a launch takes, with the gap behind it."""
    return max(launch_limits(launch, machine).values()) + launch.count * machine.gap


def speed(launch: Launch, machine: Machine) -> float:
    """Returns the TFLOP/s that a launch reaches while arithmetic limits it."""
    if launch.attention is not None:
        packed = launch.kind == "packed attention"
        speeds = machine.packed_attention if packed else machine.attention
        if speeds is None:
            return machine.products
        full = speeds.tflops(launch.attention, backward=launch.name == "attention backward")
        filled = min(1.0, launch.attention.blocks / machine.processors) if machine.processors else 1.0
        return full * filled * machine.attention_share
    if launch.kind == "grouped product" and machine.grouped:
        return machine.grouped * filling(launch, machine)
    if launch.kind == "vector kernel" and machine.vectors:
        return machine.vectors
    peak = machine.products_fp8 if launch.kind == "fp8 product" else machine.products
    return peak * filling(launch, machine)


def filling(launch: Launch, machine: Machine) -> float:
    """Returns the share of the best product's speed that the shape of a product allows; 1 for all else."""
    if launch.result is None or not launch.flops or not machine.processors:
        return 1.0
    rows, columns = launch.result
    inner = launch.flops / (2.0 * launch.products * rows * columns)
    if launch.kind == "grouped product" and machine.grouped:
        used = rows / (rows + EXPERT_TILE.rows / 2) * columns / _up(columns, EXPERT_TILE.columns)
        return used * inner / (inner + EXPERT_BEGIN)
    flops_a_byte = machine.products * 1e3 / machine.copies
    own, best = (
        _share(*size, machine.processors, flops_a_byte)
        for size in ((rows, columns, inner, launch.products), (*BEST, 1))
    )
    return own / best


@lru_cache(maxsize=4096)
def _share(rows: float, columns: float, inner: float, products: int, processors: int, flops_a_byte: float) -> float:
    """Returns the share of the multiprocessors' time that is spent on inner products, under the best cut.

    Args:
        flops_a_byte: operations in the time of a byte of memory, for the sums of a split in fp32.
    """
    area = products * rows * columns
    times = []
    for tile in TILES:
        tiles = products * (_up(rows, tile.rows) // tile.rows) * (_up(columns, tile.columns) // tile.columns)
        for split in SPLITS:
            if split > 1 and inner / split < 4 * BEGIN:
                break
            waves = -(-tiles * split // processors)
            taken = waves * processors * tile.rows * tile.columns * (inner / split + BEGIN) / tile.speed
            sums = 0.0 if split == 1 else 2 * 4 * split * area * flops_a_byte / 2  # written, and read again
            times.append(taken + sums)
    return area * inner / min(times)


def _up(size: float, tile: int) -> int:
    return -(-int(size) // tile) * tile
