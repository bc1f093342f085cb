"""What stands around transformers' modules whose outputs, or their gradients, tensor ranks have parts of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.adopted.tensor_plan import TensorPlan
from engine.distributed.differentiable import from_partial, to_partial
from engine.distributed.mesh import Axis


def over_ranks(plan: TensorPlan, name: str, module: nn.Module, tp: Axis) -> nn.Module:
    """Returns what takes a module's place on tensor ranks; the module itself where nothing does.

    Args:
        name: of the module, inside the body.
    """
    if plan.sums_experts(name):
        return SummedExperts(module, tp)
    if (width := plan.shared_width(name)) is not None:
        return SharedKeys(module, width, tp)
    if plan.divides_output(name):
        return Divided(module, tp)
    return module


class Divided(nn.Module):
    """A module that every tensor rank computes alike, in a sum over the ranks: each has its part."""

    def __init__(self, module: nn.Module, tp: Axis) -> None:
        super().__init__()
        self.module, self._tp = module, tp

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x)
        return out / self._tp.size


class SummedExperts(nn.Module):
    """A stack of experts of which each tensor rank has a part of the inner features."""

    def __init__(self, experts: nn.Module, tp: Axis) -> None:
        super().__init__()
        self.experts, self._tp = experts, tp

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("experts"), name)

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        inputs = [self._partial(value) for value in arguments]
        out = self.experts(*inputs, **{key: self._partial(value) for key, value in named.items()})
        return from_partial(out, self._tp, splits_tokens=False)

    def _partial(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return to_partial(value, self._tp, splits_tokens=False)


class SharedKeys(nn.Module):
    """A linear, the same on every tensor rank, whose last outputs are the rotated part of every head's key: its
    gradient is the sum over the ranks' heads. The other outputs go through a split linear, which sums theirs.

    Args:
        linear: x [..., I] -> [..., O].
        width: the number of those last outputs.
    """

    def __init__(self, linear: nn.Module, width: int, tp: Axis) -> None:
        super().__init__()
        self.linear, self._width, self._tp = linear, width, tp

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        latent, shared = out.split([out.shape[-1] - self._width, self._width], dim=-1)
        return torch.cat([latent, to_partial(shared.contiguous(), self._tp, splits_tokens=False)], dim=-1)
