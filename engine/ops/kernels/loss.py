"""Statistics and gradient of a shard of the vocabulary, a `LossKernels`; see engine.kernels.linear_cross_entropy."""

from __future__ import annotations

from torch import Tensor

from engine.kernels import reference_fused
from engine.kernels.linear_cross_entropy import GPU_TOKENS, LossKernels
from engine.kernels.native import cross_entropy, product
from engine.ops.kernels.op import Op, wide


def _statistics_shape(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    maximum, total, target = wide(logits, (3, logits.shape[0])).unbind()
    return maximum, total, target


LOSS = Op(
    reference=LossKernels(statistics=reference_fused.local_statistics, gradient=reference_fused.local_gradient),
    native=LossKernels(
        statistics=cross_entropy.local_statistics, gradient=cross_entropy.local_gradient, product=product.product
    ),
    triton=LossKernels(
        statistics="engine.kernels.triton.ops:loss_statistics",  # type: ignore[arg-type]  # resolved late
        gradient="engine.kernels.triton.cross_entropy:local_gradient",  # type: ignore[arg-type]
        tokens_multiple=GPU_TOKENS,
    ),
    shape=LossKernels(statistics=_statistics_shape, gradient=lambda logits, *_: logits),
    triton_shape=LossKernels(
        statistics=_statistics_shape, gradient=lambda logits, *_: logits, tokens_multiple=GPU_TOKENS
    ),
)
