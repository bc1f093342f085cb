"""The answers of a micro-batch: the number of the answer that each token belongs to, where answers are compared."""

from __future__ import annotations

import torch

from engine.batch import InputRank
from engine.data.dataset import TokenDataset
from engine.data.parts import CollatedRows, NumberedDocuments
from engine.preferences.batch_parts import Answers


class RowAnswers(NumberedDocuments):
    """Collects the answers of a micro-batch; see `engine.data.parts.PartCollector`."""

    def __init__(self, dataset: TokenDataset, input_rank: InputRank) -> None:
        super().__init__()
        self._dataset = dataset

    def finish(self, rows: CollatedRows) -> tuple[Answers]:
        """Returns the answers."""
        documents, known = self.documents, self._dataset.reference_logps
        ids_BS, lengths = self.numbered(rows)
        answers = Answers(
            ids_BS=torch.from_numpy(ids_BS),
            signs=torch.from_numpy(self._dataset.signs[documents]),
            lengths=torch.from_numpy(lengths),
            documents=tuple(documents),
            reference_logps=None if known is None else torch.from_numpy(known[documents]),
        )
        return (answers,)
