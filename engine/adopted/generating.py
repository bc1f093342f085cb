"""Generation with transformers' modules: what their attention gives a cache, and rows that run again where it is not
attention alone that remembers.

Legend: T tokens of a pass, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.adopted.rows import Piece, Rows, WholeRows, documents_of
from engine.batch import IGNORE_LABEL, Batch
from engine.kernels.records import Documents
from engine.ops.attention.cache_protocol import KeyValueCache
from engine.ops.attention.token_context import TokenContext
from engine.ops.kernels import Attention


class EmptyCache:
    """The cache of a pass that keeps nothing, by which it is found what others keep; see `KeyValueCache`."""

    starts = None
    continues = False

    def keep(self, layer: str, slot: int, beside: tuple[Tensor, ...] | None) -> None:
        """Keeps nothing."""

    def kept(self, layer: str, slot: int) -> tuple[Tensor, ...] | None:
        """Returns None."""
        return None

    def keep_states(self, layer: str, states: tuple[Tensor, ...]) -> None:
        """Keeps nothing."""

    def states(self, layer: str) -> tuple[Tensor, ...] | None:
        """Returns None."""
        return None

    def attend(
        self,
        layer: str,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        whole: Attention,
        documents: Documents,
        *,
        scale: float,
    ) -> Tensor:
        """Attends to these tokens alone."""
        return whole(q_THD, k_TKD, v_TKD, documents, scale=scale)


def one_token(device: torch.device) -> Batch:
    """Returns a batch of one token."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return Batch(
        tokens_BS=zero,
        labels_BS=torch.full_like(zero, IGNORE_LABEL),
        positions_BS=zero,
        token_index_BS=zero,
        loss_weights_BS=zero.float(),
        document_offsets=torch.tensor([0, 1], dtype=torch.int32, device=device),
        document_lengths=(1,),
    )


def rows_so_far(name: str, x_TH: Tensor, rows: Rows, context: TokenContext) -> WholeRows:
    """Keeps what enters a part of the model for each row, and returns it with what was kept of the row before.

    Args:
        name: of the part, in the cache.
        x_TH: what enters.
    """
    cache = context.cache
    assert cache is not None
    documents, start = documents_of(x_TH, rows, context), 0
    if cache.starts is None:
        longer = [_longer(name, slot, document, cache) for slot, document in enumerate(documents)]
        return WholeRows.of(longer, [1] * len(longer))
    for document in documents:
        if (slot := cache.starts.get(start)) is not None:
            cache.keep(name, slot, tuple(one.clone() for one in document))
        start += len(document.x_LH)
    return WholeRows.of(documents, context.documents.lengths)


def image_positions(counted_3BS: Tensor | None, rows: Rows, context: TokenContext) -> Tensor:
    """Returns the positions of tokens where positions of images are not those of text, prompts' and of what follows.

    Args:
        counted_3BS: of prompts with images; None where there are none.
    """
    cache = context.cache
    assert cache is not None
    positions_T, lengths = rows.positions_BS.flatten(), context.documents.lengths
    if cache.starts is None:
        kept = [cache.kept(_BEHIND, slot) for slot in range(len(lengths))]
        zero = positions_T.new_zeros(1)
        behind = torch.cat([zero if one is None else one[0] for one in kept])
        return (positions_T + behind).view(rows.positions_BS.shape)
    start = 0
    for length in lengths:
        if (slot := cache.starts.get(start)) is not None:
            last = length - 1 if counted_3BS is None else counted_3BS.flatten(1)[:, start : start + length].max()
            cache.keep(_BEHIND, slot, (positions_T.new_zeros(1) + last + 1 - length,))
        start += length
    return rows.positions_BS if counted_3BS is None else counted_3BS


_BEHIND = "positions"
"""The name in the cache of how far positions are behind the count of a row's tokens."""


def _longer(name: str, slot: int, new: Piece, cache: KeyValueCache) -> Piece:
    """Returns a row with its new token, and keeps it."""
    if (before := cache.kept(name, slot)) is None:  # no row, but a place that fills up the pass
        return new
    row = Piece(*(torch.cat(pair) for pair in zip(before, new, strict=True)))
    cache.keep(name, slot, row)
    return row
