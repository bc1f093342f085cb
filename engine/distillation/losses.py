"""Losses between the distributions of a model and of its teachers, at each target token.

With z the model's logits, t the temperature, p = softmax(z / t), y the token, and a the share of the labels, the loss
of a token is

    l = (1 - a) D - a log softmax(z)_y

**Of a teacher's K most likely tokens**, with probabilities q_k, D is a forward divergence over them:

    renormalize:  D = sum_k c_k (log c_k - log p_k),  c_k = q_k^(1/t) / sum_j q_j^(1/t)
    bucket:       D = sum_k q_k (log q_k - log p_k) + r (log r - log s),  r = 1 - sum_k q_k,  s = 1 - sum_k p_k

The first takes the K tokens for the whole distribution, and draws all of the model's probability to them. The second
takes all other tokens for one, so that the model keeps the teacher's mass outside of them and is free to spread it; at
temperature 1 alone, since the mass at another one is not known.

**Of a teacher's whole distribution** q = softmax(z_teacher / t), D is the generalised Jensen-Shannon divergence of
arXiv 2306.13649, with b the option beta:

    b = 0:  D = sum_v q_v (log q_v - log p_v)
    b = 1:  D = sum_v p_v (log p_v - log q_v)
    else:   D = b sum_v q_v (log q_v - log m_v) + (1 - b) sum_v p_v (log p_v - log m_v),  m = b q + (1 - b) p

Of several teachers, D is the sum of theirs, each with its weight. The gradients with respect to z are, in this order,
(c - p) / t with the opposite sign; p - q at the K tokens and p (1 - r / s) elsewhere; and with w_v = log p_v - log q_v
at b = 1 and (1 - b) (log p_v - log m_v) between, p_v (w_v - sum_u p_u w_u) / t.

Legend: C tokens of a block, V vocabulary rows held here, K tokens of a teacher.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.batch import IGNORE_LABEL
from engine.distributed.collectives import all_reduce
from engine.ops.block_loss import Block, HeldVocabulary

FIGURES = ("loss", "divergence", "next_token_loss")
"""The figures of a token: its loss, D, and the negative log-likelihood of its label."""


class Softmax(NamedTuple):
    """A distribution over the whole vocabulary.

    Args:
        logps_CV: log-probabilities of the ids held here.
        probabilities_CV: their exponentials.
    """

    logps_CV: Tensor
    probabilities_CV: Tensor

    @classmethod
    def of(cls, logits_CV: Tensor, held: HeldVocabulary) -> Softmax:
        """Returns the softmax of logits over all ranks."""
        largest_C = logits_CV.new_full((len(logits_CV),), -torch.inf)
        if held.num_ids:
            largest_C = logits_CV.amax(-1)
        largest_C = all_reduce(largest_C, held.axis, dist.ReduceOp.MAX)
        logps_CV = logits_CV - largest_C[:, None]
        total_C = all_reduce(logps_CV.exp().sum(-1), held.axis)
        logps_CV = logps_CV.sub_(total_C.log()[:, None])
        return cls(logps_CV, logps_CV.exp())

    def picked(self, ids_CK: Tensor, held: HeldVocabulary) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the log-probabilities of some ids, [C, K], equal on all ranks, their places among those held here,
        and which are; 0 of ids that no rank holds."""
        places_CK = ids_CK - held.first_id
        here_CK = (places_CK >= 0) & (places_CK < held.num_ids)
        places_CK = torch.where(here_CK, places_CK, 0)
        found_CK = self.logps_CV.new_zeros(ids_CK.shape)
        if held.num_ids:
            found_CK = torch.where(here_CK, self.logps_CV.gather(1, places_CK), 0.0)
        return all_reduce(found_CK, held.axis), places_CK, here_CK


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributionLoss(ABC):
    """The loss of a micro-batch's tokens; see `engine.ops.block_loss.BlockLoss`.

    Args:
        labels_T: int64 global ids, or IGNORE_LABEL.
        temperature: of both distributions.
        label_share: a, from 0 to 1.
    """

    labels_T: Tensor
    temperature: float
    label_share: float
    num_figures = len(FIGURES)

    @abstractmethod
    def divergence(
        self, student: Softmax, block: Block, held: HeldVocabulary, *, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns D, [C], equal on all ranks, and t times its gradient with respect to the logits, [C, V].

        Args:
            student: at the temperature.
            block, held, gradient: as for `compute`.
        """

    def compute(
        self, logits_CV: Tensor, block: Block, held: HeldVocabulary, *, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the figures of a block, and the gradient; see `engine.ops.block_loss.BlockLoss`."""
        labels_C, share, t = self.labels_T[block.tokens], self.label_share, self.temperature
        plain = Softmax.of(logits_CV, held)
        student = plain if t == 1.0 else Softmax.of(logits_CV / t, held)
        divergence_C, gradient_CV = self.divergence(student, block, held, gradient=gradient)
        counted_C = labels_C != IGNORE_LABEL
        label_C, places_C1, here_C1 = plain.picked(labels_C[:, None], held)
        likelihoods_C = torch.where(counted_C, -label_C[:, 0], 0.0)
        divergence_C = torch.where(counted_C, divergence_C, 0.0)
        figures_CF = torch.stack(
            ((1.0 - share) * divergence_C + share * likelihoods_C, divergence_C, likelihoods_C), dim=1
        )
        if gradient_CV is None:
            return figures_CF, None
        gradient_CV = gradient_CV.mul_((1.0 - share) / t)
        if share:
            gradient_CV = gradient_CV.add_(plain.probabilities_CV, alpha=share)
            if held.num_ids:
                gradient_CV.scatter_add_(1, places_C1, torch.where(here_C1, -share, 0.0).to(gradient_CV.dtype))
        return figures_CF, gradient_CV.masked_fill_(~counted_C[:, None], 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopTokensLoss(DistributionLoss):
    """The divergence from a teacher's most likely tokens.

    Args:
        ids_KT: int64 global ids; negative where a token has fewer.
        logps_KT: fp32 log-probabilities under the teacher at temperature 1; -inf where a token has fewer.
        bucket: whether all other tokens count as one; else the K tokens count as all.
    """

    ids_KT: Tensor
    logps_KT: Tensor
    bucket: bool

    def divergence(
        self, student: Softmax, block: Block, held: HeldVocabulary, *, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        ids_CK = self.ids_KT[:, block.tokens].t()
        targets_CK = self.logps_KT[:, block.tokens].t().to(student.logps_CV.dtype)
        given_CK = ids_CK >= 0
        own_CK, places_CK, here_CK = student.picked(ids_CK, held)
        if not self.bucket:
            # a token without any is no target, and its loss is not counted
            targets_CK = torch.where(given_CK, targets_CK / self.temperature, -torch.inf)
            empty_C1 = ~given_CK.any(1, keepdim=True)
            targets_CK = targets_CK.masked_fill(empty_C1, 0.0).log_softmax(1)
        weights_CK = torch.where(given_CK, targets_CK.exp(), 0.0)
        divergence_C = _terms(weights_CK, targets_CK, own_CK).sum(1)
        slopes_CV = student.probabilities_CV if gradient else None
        if self.bucket:
            rest_C = (1.0 - weights_CK.sum(1)).clamp(min=0.0)
            others_CV = student.probabilities_CV.clone()
            if held.num_ids:
                others_CV = _zeroed(others_CV, places_CK, here_CK)
            own_rest_C = all_reduce(others_CV.sum(1), held.axis)
            tiny = torch.finfo(own_rest_C.dtype).tiny
            own_rest_C = own_rest_C.clamp(min=tiny)
            divergence_C = divergence_C + _terms(rest_C, rest_C.clamp(min=tiny).log(), own_rest_C.log())
            if slopes_CV is not None:
                slopes_CV = slopes_CV.addcmul(others_CV, (rest_C / own_rest_C)[:, None], value=-1.0)
        elif slopes_CV is not None:
            slopes_CV = slopes_CV * weights_CK.sum(1, keepdim=True)
        if slopes_CV is not None and held.num_ids:
            slopes_CV.scatter_add_(1, places_CK, torch.where(here_CK, -weights_CK, 0.0))
        return divergence_C, slopes_CV


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeLoss(DistributionLoss):
    """The divergence from the whole distributions of teachers.

    Args:
        teachers: each returns a block's logits over the ids held here, wide and before the temperature. Collective over
            the ranks of the vocabulary.
        weights: of the teachers.
        beta: b, from 0 to 1.
    """

    teachers: Sequence[Callable[[Block, HeldVocabulary], Tensor]]
    weights: Sequence[float]
    beta: float

    def divergence(
        self, student: Softmax, block: Block, held: HeldVocabulary, *, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        divergence_C = student.logps_CV.new_zeros(len(student.logps_CV))
        gradient_CV = torch.zeros_like(student.logps_CV) if gradient else None
        for logits, weight in zip(self.teachers, self.weights, strict=True):
            teacher = Softmax.of(logits(block, held).to(student.logps_CV.dtype) / self.temperature, held)
            own_C, own_CV = generalised_divergence(student, teacher, self.beta, held)
            divergence_C = divergence_C + weight * own_C
            if gradient_CV is not None:
                gradient_CV.add_(own_CV, alpha=weight)
        return divergence_C, gradient_CV


def generalised_divergence(
    student: Softmax, teacher: Softmax, beta: float, held: HeldVocabulary
) -> tuple[Tensor, Tensor]:
    """Returns the divergence of two distributions, [C], and its gradient with respect to the student's logits, [C, V].
    Collective over the ranks of the vocabulary."""
    p_CV, q_CV = student.probabilities_CV, teacher.probabilities_CV
    if beta == 0.0:
        found_C = _terms(q_CV, teacher.logps_CV, student.logps_CV).sum(1)
        return all_reduce(found_C, held.axis), p_CV - q_CV
    if beta == 1.0:
        slopes_CV = student.logps_CV - teacher.logps_CV
        found_C = all_reduce((p_CV * slopes_CV).sum(1), held.axis)
        return found_C, slopes_CV.sub_(found_C[:, None]).mul_(p_CV)
    mixed_CV = (beta * q_CV).add_(p_CV, alpha=1.0 - beta)
    mixed_CV = mixed_CV.clamp_(min=torch.finfo(mixed_CV.dtype).tiny).log_()
    of_teacher_C = _terms(q_CV, teacher.logps_CV, mixed_CV).sum(1)
    slopes_CV = student.logps_CV - mixed_CV
    of_student_C = (p_CV * slopes_CV).sum(1)
    of_teacher_C, of_student_C = all_reduce(torch.stack((of_teacher_C, of_student_C)), held.axis).unbind()
    found_C = beta * of_teacher_C + (1.0 - beta) * of_student_C
    return found_C, slopes_CV.sub_(of_student_C[:, None]).mul_(p_CV).mul_(1.0 - beta)


def _terms(weights: Tensor, of_weights: Tensor, others: Tensor) -> Tensor:
    """Returns weight * (log of it - other), 0 where the weight is 0."""
    return torch.where(weights > 0, weights * (of_weights - others), 0.0)


def _zeroed(values_CV: Tensor, places_CK: Tensor, here_CK: Tensor) -> Tensor:
    """Returns values with 0 at the places that are here."""
    marked_CV = torch.zeros_like(values_CV).scatter_add_(1, places_CK, here_CK.to(values_CV.dtype))
    return values_CV.masked_fill_(marked_CV > 0, 0.0)
