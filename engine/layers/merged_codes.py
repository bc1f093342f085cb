"""Codes of merged weights, made once for many passes.

A merge-aware linear merges its matrix for each product, and rounds it (engine.ops.merged_weight). Where the adapters
stay as they are for many passes, as when text is generated, the codes of the merged weights are written in place of the
base's, and products read them as those of any encoded weight: the same numbers, bit for bit. Storage
(engine.layers.storage) moves these codes as it does the base's, and graphs read them where they lie.

Meanwhile nothing may train, and there is no model without its adapters. The base comes back from a copy of its codes,
which lies where these wait: this rank's part of sharded ones, and in host memory of those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby

from torch import Tensor, nn

from engine.layers.encoded_storage import EncodedStorage
from engine.layers.storage import WeightPlacement


def merging_storages(parts: Iterable[nn.Module]) -> list[EncodedStorage]:
    """Returns the storages of the model's parts on this rank in which a weight takes adapters, in forward order."""
    return [one for part in parts for one in part.modules() if isinstance(one, EncodedStorage) and one.merged]


def merge_codes(parts: Iterable[nn.Module]) -> int:
    """Writes the codes of merged weights in place of the base's, for good, where all weights are here all the time.

    Returns:
        The number of weights; 0 where that was done before.
    """
    storages = [one for one in merging_storages(parts) if not one.state.in_codes]
    for storage in storages:
        storage.merge_in_place()
    return sum(len(storage.merged) for storage in storages)


def mark_as_base(parts: Iterable[nn.Module]) -> None:
    """Marks codes as the base's, which were read again in place of the merged ones."""
    for storage in merging_storages(parts):
        storage.state.in_codes = False


@contextmanager
def merged_codes(parts: Iterable[nn.Module], weights: WeightPlacement) -> Iterator[None]:
    """Has the codes of merged weights, of the adapters as they are now, in place of the base's within.

    Collective where weights are sharded.

    Args:
        parts: of the model on this rank.
        weights: where they are between computations.
    """
    kept: list[tuple[EncodedStorage, Tensor]] = []
    weights.reshard()
    weights.drop()
    try:
        for transfers, unit in groupby(
            merging_storages(parts), key=lambda one: weights.transfers(one.merging_tensors())
        ):
            storages = list(unit)
            with weights.rewrite([one.memory for one in storages], transfers):
                for storage in storages:
                    kept.append((storage, weights.waiting_memory(storage.memory).clone()))
                    storage.merge_in_place()
        yield
    finally:
        weights.drop()
        for storage, base in kept:
            weights.waiting_memory(storage.memory).copy_(base)
            storage.state.in_codes = False


def kept_bytes(parts: Iterable[nn.Module], weights: WeightPlacement) -> int:
    """Returns the bytes of the base's codes that `merged_codes` keeps on this rank."""
    return sum(weights.waiting_memory(one.memory).nbytes for one in merging_storages(parts))
