"""The auxiliary loss that has routers spread tokens evenly (Switch Transformer, arXiv 2101.03961, equations 4 to 6).

    loss = E sum_e f_e P_e        f_e = choices of expert e / N        P_e = sum over the N of softmax(logits)_e / N

N are the tokens of the global batch, without padding, in every layer that has a router: one loss for the whole model,
as transformers computes it. f has no gradient, so that

    d loss / d softmax(logits)_e = E f_e / N  for each token,

which is known once all tokens of the batch have been through all layers, on all ranks. So they are counted before the
first backward: in the forward pass that backward follows where that is one, else in a pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Axis
from engine.experts.ops.routing import Slots
from engine.ops.attention.token_context import AuxiliaryLoss


class LoadBalance(AuxiliaryLoss):
    """What a step's routers chose, and the gradient that follows from it.

    Args:
        coefficient: on the loss.
        num_experts: of each layer.
        axes: whose ranks have other tokens or other layers.
        device: of the model.
        loss_scale: 0-dim fp32 that losses are multiplied by before backward; None for 1.
    """

    def __init__(
        self,
        coefficient: float,
        num_experts: int,
        *,
        axes: Sequence[Axis] = (),
        device: torch.device,
        loss_scale: Tensor | None = None,
    ) -> None:
        self._coefficient, self._axes, self._loss_scale = coefficient, tuple(axes), loss_scale
        self._sums_3E = torch.zeros(3, num_experts, dtype=torch.float64, device=device)
        """Choices of each expert and the sum of its probabilities, and in the last row the number of tokens."""
        self._counts = False
        self.counts_alone = False
        """Whether the pass that goes forward now is for counting alone."""
        self.slope_E = torch.zeros(num_experts, dtype=torch.float32, device=device)
        """The gradient with respect to each probability of a token, with the loss scale."""
        self.loss = torch.zeros((), dtype=torch.float32, device=device)
        """The loss of the last step whose counts are finished, without its coefficient."""

    def begin(self, *, counts_alone: bool) -> None:
        """Counts from now on what routers choose, until `finish_counts`."""
        self._counts, self.counts_alone = True, counts_alone
        self._sums_3E.zero_()

    def finish_counts(self) -> None:
        """Puts the ranks' counts together, if they have been counting. Collective over the axes."""
        if not self._counts:
            return
        self._counts = self.counts_alone = False
        for axis in self._axes:
            all_reduce(self._sums_3E, axis)
        choices_E, probabilities_E, tokens_E = self._sums_3E.unbind()
        tokens = tokens_E.clamp(min=1.0)
        share_E = choices_E / tokens * len(choices_E)
        self.loss.copy_((share_E * probabilities_E / tokens).sum())
        slope_E = share_E / tokens * self._coefficient
        self.slope_E.copy_(slope_E if self._loss_scale is None else slope_E * self._loss_scale)

    @torch.no_grad()
    def seen(self, logits_TE: Tensor, slots: Slots, counts_T: Tensor | None) -> None:
        """Counts, where it is time to.

        Args:
            logits_TE: of a router.
            slots: what it chose by them.
            counts_T: fp32, how often each token counts; None where each counts once.
        """
        if not self._counts:
            return
        times_T = torch.ones_like(logits_TE[:, 0], dtype=torch.float64)
        if counts_T is not None:
            times_T.copy_(counts_T)
        times_N = times_T.index_select(0, slots.tokens_N)
        self._sums_3E[0].scatter_add_(0, slots.experts_N, times_N)
        probabilities_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
        if counts_T is not None:
            probabilities_TE.mul_(counts_T[:, None])
        self._sums_3E[1].add_(probabilities_TE.sum(dim=0, dtype=torch.float64))
        self._sums_3E[2].add_(times_T.sum())

    def through(self, logits_TE: Tensor, counts_T: Tensor | None) -> Tensor:
        """Returns the logits, to whose gradient backward adds that of the loss."""
        return _Balanced.apply(logits_TE, counts_T, self) if logits_TE.requires_grad else logits_TE


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, counts_T: Tensor | None, balance: LoadBalance) -> Tensor:
        probabilities_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
        ctx.save_for_backward(probabilities_TE, *(() if counts_T is None else (counts_T,)))
        ctx.balance = balance
        return logits_TE.view_as(logits_TE)

    @staticmethod
    def backward(ctx: Any, d_logits_TE: Tensor) -> tuple[Tensor, None, None]:
        probabilities_TE, *counts = ctx.saved_tensors
        slope_E = ctx.balance.slope_E
        added_TE = probabilities_TE * (slope_E - probabilities_TE @ slope_E[:, None])
        if counts:
            added_TE.mul_(counts[0][:, None])
        return added_TE.add_(d_logits_TE).to(d_logits_TE.dtype), None, None
