"""The rows of a micro-batch, as transformers' modules take them.

Legend: T tokens of a pass, N rows that modules see, L tokens of the longest, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine.ops.attention.token_context import ContextPart, TokenContext


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows(ContextPart):
    """The rows that layers see flattened.

    Args:
        positions_BS: int64 position of each token inside its document.
    """

    positions_BS: Tensor

    def shared(self) -> tuple[Tensor, ...]:
        return (self.positions_BS,)


class Piece(NamedTuple):
    """Tokens of one document.

    Args:
        x_LH: the residual stream.
        positions_L, token_index_L: int64, positions and dropout coordinates.
    """

    x_LH: Tensor
    positions_L: Tensor
    token_index_L: Tensor


class WholeRows(NamedTuple):
    """Documents in rows of their own, filled up at their ends, which no earlier token sees.

    Args:
        x_TH: the residual stream of the N rows, one after the other.
        positions_NL: int64.
        token_index_T: int64, dropout coordinates.
        index: int64, where the pass's tokens are among them.
    """

    x_TH: Tensor
    positions_NL: Tensor
    token_index_T: Tensor
    index: Tensor

    @classmethod
    def of(cls, pieces: Sequence[Piece], asked: Sequence[int]) -> WholeRows:
        """Puts documents into rows.

        Args:
            asked: how many last tokens of each are the pass's.
        """
        lengths = [len(piece.x_LH) for piece in pieces]
        longest = max(lengths)
        places = [
            row * longest + torch.arange(length - count, length)
            for row, (length, count) in enumerate(zip(lengths, asked, strict=True))
        ]
        x, positions, token_index = (pad_sequence([*one], batch_first=True) for one in zip(*pieces, strict=True))
        return cls(x.flatten(0, 1), positions, token_index.flatten(), torch.cat(places).to(x.device))


def documents_of(x_TH: Tensor, rows: Rows, context: TokenContext) -> list[Piece]:
    """Returns the documents of a pass, one after the other."""
    lengths = context.documents.lengths
    parts = (one.split(lengths) for one in (x_TH, rows.positions_BS.flatten(), context.token_index))
    return [Piece(*one) for one in zip(*parts, strict=True)]
