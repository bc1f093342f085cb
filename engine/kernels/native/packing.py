"""Packing of documents into rows by the compiled code; arrays are numpy's."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from engine.kernels.native.loader import library

IntArray = NDArray[np.int64]


def pack(lengths: NDArray[np.integer], capacity: int) -> tuple[IntArray, IntArray]:
    """Packs best-fit decreasing, into exactly the rows of `engine.data.packing.pack`.

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
