"""Evaluation that averages per row: every row weighs the same, however many target tokens it has."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.batch import Batch
from engine.data.loader import EvalLoader


class RowMeanLoader(EvalLoader):
    """An `EvalLoader` in which the targets of a row have weights that add up to 1.

    The mean over all of them is then the mean over rows of each row's own mean over its targets. Rows without targets
    have weight 0.
    """

    def batch(self, number: int) -> Batch:
        """Builds the micro-batch of this number, from 0."""
        batch = super().batch(number)
        # fillers have row numbers after the last, and weights of 0
        rows = (batch.token_index_BS[:, :1] // self.dataset.seq_length).clamp(max=self.num_samples - 1)
        counts = torch.from_numpy(self.dataset.target_counts)[rows].clamp(min=1).float()
        return replace(batch, loss_weights_BS=batch.loss_weights_BS / counts)

    def target_count(self) -> float:
        """Returns the number of rows with targets."""
        return float((self.dataset.target_counts[: self.num_samples] > 0).sum())
