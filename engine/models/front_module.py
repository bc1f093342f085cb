"""Models that the first part runs between the embedding and the first layer, and what they leave beside the stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from engine.batch import Batch
from engine.layers.module import ShardedModule, ShardEntry
from engine.ops.attention.token_context import ContextPart


class FrontModule(ShardedModule):
    """A model that the first part runs between the embedding and the first layer."""

    stays_whole: ClassVar[bool] = False
    """Whether its weights are neither sharded nor offloaded: ranks run it or not, as their micro-batches have it."""

    @property
    def trained(self) -> list[ShardEntry]:
        """The parameters that train."""
        raise NotImplementedError

    def placed(self, x: Tensor, batch: Batch, *, adapters: bool, step: Tensor | None) -> Tensor:
        """Returns the residual stream with features in their places, and below it features for later layers.

        Args:
            x: token embeddings, [T, hidden] (or [T / tp, hidden]).
            adapters: False leaves adapters out.
            step: int64 0-dim, the optimizer step, a coordinate of what adapters drop; None drops nothing.
        """
        raise NotImplementedError

    def carried(self, batch: Batch, *, adapters: bool, step: Tensor | None) -> Tensor:
        """Returns the features that stand beside the stream, [`Front.num_carried`, `Front.carried_width`]."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Carried(ContextPart):
    """Rows that stand beside the stream for all layers.

    Args:
        rows: of each of the config's fronts, [`Front.num_carried`, `Front.carried_width`]; None where it has none.
    """

    rows: tuple[Tensor | None, ...]
