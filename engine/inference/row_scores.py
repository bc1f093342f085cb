"""Log-probabilities of the tokens of whole rows, by passes without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.data.dataset import TokenDataset, dataset_of
from engine.inference.token_scores import Question, token_scores
from engine.models.decoder import Decoder
from engine.models.head_figures import SeveralLabels
from engine.ops.attention.token_context import TokenContext


def scored_rows(rows: Sequence[tuple[Sequence[int], int]], *, seq_length: int) -> TokenDataset:
    """Returns rows of which some tokens are scored, as a data set.

    Args:
        rows: the ids of each, and how many of its last tokens are scored; its first has nothing before it.
        seq_length: of a row, at least that of the longest.
    """
    documents = [(ids, [place >= len(ids) - scored for place in range(len(ids))]) for ids, scored in rows]
    return dataset_of(documents, seq_length=seq_length)


def with_labels(batch: Batch) -> Batch:
    """Returns a batch with its labels as `read_scores` reads them."""
    return batch.with_parts(SeveralLabels(labels_KBS=batch.labels_BS[None]))


def read_scores(model: Decoder, out: Tensor, batch: Batch, context: TokenContext) -> Tensor:
    """Returns fp64 [2, T], the log-probability of each token's label and whether it is the most likely one; see
    `engine.training.stage.ReadHead`."""
    found_TF = token_scores(model, out, batch, context, Question(best=1))
    labels_T, best_T, logps_T, _ = found_TF.unbind(dim=1)
    return torch.stack((logps_T, (labels_T == best_T).double()))
