"""Documents end to end, cut into rows of one length: packing that takes no notice of where documents begin.

It is what MLPerf's reference for `llama2_70b_lora` does with its texts. A row is one document to whatever comes after:
attention and positions run through it from its first token to its last. `engine.data.packing` is the other way, which
keeps documents whole and apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import UserError


class Concatenated(NamedTuple):
    """Rows as documents of one length.

    Args:
        tokens: integer [R * S], the rows end to end.
        targets: bool [R * S], whether a token is learnt; false on the first of each row.
        offsets: int64 [R + 1], where rows begin.
        left_over: tokens of the end that fill no row, and of rows in which nothing would be learnt.
    """

    tokens: NDArray[np.integer]
    targets: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    left_over: int


def concatenate(
    tokens: NDArray[np.integer], targets: NDArray[np.bool_], offsets: NDArray[np.int64], seq_length: int
) -> Concatenated:
    """Cuts documents that lie end to end into rows, in their order.

    A document's first token follows another document here, so it is learnt where all others of its document are; where
    some are masked, it belongs to what is masked.

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
    learnt = targets.copy()
    learnt[offsets[:-1][whole]] = True
    kept_RS = learnt[: rows * seq_length].reshape(rows, seq_length)
    kept_RS[:, 0] = False
    useful = kept_RS.any(axis=1)
    if not useful.any():
        raise UserError(
            f"data.packing is concatenate and no row of data.seq_length {seq_length} has a token to learn: set "
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
