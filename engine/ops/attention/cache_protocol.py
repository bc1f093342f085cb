"""The interface of attention to a cache of keys and values, for generation token by token.

Only the interface is here: the cache decides its rows and the tokens kept of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from engine.kernels.records import Documents
from engine.ops.kernels import Attention


class KeyValueCache(Protocol):
    """Keys and values of earlier tokens, as one pass through the layers sees them."""

    @property
    def length(self) -> int:
        """The most tokens that a row may reach."""
        ...

    @property
    def starts(self) -> Mapping[int, int] | None:
        """First token of each prompt of the pass -> the prompt's slot; None where token i continues the row of slot
        i."""
        ...

    @property
    def continues(self) -> bool:
        """Whether the pass has several new tokens of one row, its first document; the others only fill it up."""
        ...

    def keep(self, layer: str, slot: int, beside: tuple[Tensor, ...] | None) -> None:
        """Keeps a layer's tensors of a row, beside its keys and values, in place of earlier ones; None for none.

        Rows that continue one prompt have the same: nothing may be written into them."""
        ...

    def kept(self, layer: str, slot: int) -> tuple[Tensor, ...] | None:
        """Returns the tensors that `keep` took."""
        ...

    def keep_states(self, layer: str, states: tuple[Tensor, ...]) -> None:
        """Keeps the states that prompts leave, as those of all rows that continue them, or those that the new tokens of
        one row leave it.

        Args:
            states: [P, ...] each, of the pass's documents in their order.
        """
        ...

    def states(self, layer: str) -> tuple[Tensor, ...] | None:
        """Returns the states of the rows that a pass continues, [rows, ...] each, to be updated in place; None where
        the layer has kept none. Tokens beyond the rows only fill up the pass."""
        ...

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
        """Caches k and v, and attends to them and to the keys and values cached before.

        Args:
            layer: the attention's name, such as `layers.3.attention`.
            q_THD: [T, H, D]; k_TKD, v_TKD: [T, K, D], rotated.
            whole: attention of documents that begin with these tokens.
            documents: those of these tokens.
            scale: on scores.

        Returns:
            [T, H, D].
        """
        ...
