"""Linear inputs that are an activation's output: gated ones of [gate | up], and a squared one.

Legend: T tokens, I input features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.records import InputUpdate
from engine.ops.adapters import LowRank
from engine.ops.inputs import MadeFirst
from engine.ops.kernels import Kernels
from engine.ops.quantized_products import RowCodes


class _Gated(MadeFirst):
    """An input made from u = [gate | up], of half its width."""

    __slots__ = ()

    def features(self, u: Tensor) -> int:
        return u.shape[1] // 2

    def room(self, u: Tensor, out: Tensor | None) -> Tensor:
        """Returns where x is written: `out`, or a new tensor [T, I]."""
        return u.new_empty(u.shape[0], self.features(u)) if out is None else out


@dataclass(frozen=True, slots=True)
class SwiGLUInput(_Gated):
    """x = silu(gate) * up for u = [gate | up]."""

    def make(self, u: Tensor, out: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor | None]:
        x = self.room(u, out)
        kernels.swiglu_forward(u, x)
        return x, None

    def fuses_h(self, kernels: Kernels, out: Tensor | None) -> bool:
        return kernels.swiglu_project is not None

    def make_and_project(
        self, u: Tensor, out: Tensor | None, mask: Tensor | None, low_rank: LowRank, kernels: Kernels, h_out: Tensor
    ) -> Tensor:
        assert kernels.swiglu_project is not None
        x = self.room(u, out)
        kernels.swiglu_project(u, x, low_rank.a_RI, mask, low_rank.scale_of(mask), low_rank.adapters, h_out)
        return x

    def make_rows(self, u: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor | None, RowCodes | None]:
        if kernels.row_codes is None:
            return *self.make(u, None, kernels), None
        x = self.room(u, None)
        return x, None, RowCodes(*kernels.row_codes.swiglu(u, x))

    def gradient(
        self, dx: Tensor, u: Tensor, statistics: Tensor | None, update: InputUpdate | None, kernels: Kernels
    ) -> Tensor:
        return kernels.swiglu_backward(dx, u, update)

    def fuses_da(self, kernels: Kernels) -> bool:
        return True

    def gradient_and_da(
        self,
        dx: Tensor,
        u: Tensor,
        update: InputUpdate | None,
        dh: Tensor,
        mask: Tensor | None,
        low_rank: LowRank,
        kernels: Kernels,
    ) -> Tensor:
        if kernels.swiglu_backward_adapted is not None:
            sections = low_rank.sections(da=True)
            du = kernels.swiglu_backward_adapted(dx, u, update, dh, mask, low_rank.scale_of(mask), sections)
            low_rank.a_added()
            return du
        x = dx.new_empty(dx.shape)
        du = kernels.swiglu_backward(dx, u, update, x)
        low_rank.accumulate_a(dh, x, mask, kernels)
        return du


@dataclass(frozen=True, slots=True)
class GeGLUInput(_Gated):
    """x = gelu(gate) * up for u = [gate | up], gelu by its tanh approximation (Shazeer, arXiv 2002.05202).

    Plain torch whatever the backend, which only makes the adapters' update.
    """

    def make(self, u: Tensor, out: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor | None]:
        gate, up = u.chunk(2, dim=1)
        x = self.room(u, out)
        return torch.mul(torch.nn.functional.gelu(gate, approximate="tanh"), up, out=x), None

    def make_rows(self, u: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor | None, RowCodes | None]:
        return *self.make(u, None, kernels), None

    def gradient(
        self, dx: Tensor, u: Tensor, statistics: Tensor | None, update: InputUpdate | None, kernels: Kernels
    ) -> Tensor:
        if update is not None:
            dx = kernels.apply_update(dx, update)
        gate, up = u.chunk(2, dim=1)
        du = torch.empty_like(u)
        dgate, dup = du.chunk(2, dim=1)
        torch.mul(dx, torch.nn.functional.gelu(gate, approximate="tanh"), out=dup)
        dgate.copy_(torch.ops.aten.gelu_backward(dx * up, gate, approximate="tanh"))
        return du


@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedGLUInput(_Gated):
    """x = (up + 1) gate sigmoid(alpha gate) for u = [gate | up], with gate <= limit and |up| <= limit (gpt-oss).

    Plain torch whatever the backend, in fp32; the backend only makes the adapters' update.

    Args:
        alpha: steepness of the gate's sigmoid.
        limit: values beyond it count as it, and have no gradient.
    """

    alpha: float
    limit: float

    def _parts(self, u: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor, Tensor]:
        """Returns gate and up + 1 within their limits, and the gate's sigmoid, in fp32."""
        gate, up = u.to(torch.float32).chunk(2, dim=1)
        gate = gate.clamp(max=self.limit)
        return gate, up.clamp(-self.limit, self.limit) + 1.0, kernels.sigmoid(gate * self.alpha)

    def make(self, u: Tensor, out: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor | None]:
        gate, up, sigmoid = self._parts(u, kernels)
        x = self.room(u, out)
        return x.copy_(gate.mul_(sigmoid).mul_(up)), None

    def make_rows(self, u: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor | None, RowCodes | None]:
        return *self.make(u, None, kernels), None

    def gradient(
        self, dx: Tensor, u: Tensor, statistics: Tensor | None, update: InputUpdate | None, kernels: Kernels
    ) -> Tensor:
        if update is not None:
            dx = kernels.apply_update(dx, update)
        gate, up, sigmoid = self._parts(u, kernels)
        given_gate, given_up = u.chunk(2, dim=1)
        du = torch.empty_like(u)
        dgate, dup = du.chunk(2, dim=1)
        dup.copy_((dx * (gate * sigmoid)).masked_fill_(given_up.abs() > self.limit, 0.0))
        slope = sigmoid * (1.0 + self.alpha * gate * (1.0 - sigmoid))
        dgate.copy_((dx * up * slope).masked_fill_(given_gate > self.limit, 0.0))
        return du


@dataclass(frozen=True, slots=True)
class SquaredReLUInput(MadeFirst):
    """x = relu(u)^2 (arXiv 2109.08668). Plain torch whatever the backend, in fp32; the backend only makes the adapters'
    update."""

    def make(self, u: Tensor, out: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor | None]:
        x = u.to(torch.promote_types(u.dtype, torch.float32)).relu().square_()
        return (x.to(u.dtype) if out is None else out.copy_(x)), None

    def make_rows(self, u: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor | None, RowCodes | None]:
        return *self.make(u, None, kernels), None

    def gradient(
        self, dx: Tensor, u: Tensor, statistics: Tensor | None, update: InputUpdate | None, kernels: Kernels
    ) -> Tensor:
        if update is not None:
            dx = kernels.apply_update(dx, update)
        wide = torch.promote_types(u.dtype, torch.float32)
        return (2.0 * u.to(wide).relu() * dx).to(u.dtype)
