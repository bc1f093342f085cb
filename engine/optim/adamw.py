"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) on flat fp32 buffers, without host synchronisation.

The learning rate, the step count, the clip factor and the non-finite flag are device tensors. A step whose gradient is
not finite leaves weights, moments and the step count as they were.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from engine.distributed.mesh import Mesh
from engine.distributed.sharding import NamedShard
from engine.optim.flat import FlatParameters
from engine.optim.reduce import gradient_norm


class FlatAdamW:
    """Clip, update, publish.

    Args:
        flat: buffers; the gradient must be summed over all ranks before `step`.
        mesh: for the norm.
        betas, eps, weight_decay: of AdamW; decay is decoupled and skips vectors (norm weights and biases).
        clip_grad_norm: largest L2 norm of the gradient; 0 turns clipping off.
    """

    def __init__(
        self,
        flat: FlatParameters,
        mesh: Mesh,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip_grad_norm: float,
    ) -> None:
        self.flat, self._mesh = flat, mesh
        self._betas, self._eps, self._decay, self._clip = betas, eps, weight_decay, clip_grad_norm
        device = flat.master.device
        self.exp_avg = torch.zeros_like(flat.master)
        self.exp_avg_sq = torch.zeros_like(flat.master)
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        """Updates applied so far: AdamW's t."""
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        self.non_finite = torch.zeros((), dtype=torch.float32, device=device)
        """1 where the last gradient was not finite."""
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)
        """Steps skipped so far."""

    def _slices(self, buffer: Tensor, *, decays: bool) -> list[Tensor]:
        return [buffer[region.start : region.stop] for region in self.flat.regions if region.decays == decays]

    def step(self, lr: float) -> Tensor:
        """One update from the summed gradient; the gradient is zeroed for the next one.

        Args:
            lr: learning rate of this step.

        Returns:
            0-dim fp32 gradient norm before clipping.
        """
        self.lr.fill_(lr)
        norm = gradient_norm(self.flat, self._mesh)
        self.non_finite.copy_(~torch.isfinite(norm))
        self.skipped.add_(self.non_finite)
        if self._clip > 0:
            # as torch.nn.utils.clip_grad_norm_ does it
            self.flat.gradient.mul_((self._clip / (norm + 1e-6)).clamp(max=1.0))
        before = self.updates.clone()
        for decays in (True, False):
            self._update(decays=decays, before=before)
        self.flat.publish()
        self.flat.gradient.zero_()
        return norm

    def _update(self, *, decays: bool, before: Tensor) -> None:
        parameters = self._slices(self.flat.master, decays=decays)
        if not parameters:
            return
        steps = [before.clone() for _ in parameters]
        adamw(
            parameters,
            self._slices(self.flat.gradient, decays=decays),
            self._slices(self.exp_avg, decays=decays),
            self._slices(self.exp_avg_sq, decays=decays),
            [],
            steps,
            foreach=False,
            fused=True,
            found_inf=self.non_finite,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=self.lr,
            weight_decay=self._decay if decays else 0.0,
            eps=self._eps,
            maximize=False,
        )
        self.updates.copy_(steps[0])

    def state_shards(self) -> list[NamedShard]:
        """Masters and moments as named shards, for saving and loading."""
        return (
            self.flat.shards("master", self.flat.master)
            + self.flat.shards("optim.exp_avg", self.exp_avg)
            + self.flat.shards("optim.exp_avg_sq", self.exp_avg_sq)
        )
