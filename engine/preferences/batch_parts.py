"""Parts of a micro-batch whose answers are compared.

Legend: B rows (micro-batch), S columns (row length), N answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from engine.batch import Batch, BatchPart


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers(BatchPart):
    """The answers of a micro-batch whose likelihoods are compared, numbered in the order of the documents they are in.

    Args:
        ids_BS: int64 number of the answer whose document each token belongs to; arbitrary for padding, whose
            weight is 0.
        signs: float32 [N]: 1 for an answer that was preferred, -1 for one that was not. In pairs the two alternate.
        lengths: float32 [N], target tokens of each answer, over whole rows.
        documents: number of each in the data set, on the host.
        reference_logps: float32 [N], log-likelihoods under the reference; None where they were not computed before
            training.
    """

    graphs_ignore: ClassVar[bool] = True
    ids_BS: Tensor
    signs: Tensor
    lengths: Tensor
    documents: tuple[int, ...]
    reference_logps: Tensor | None = None

    @property
    def brings_reference(self) -> bool:
        return self.reference_logps is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatched(BatchPart):
    """The questions of the same rows with other questions' answers, where the objective needs their likelihoods.

    Args:
        batch: of rows of their own length, of which it has this context rank's columns already.
    """

    graphs_ignore: ClassVar[bool] = True
    batch: Batch

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Returns the part with `change` applied to each tensor of its batch."""
        return replace(self, batch=self.batch.map(change))

    def without_input(self) -> Self:
        """Returns the part without the tensors that only the model's input stage needs."""
        return replace(self, batch=self.batch.without_input())
