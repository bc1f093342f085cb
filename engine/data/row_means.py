"""Evaluation that averages per row: every row weighs the same, however many target tokens it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from engine.batch import Batch
from engine.data.loader import EvalLoader


class RowMeanLoader(EvalLoader):
    """An `EvalLoader` in which the targets of a row have weights that add up to 1.

    The mean over all of them is then the mean over rows of each row's own mean over its targets. Rows without targets
    have weight 0.
    """

    def __iter__(self) -> Iterator[Batch]:
        length = self.dataset.seq_length
        # fillers have row numbers after the last, and weights of 0
        counts = torch.from_numpy(self.dataset.target_counts[: self.num_samples]).clamp(min=1).float()
        for batch in super().__iter__():
            rows = (batch.token_index_BS[:, :1] // length).clamp(max=self.num_samples - 1)
            yield replace(batch, loss_weights_BS=batch.loss_weights_BS / counts[rows])

    def target_count(self) -> float:
        """Returns the number of rows with targets."""
        return float((self.dataset.target_counts[: self.num_samples] > 0).sum())
