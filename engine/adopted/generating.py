"""Generation with transformers' modules: what their attention gives a cache, and rows that run again where it is not
attention alone that remembers.

Legend: T tokens of a pass, N rows of it, L tokens of the longest row, H hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine.batch import IGNORE_LABEL, Batch
from engine.kernels.records import Documents
from engine.ops.attention.cache_protocol import KeyValueCache
from engine.ops.attention.token_context import TokenContext
from engine.ops.kernels import Attention


class EmptyCache:
    """The cache of a pass that keeps nothing, by which it is found what others keep; see `KeyValueCache`."""

    starts = None

    def keep(self, layer: str, slot: int, beside: tuple[Tensor, ...] | None) -> None:
        """Keeps nothing."""

    def kept(self, layer: str, slot: int) -> tuple[Tensor, ...] | None:
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


class WholeRows(NamedTuple):
    """The rows of a pass from their first token, filled up at their ends, which no earlier token sees.

    Args:
        x_NLH: the residual stream.
        positions_NL: int64.
        index_T: int64, where the pass's tokens are among the N L ones.
    """

    x_NLH: Tensor
    positions_NL: Tensor
    index_T: Tensor


def whole_rows(name: str, x_TH: Tensor, positions_T: Tensor, context: TokenContext) -> WholeRows:
    """Keeps what enters a part of the model for each row, and returns it with what was kept of the row before.

    Args:
        name: of the part, in the cache.
        x_TH: what enters.
    """
    cache, lengths = context.cache, context.documents.lengths
    assert cache is not None
    if cache.starts is None:
        rows = [_longer(name, slot, x_TH, positions_T, cache) for slot in range(len(x_TH))]
        lengths = (1,) * len(rows)
    else:
        rows = _first(name, x_TH, positions_T, lengths, cache)
    longest = max(len(x) for x, _ in rows)
    places = [
        row * longest + torch.arange(len(x) - new, len(x))
        for row, ((x, _), new) in enumerate(zip(rows, lengths, strict=True))
    ]
    return WholeRows(
        pad_sequence([x for x, _ in rows], batch_first=True),
        pad_sequence([positions for _, positions in rows], batch_first=True),
        torch.cat(places).to(x_TH.device),
    )


def _first(
    name: str, x_TH: Tensor, positions_T: Tensor, lengths: tuple[int, ...], cache: KeyValueCache
) -> list[tuple[Tensor, Tensor]]:
    rows, start = [], 0
    assert cache.starts is not None
    for length in lengths:
        row = x_TH[start : start + length], positions_T[start : start + length]
        if (slot := cache.starts.get(start)) is not None:
            cache.keep(name, slot, tuple(one.clone() for one in row))
        rows.append(row)
        start += length
    return rows


def _longer(name: str, slot: int, x_TH: Tensor, positions_T: Tensor, cache: KeyValueCache) -> tuple[Tensor, Tensor]:
    new, before = (x_TH[slot : slot + 1], positions_T[slot : slot + 1]), cache.kept(name, slot)
    if before is None:  # no row, but a place that fills up the pass
        return new
    x, positions = (torch.cat(pair) for pair in zip(before, new, strict=True))
    cache.keep(name, slot, (x, positions))
    return x, positions
