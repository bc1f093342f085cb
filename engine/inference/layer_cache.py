"""What one layer keeps of all rows: its pools of pages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.inference.pages import PageTable
from engine.ops.kernels import AttendPages


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The keys and values of a layer.

    Args:
        keys, values: [S, K, D], S places of the pool and K heads of size D.
        table: which pages of it each row has.
        softcap, sinks_H: as of `engine.layers.attention.CachedAttention`.
        attend: reads pages where they are; None where they are gathered.
    """

    keys: Tensor
    values: Tensor
    table: PageTable
    softcap: float | None
    sinks_H: Tensor | None
    attend: AttendPages | None
