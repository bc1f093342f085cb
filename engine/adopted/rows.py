"""The rows of a micro-batch, as transformers' modules take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.ops.attention.token_context import ContextPart


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows(ContextPart):
    """The rows that layers see flattened.

    Args:
        positions_BS: int64 position of each token inside its document.
    """

    positions_BS: Tensor

    def shared(self) -> tuple[Tensor, ...]:
        return (self.positions_BS,)
