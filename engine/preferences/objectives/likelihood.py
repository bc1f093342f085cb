"""Log-likelihoods of the answers of a micro-batch, from which all objectives that compare answers are computed.

Legend: T tokens held here, N answers of the micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch
from engine.distributed.differentiable import reduce_from_all
from engine.distributed.mesh import Axis
from engine.preferences.batch_parts import Answers


def answers_of(batch: Batch) -> Answers:
    """Returns the answers of a batch, which must have some."""
    answers = batch.part(Answers)
    assert answers is not None, "a batch without answers"
    return answers


def log_likelihoods(token_losses_T: Tensor, batch: Batch, cp: Axis) -> Tensor:
    """Returns the log-likelihood of each answer given its question, over its target tokens in the whole row;
    differentiable.

    Args:
        token_losses_T: fp32 [T] negative log-likelihoods.
        batch: their weights and answers.
        cp: over whose ranks the tokens of each row are split; all of them get the same.

    Returns:
        fp32 [N].
    """
    weighted_T = token_losses_T * batch.loss_weights_BS.flatten()
    answers = answers_of(batch)
    numbers = torch.arange(answers.signs.shape[0], device=weighted_T.device)
    # no atomic additions: the same bits in every run
    held = torch.where(answers.ids_BS.flatten() == numbers[:, None], weighted_T, 0.0).sum(dim=1)
    return -reduce_from_all(held, cp)
