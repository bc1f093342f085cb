"""Concatenates documents and cuts them into rows of one length: packing that ignores document boundaries.

MLPerf's reference for `llama2_70b_lora` packs its texts so. Later stages see a row as one document:
attention and positions run through it from its first token to its last. `engine.data.packing` is the other way, which
keeps documents whole and separate.
"""

from __future__ import annotations

import numpy as np

from engine.data.columns import Columns, contiguous
from engine.errors import UserError


def concatenate(columns: Columns, seq_length: int) -> tuple[Columns, int]:
    """Cuts concatenated documents into rows, in their order.

    A document's first token follows another document here, so it is a target where all others of its document are;
    where some are masked, it is masked too.

    Args:
        columns: documents that lie end to end in memory.
        seq_length: S, tokens of a row.

    Returns:
        The rows, as documents of one length, and the number of tokens that are left over: at the end, where they fill
        no row, and in rows without a target.

    Raises:
        UserError: there are fewer tokens than a row has.
    """
    tokens, targets, starts = columns.tokens, columns.targets, columns.starts
    assert targets is not None and columns.identity is None, "documents in memory have targets"
    assert not columns.extras, "which belong to whole documents"
    rows = len(tokens) // seq_length
    if not rows:
        raise UserError(
            f"data.packing is concatenate and the data has {len(tokens)} tokens in all, which do not fill one row of "
            f"data.seq_length {seq_length}: lower data.seq_length, or set data.packing to true."
        )
    whole = columns.target_counts == columns.lengths - 1
    is_target = targets.copy()
    is_target[starts[whole]] = True
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
    rows_of_targets = contiguous(
        tokens_RS[useful].reshape(-1),
        kept_RS[useful].reshape(-1),
        np.arange(count + 1, dtype=np.int64) * seq_length,
    )
    return rows_of_targets, len(tokens) - count * seq_length
