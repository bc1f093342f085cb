"""How many steps come before a capture, and counts of what was replayed."""

from __future__ import annotations

from dataclasses import dataclass

WARMUP_STEPS = 3
"""Steps before the capture. They compile and load kernels and make communicators and workspaces, as a capture must not.

They are the first steps of training itself: nothing is undone afterwards, because nothing was done beside training. The
alternatives each need more: a copy of masters and moments to restore, or a step that changes nothing, which would have
to hold for every counter and every rank.
"""


@dataclass(slots=True)
class GraphCounts:
    """Counts of replayed and other units.

    Args:
        unit: of the counts.
        warmup: before the capture.
        replayed: by a graph.
        beside: of another shape than the graph's, or with more documents than it has room for.
    """

    unit: str
    warmup: int = 0
    replayed: int = 0
    beside: int = 0

    def line(self) -> str:
        """Returns the line for the summary."""
        return (
            f"{self.replayed} {self.unit} replayed, {self.warmup} before the capture, {self.beside} beside the graph "
            "(they did not fit)"
        )
