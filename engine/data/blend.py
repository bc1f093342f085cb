"""Blends several data sets into one, in given shares.

An epoch of the blend reads every set at least once: it ends with the set that is largest for its weight,
and the others are repeated according to their weights. Every sample is a row of the blend, so
order, ranks and resuming do not depend on the parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.data.columns import Columns
from engine.data.dataset import TokenDataset
from engine.data.extras import joined_extras
from engine.data.packing import Packs
from engine.errors import UserError

_MOST_ROWS = 10**9


class JoinedArrays:
    """Arrays end to end, without copying; each slice that is read is within one of them."""

    def __init__(self, arrays: Sequence[NDArray | None], lengths: Sequence[int]) -> None:
        self._arrays = list(arrays)
        self.starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)

    def __getitem__(self, span: slice) -> NDArray:
        place = int(np.searchsorted(self.starts, span.start, side="right")) - 1
        first = int(self.starts[place])
        array = self._arrays[place]
        if array is None:
            return np.ones(span.stop - span.start, dtype=bool)
        return array[span.start - first : span.stop - first]


def blend(datasets: Sequence[TokenDataset], weights: Sequence[float]) -> TokenDataset:
    """Returns one data set with the samples of several.

    Args:
        datasets: with the same row length and packing, none with answers that are compared.
        weights: above 0; the share of samples of each, with any sum.
    """
    first = datasets[0]
    assert all(data.seq_length == first.seq_length and data.packing == first.packing for data in datasets)
    assert not any(extra.counts_documents for data in datasets for extra in data.extras), "answers that are compared"
    assert min(weights) > 0, weights
    counts = sample_counts([len(data) for data in datasets], weights)
    tokens = JoinedArrays([data.tokens for data in datasets], [len(data.tokens) for data in datasets])
    targets = JoinedArrays([data.targets for data in datasets], [len(data.tokens) for data in datasets])
    bases = np.cumsum([0, *(len(data.lengths) for data in datasets)])
    documents, sizes, reused = [], [], []
    for data, count, base in zip(datasets, counts, bases, strict=False):
        rows = np.arange(count) % len(data)
        sizes.append(np.diff(data.rows.offsets)[rows])
        documents += [data.rows.row(row) + base for row in rows.tolist()]
        reused += [data.rows.reused_in(row) for row in rows.tolist()]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    digest = hashlib.blake2b(digest_size=16)
    for data, count in zip(datasets, counts, strict=True):
        digest.update(f"{data.fingerprint()}:{count};".encode())
    columns = Columns(
        tokens=tokens,  # type: ignore[arg-type]
        targets=targets,  # type: ignore[arg-type]
        starts=np.concatenate([data.starts + base for data, base in zip(datasets, tokens.starts, strict=True)]),
        lengths=np.concatenate([data.lengths for data in datasets]),
        target_counts=np.concatenate([data.columns.target_counts for data in datasets]),
        max_token=max(data.max_token for data in datasets),
        identity=digest.hexdigest(),
        extras=joined_extras([data.extras for data in datasets], [len(data.lengths) for data in datasets]),
    )
    shares = any(data.rows.reused is not None for data in datasets)
    rows = Packs(
        offsets=offsets.astype(np.int64),
        documents=np.concatenate(documents).astype(np.int64),
        reused=np.concatenate(reused) if shares else None,
    )
    blended = TokenDataset(columns, rows, seq_length=first.seq_length, packing=first.packing)
    blended.read_with(first.family)
    return blended


def sample_counts(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Returns the samples of each set in an epoch of the blend: in the shares of the weights, and each set at least
    once.

    Raises:
        UserError: there are too many to be listed.
    """
    shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    total = np.max(np.asarray(sizes) / shares)
    if total > _MOST_ROWS:
        raise UserError(
            f"data.mix makes an epoch of {total:.1e} rows, each set being in it at least once, but {_MOST_ROWS:,} is "
            "the most: give weights that are closer to the sizes of the sets."
        )
    return [max(size, round(float(share * total))) for size, share in zip(sizes, shares, strict=True)]
