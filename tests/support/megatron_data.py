"""Megatron's indexed data, as that trainer writes it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


def write_megatron(path: Path, sequences: list[list[int]], boundaries: list[int], code: int, dtype: type) -> None:
    """Writes the format's version 1, spelled out, as `path`.bin and `path`.idx.

    Args:
        sequences: token ids.
        boundaries: number of the first sequence of each document, and of all sequences.
        code: Megatron's number of `dtype`.
    """
    lengths = [len(sequence) for sequence in sequences]
    pointers = [sum(lengths[:n]) * np.dtype(dtype).itemsize for n in range(len(lengths))]
    path.with_suffix(".bin").write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(boundaries))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *pointers)
        + struct.pack(f"<{len(boundaries)}q", *boundaries)
    )
