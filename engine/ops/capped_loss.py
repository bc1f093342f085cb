"""Cross-entropy statistics of logits under a soft cap, at a temperature t:

    z = cap tanh(logit / cap) / t,   dlogit = dz (1 - (t z / cap)^2) / t

In plain torch, with the signatures of `engine.kernels.linear_cross_entropy.LossKernels`, so that both ways to a loss
take them. The capped logits take the logits' place and stay there until the gradient is written over them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.linear_cross_entropy import LossKernels, entropy_gradient, entropy_moment


def capped_loss(cap: float, tokens_multiple: int, temperature: float = 1.0) -> LossKernels:
    """Returns the loss of a model whose logits are capped, in blocks of a multiple of so many tokens."""

    def statistics(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        capped_CV = logits_CV.div_(cap).tanh_().mul_(cap / temperature)
        wide = capped_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        maximum_C = wide.amax(-1)
        total_C = (wide - maximum_C[:, None]).exp_().sum(-1)
        target_C = wide.gather(1, targets_C.clamp(min=0)[:, None])[:, 0]
        return maximum_C, total_C, torch.where(targets_C >= 0, target_C, 0.0)

    def gradient(
        capped_CV: Tensor, targets_C: Tensor, local_max_C: Tensor, max_C: Tensor, total_C: Tensor, scale_C: Tensor
    ) -> Tensor:
        wide = capped_CV.to(max_C.dtype)
        slope = 1.0 - (wide * (temperature / cap)).square_()
        probabilities = (wide - max_C[:, None]).exp_().mul_((scale_C / total_C)[:, None])
        minus_scale = torch.where(targets_C >= 0, -scale_C, 0.0).to(probabilities.dtype)
        probabilities.scatter_add_(1, targets_C.clamp(min=0)[:, None], minus_scale[:, None])
        return capped_CV.copy_(probabilities.mul_(slope).div_(temperature))

    def moment(logits_CV: Tensor) -> Tensor:
        return entropy_moment((logits_CV / cap).tanh_().mul_(cap / temperature))

    def of_entropies(logits_CV: Tensor, max_C: Tensor, total_C: Tensor, entropies_C: Tensor, scale_C: Tensor) -> Tensor:
        capped_CV = (logits_CV / cap).tanh_().mul_(cap / temperature)
        slope = 1.0 - (capped_CV.to(max_C.dtype) * (temperature / cap)).square_()
        gradient_CV = entropy_gradient(capped_CV, max_C, total_C, entropies_C, scale_C)
        return logits_CV.copy_(slope.mul_(gradient_CV).div_(temperature))

    return LossKernels(
        statistics=statistics,
        gradient=gradient,
        moment=moment,
        entropy_gradient=of_entropies,
        tokens_multiple=tokens_multiple,
    )
