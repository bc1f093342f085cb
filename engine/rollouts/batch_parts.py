"""The part of a micro-batch that holds the completions to train on.

Legend: B rows (micro-batch), S columns (row length), N completions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from engine.batch import BatchPart


@dataclass(frozen=True, kw_only=True, slots=True)
class Completions(BatchPart):
    """The completions of a micro-batch that are made more or less likely, numbered in the order of their documents.

    Args:
        ids_BS: int64 number of the completion whose document each token belongs to; arbitrary for padding, whose
            weight is 0.
        advantages: float32 [N], the advantage of each over its group.
        lengths: float32 [N], target tokens of each, over whole rows; 0 where a completion is kept out of the loss.
        documents: number of each in the data set, on the host.
        sampled_logps_BS: float32, log-probability of each label when it was sampled; 0 where there is no target.
        old_logps_BS: float32, the same under the model that the generation batch began to be trained with; None where
            that is the current model.
        reference_logps_BS: float32, the same under the reference; None where there is none, or where it is computed
            with each step.
        token_advantages_BS: float32, what is added to the advantage of the completion at each label; None for nothing.
    """

    graphs_ignore: ClassVar[bool] = True
    ids_BS: Tensor
    advantages: Tensor
    lengths: Tensor
    documents: tuple[int, ...]
    sampled_logps_BS: Tensor
    old_logps_BS: Tensor | None = None
    reference_logps_BS: Tensor | None = None
    token_advantages_BS: Tensor | None = None

    @property
    def brings_reference(self) -> bool:
        return self.reference_logps_BS is not None
