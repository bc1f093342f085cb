"""The part of a micro-batch whose answers are scored.

Legend: B rows (micro-batch), S columns (row length), N answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from engine.batch import BatchPart


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredAnswers(BatchPart):
    """The answers of a micro-batch in the order of the documents they are in: a preferred one, then the other of its
    pair.

    Args:
        numbers_BS: int64, the number of the answer whose score the token has, -1 for all other tokens.
        margins: float32 [N / 2], by which the preferred answer of each pair is to be ahead.
    """

    graphs_ignore: ClassVar[bool] = True
    numbers_BS: Tensor
    margins: Tensor
