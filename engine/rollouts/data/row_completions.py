"""The completions of a micro-batch, with the values of each token in the column of its label."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL, InputRank
from engine.data.dataset import TokenDataset
from engine.data.parts import CollatedRows, NumberedDocuments
from engine.rollouts.batch_parts import Completions
from engine.rollouts.data.completions import CompletionColumns


class RowCompletions(NumberedDocuments):
    """Collects the completions of a micro-batch; see `engine.data.parts.PartCollector`."""

    def __init__(self, dataset: TokenDataset, input_rank: InputRank) -> None:
        super().__init__()
        self._dataset = dataset

    def finish(self, rows: CollatedRows) -> tuple[Completions]:
        """Returns the completions."""
        columns, documents = self._dataset.extra(CompletionColumns), self.documents
        assert columns is not None, "documents that are no completions"
        ids_BS, lengths = self.numbered(rows)
        logps_BS: dict[str, Tensor | None] = {}
        for name, known in columns.of_tokens().items():
            logps_BS[f"{name}_BS"] = None
            if known is None:
                continue
            values_BS = np.zeros(rows.labels_BS.shape, dtype=np.float32)
            for placed, held in self.spans():
                first = int(self._dataset.starts[placed.document])
                values_BS[placed.row, held.start : held.stop - 1] = known[first + 1 : first + placed.length]
            trained = np.where(rows.labels_BS != IGNORE_LABEL, values_BS, np.float32(0))
            logps_BS[f"{name}_BS"] = torch.from_numpy(trained)
        sampled_BS = logps_BS.pop("sampled_logps_BS")
        assert sampled_BS is not None
        completions = Completions(
            ids_BS=torch.from_numpy(ids_BS),
            advantages=torch.from_numpy(columns.advantages[documents]),
            lengths=torch.from_numpy(lengths),
            documents=tuple(documents),
            sampled_logps_BS=sampled_BS,
            **logps_BS,
        )
        return (completions,)
