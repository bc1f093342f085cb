"""Concatenates documents and cuts them into rows of one length: packing that ignores document boundaries.

MLPerf's reference for `llama2_70b_lora` packs its texts so. Later stages see a row as one document:
attention and positions run through it from its first token to its last. `engine.data.packing` is the other way, which
keeps documents whole and separate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import UserError


class Concatenated(NamedTuple):
    """Rows, as documents of one length.

    Args:
        tokens: integer [R * S], the rows end to end.
        targets: bool [R * S], whether a token is a target; false on the first of each row.
        offsets: int64 [R + 1], where rows begin.
        left_over: tokens at the end that fill no row, and of rows without a target.
    """

    tokens: NDArray[np.integer]
    targets: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    left_over: int


def concatenate(
    tokens: NDArray[np.integer], targets: NDArray[np.bool_], offsets: NDArray[np.int64], seq_length: int
) -> Concatenated:
    """Cuts concatenated documents into rows, in their order.

    A document's first token follows another document here, so it is a target where all others of its document are;
    where some are masked, it is masked too.

    Args:
        tokens: integer [T].
        targets: bool [T], false on the first token of each document.
        offsets: int64 [D + 1], where documents begin; of any length above 0.
        seq_length: S, tokens of a row.

    Raises:
        UserError: there are fewer tokens than a row has.
    """
    rows = len(tokens) // seq_length
    if not rows:
        raise UserError(
            f"data.packing is concatenate and the data has {len(tokens)} tokens in all, which do not fill one row of "
            f"data.seq_length {seq_length}: lower data.seq_length, or set data.packing to true."
        )
    lengths = np.diff(offsets)
    whole = np.add.reduceat(targets, offsets[:-1], dtype=np.int64) == lengths - 1
    is_target = targets.copy()
    is_target[offsets[:-1][whole]] = True
    kept_RS = is_target[: rows * seq_length].reshape(rows, seq_length)
    kept_RS[:, 0] = False
    useful = kept_RS.any(axis=1)
    if not useful.any():
        raise UserError(
            f"data.packing is concatenate and no row of data.seq_length {seq_length} has a token to train on: set "
            "data.mask_prompt to false, or data.packing to true."
        )
    tokens_RS = tokens[: rows * seq_length].reshape(rows, seq_length)
    count = int(useful.sum())
    return Concatenated(
        tokens=tokens_RS[useful].reshape(-1),
        targets=kept_RS[useful].reshape(-1),
        offsets=np.arange(count + 1, dtype=np.int64) * seq_length,
        left_over=len(tokens) - count * seq_length,
    )
