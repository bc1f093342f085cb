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

from engine.adopted.images.inputs import ImageInputs
from engine.ops.attention.token_context import ContextPart, TokenContext


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows(ContextPart):
    """The rows that layers see flattened.

    Args:
        tokens_BS: int64 ids.
        positions_BS: int64 position of each token inside its document.
        images: of the rows; None without any.
    """

    tokens_BS: Tensor
    positions_BS: Tensor
    images: ImageInputs | None = None

    def shared(self) -> tuple[Tensor, ...]:
        return (self.tokens_BS, self.positions_BS, *(() if self.images is None else self.images.tensors))


class Piece(NamedTuple):
    """Tokens of one document.

    Args:
        x_LH: the residual stream.
        tokens_L, positions_L, token_index_L: int64, ids, positions and dropout coordinates.
    """

    x_LH: Tensor
    tokens_L: Tensor
    positions_L: Tensor
    token_index_L: Tensor


class WholeRows(NamedTuple):
    """Documents in rows of their own, filled up at their ends, which no earlier token sees.

    Args:
        x_TH: the residual stream of the N rows, one after the other.
        rows: their ids and positions.
        token_index_T: int64, dropout coordinates.
        index: int64, where the pass's tokens are among them.
    """

    x_TH: Tensor
    rows: Rows
    token_index_T: Tensor
    index: Tensor

    @classmethod
    def of(cls, pieces: Sequence[Piece], asked: Sequence[int], images: ImageInputs | None = None) -> WholeRows:
        """Puts documents into rows.

        Args:
            asked: how many last tokens of each are the pass's.
            images: of the documents, in their order.
        """
        lengths = [len(piece.x_LH) for piece in pieces]
        longest = max(lengths)
        places = [
            row * longest + torch.arange(length - count, length)
            for row, (length, count) in enumerate(zip(lengths, asked, strict=True))
        ]
        x, tokens, positions, index = (pad_sequence([*one], batch_first=True) for one in zip(*pieces, strict=True))
        rows = Rows(tokens_BS=tokens, positions_BS=positions, images=images)
        return cls(x.flatten(0, 1), rows, index.flatten(), torch.cat(places).to(x.device))


def documents_of(x_TH: Tensor, rows: Rows, context: TokenContext) -> list[Piece]:
    """Returns the documents of a pass, one after the other."""
    lengths = context.documents.lengths
    numbers = (rows.tokens_BS.flatten(), rows.positions_BS.flatten(), context.token_index)
    parts = (one.split(lengths) for one in (x_TH, *numbers))
    return [Piece(*one) for one in zip(*parts, strict=True)]
