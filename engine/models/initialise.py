"""Initial values, drawn from global coordinates.

Every number is a function of (seed, tensor name, row, column) of the *whole* tensor, so each layout starts from the
same model. (Drawn per shard, the scale of a split factor would depend on the number of ranks.)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from itertools import product

import torch
from torch import Tensor

from engine.choices import VISION
from engine.distributed.sharding import NamedShard, Piece, ShardSpec
from engine.kernels.philox import uniform_rows
from engine.layers.context import LORA_LEAVES
from engine.layers.module import Fresh, ShardEntry

_CHUNK = 1 << 20
"""Numbers drawn at a time; bounds the memory of a draw."""


def site_of(name: str) -> int:
    """Returns the key word of a tensor's random numbers."""
    return zlib.crc32(name.encode())


def _fill(tensor: Tensor, spec: ShardSpec, draw: Callable[[Tensor, int], Tensor]) -> None:
    """Fills a rank's part of a matrix from `draw(global rows, global columns) -> [rows, columns]`.

    What a tensor has behind its first dimension, as kernels of convolutions have, counts as columns.
    """
    rest = spec.global_shape[1:]
    num_columns = math.prod(rest)
    row_runs, boxes = spec.runs(0), list(product(*(spec.runs(dim) for dim in range(1, len(rest) + 1))))
    height = max(1, _CHUNK // num_columns)
    for run in row_runs:
        for start in range(0, run.length, height):
            count = min(height, run.length - start)
            first = run.global_offset + start
            rows = torch.arange(first, first + count, dtype=torch.int64, device=tensor.device)
            values = draw(rows, num_columns).unflatten(1, rest)
            local = tensor[run.local_offset + start : run.local_offset + start + count]
            for box in boxes:
                source = values[:, *(slice(one.global_offset, one.global_offset + one.length) for one in box)]
                local[:, *(slice(one.local_offset, one.local_offset + one.length) for one in box)] = source


def fill_uniform(shard: NamedShard, bound: float, seed: int) -> None:
    """Fills uniformly over [-bound, bound)."""
    site = site_of(shard.name)

    def draw(rows: Tensor, num_columns: int) -> Tensor:
        return uniform_rows(rows, num_columns, seed=seed, site=site).mul_(2 * bound).sub_(bound)

    _fill(shard.tensor, shard.spec, draw)


def fill_normal(shard: NamedShard, std: float, seed: int) -> None:
    """Fills with normal numbers of mean 0, by Box and Muller's transform of two uniform draws."""
    site = site_of(shard.name)

    def draw(rows: Tensor, num_columns: int) -> Tensor:
        radius = uniform_rows(rows, num_columns, seed=seed, site=site, draw=0)
        angle = uniform_rows(rows, num_columns, seed=seed, site=site, draw=1)
        # 1 - u lies in (0, 1], so the logarithm is finite
        return torch.sqrt(-2.0 * torch.log1p(-radius)).mul_(torch.cos(2 * math.pi * angle)).mul_(std)

    _fill(shard.tensor, shard.spec, draw)


def initialise_adapters(shards: Iterable[NamedShard], seed: int, *, gaussian: bool = False) -> None:
    """Draws like PEFT: A uniform (Kaiming with a = sqrt(5): bound 1 / sqrt(in)), B zero; embeddings A zero, B normal.

    Args:
        gaussian: A, and of embeddings B, normal with standard deviation 1 / rank instead.
    """
    for shard in shards:
        module, _, leaf = shard.name.rpartition(".")
        is_embedding = module == "embed_tokens"
        if gaussian and leaf == ("lora_B" if is_embedding else "lora_A"):
            fill_normal(shard, 1.0 / shard.spec.global_shape[1 if is_embedding else 0], seed)
        elif leaf == "lora_A" and not is_embedding:
            fill_uniform(shard, 1.0 / math.sqrt(shard.spec.global_shape[-1]), seed)
        elif leaf == "lora_B" and is_embedding:
            fill_normal(shard, 1.0, seed)
        elif leaf in ("lora_A", "lora_B", "lora_bias"):
            shard.tensor.zero_()


def initialise_weights(
    shards: Iterable[NamedShard], seed: int, std: float, norm: float = 1.0, *, fresh: Mapping[str, Fresh] | None = None
) -> None:
    """Initialises a fresh model: matrices normal with `std`, norm weights `norm`, biases zero.

    The norms of a vision model multiply by their weights alone, whatever its language model's do: theirs are 1.

    Args:
        fresh: names of tensors that begin otherwise -> their values.
    """
    for shard in shards:
        leaf = shard.name.rpartition(".")[2]
        if leaf in LORA_LEAVES:
            continue
        if fresh is not None and (values := fresh.get(shard.name)) is not None:
            _take(shard, values(shard.spec.global_shape))
        elif leaf.endswith("bias"):
            shard.tensor.zero_()
        elif len(shard.spec.global_shape) == 1:
            shard.tensor.fill_(1.0 if shard.name.startswith(VISION) else norm)
        else:
            fill_normal(shard, std, seed)


def fresh_values(entries: Iterable[ShardEntry]) -> dict[str, Fresh]:
    """Returns the names of parameters with initial values of their own -> these."""
    return {entry.name: entry.fresh for entry in entries if entry.fresh is not None}


def _take(shard: NamedShard, whole: Tensor) -> None:
    """Copies a rank's part of a small tensor."""
    for box in product(*(shard.spec.runs(dim) for dim in range(whole.dim()))):
        own = tuple(slice(one.local_offset, one.local_offset + one.length) for one in box)
        shard.tensor[own] = whole[tuple(slice(one.global_offset, one.global_offset + one.length) for one in box)]


def initialise_magnitudes(
    shards: Iterable[NamedShard],
    width: Callable[[str], int],
    fill: Callable[[NamedShard], None],
    dtype: torch.dtype,
) -> None:
    """Sets DoRA's lengths to those of the base's rows, so that the adapters begin by changing nothing.

    Args:
        shards: parts of `<module>.lora_magnitude`.
        width: module -> columns of its weight.
        fill: fills rows of `<module>.weight`, as they were when training began.
        dtype: in which the model computes with them.
    """
    for shard in shards:
        module = shard.name.rpartition(".")[0]
        columns, total = width(module), shard.spec.global_shape[0]
        height = max(1, _CHUNK // columns)
        for run in shard.spec.runs(0):
            for start in range(0, run.length, height):
                count = min(height, run.length - start)
                piece = Piece(run.global_offset + start, 0, count)
                spec = ShardSpec(global_shape=(total, columns), local_shape=(count, columns), dim=0, pieces=(piece,))
                rows = torch.empty(count, columns, dtype=dtype)
                fill(NamedShard(f"{module}.weight", rows, spec))
                lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
                shard.tensor[run.local_offset + start : run.local_offset + start + count] = lengths
