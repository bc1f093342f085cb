"""The model as a pipeline stage: forward and backward of loaded micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch
from engine.models.decoder import Decoder
from engine.objectives.language_modeling import LanguageModeling


class ModelStage:
    """The whole model on one stage.

    Args:
        model: on its device.
        objective: turns token losses into the loss.
        device: of the batches.
    """

    def __init__(self, model: Decoder, objective: LanguageModeling, device: torch.device) -> None:
        self._model, self._objective, self._device = model, objective, device
        self._batches: list[Batch] = []
        self._alive: dict[int, Tensor] = {}
        self._scale = 1.0
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        """Optimizer steps taken; the dropout coordinate, on the device so that a graph can replay it."""
        self.loss_sum = torch.zeros((), dtype=torch.float32, device=device)
        """Sum of this rank's weighted token losses since `load`."""

    def load(self, batches: list[Batch], target_count: float) -> None:
        """Takes this rank's micro-batches of a step.

        Args:
            batches: one per micro-batch.
            target_count: sum of the loss weights over the *global* batch; gradients are divided by it.
        """
        self._batches = [batch.to(self._device) for batch in batches]
        self._scale = 1.0 / max(target_count, 1.0)
        self.loss_sum.zero_()

    def forward(self, microbatch: int) -> None:
        batch = self._batches[microbatch]
        loss = self._objective.loss_sum(self._model(batch, self.step), batch)
        self.loss_sum.add_(loss.detach())
        self._alive[microbatch] = loss

    def backward(self, microbatch: int) -> None:
        (self._alive.pop(microbatch) * self._scale).backward()
