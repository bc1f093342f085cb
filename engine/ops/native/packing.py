"""Packing of documents into rows and blending of data sets by the compiled code; arrays are numpy's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from engine.ops.native.loader import library

IntArray = NDArray[np.int64]
_ONE = 1 << 32


def pack(lengths: NDArray[np.integer], capacity: int) -> tuple[IntArray, IntArray]:
    """Best-fit decreasing, exactly the rows of `engine.data.packing.pack`.

    Args:
        lengths: tokens of each document, from 1 to `capacity`.
        capacity: tokens of a row.

    Returns:
        offsets [rows + 1] and documents: row r holds documents[offsets[r] : offsets[r + 1]], from long to short.
    """
    sizes = np.ascontiguousarray(lengths, dtype=np.int64)
    assert not len(sizes) or (sizes.min() >= 1 and sizes.max() <= capacity), (capacity, sizes.min(), sizes.max())
    documents, offsets = np.empty(len(sizes), dtype=np.int64), np.empty(len(sizes) + 1, dtype=np.int64)
    rows = ctypes.c_int64()
    library().engine_pack(
        len(sizes), sizes.ctypes.data, capacity, documents.ctypes.data, offsets.ctypes.data, ctypes.addressof(rows)
    )
    return offsets[: rows.value + 1].copy(), documents


def blend(
    weights: Sequence[float], sizes: Sequence[int], count: int
) -> tuple[NDArray[np.int32], IntArray, NDArray[np.int64]]:
    """In which order samples are taken from several data sets, so that every prefix has the wanted shares.

    Sample i comes from the set with the largest deficit weight * (i + 1) - taken, the first of equals. Weights are
    rounded to 2^-32 of their sum and the deficits are integers, so the result is the same on every machine.

    Args:
        weights: positive share of each set, of any sum.
        sizes: samples in each set.
        count: samples to draw, below 2^31.

    Returns:
        set [count], sample within the set [count], and how often that set had been gone through before [count].
    """
    assert len(weights) == len(sizes) > 0 and min(weights) > 0 and min(sizes) > 0, (weights, sizes)
    assert 0 <= count < 1 << 31, count
    total = sum(Fraction(weight) for weight in weights)
    shares = np.array([int(Fraction(weight) / total * _ONE) for weight in weights], dtype=np.int64)
    shares[int(np.argmax(shares))] += _ONE - int(shares.sum())
    sets, taken = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int64)
    library().engine_blend(len(shares), shares.ctypes.data, count, sets.ctypes.data, taken.ctypes.data)
    epochs, samples = np.divmod(taken, np.asarray(sizes, dtype=np.int64)[sets])
    return sets, samples, epochs
