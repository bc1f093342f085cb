"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) on flat fp32 buffers, without host synchronisation.

The learning rate, the step count, the clip factor, the loss scale and the skip flag are device tensors. A step
whose gradient or loss is not finite, or lies above a limit, leaves weights, moments and the step count unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.distributed.mesh import Mesh
from engine.distributed.sharding import NamedShard
from engine.optim.backends import TORCH, AdamWState, OptimizerBackend, Update
from engine.optim.flat import FlatParameters
from engine.optim.host_state import PIECE_ELEMENTS, StreamedUpdate
from engine.optim.loss_scale import LossScale
from engine.optim.reduce import gradient_norm


class FlatAdamW:
    """Clips the gradient, updates the masters and publishes the weights.

    Args:
        flat: buffers; the gradient must be summed over all ranks before `step`. Moments lie like its masters: where
            they are sharded, a rank has and updates its own part.
        mesh: for the norm.
        betas, eps, weight_decay: of AdamW; decay is decoupled and skips norm weights and biases.
        clip_grad_norm: largest L2 norm of the gradient; 0 turns clipping off.
        backend: updates the buffers.
        piece_elements: number of offloaded masters that are updated together.
        loss_scale: the factor of the loss, and so of the gradient; None for 1.
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
        backend: OptimizerBackend = TORCH,
        piece_elements: int = PIECE_ELEMENTS,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.flat, self._mesh, self._backend = flat, mesh, backend
        self.loss_scale = loss_scale
        device = flat.gradient.device
        self.exp_avg = flat.state()
        self.exp_avg_sq = flat.state()
        self.reference: Tensor | None = None
        """Earlier masters that the trained model is compared with; None where nothing compares with such."""
        self.step_count = torch.zeros((), dtype=torch.float32, device=device)
        """Updates applied so far: AdamW's t."""
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        self._scaled = {
            factor: torch.zeros_like(self.lr)
            for factor in sorted({region.lr_factor for region in flat.regions} - {1.0})
        }
        self.skip = torch.zeros((), dtype=torch.float32, device=device)
        """1 where the last step was skipped: its gradient or loss was not finite, or above its limit."""
        self.norm_limit = torch.full_like(self.lr, torch.finfo(torch.float32).max)
        """A step whose gradient norm, before clipping, is larger is skipped; the largest number where there is no
        limit."""
        self.loss_limit = self.norm_limit.clone()
        """A step whose loss is larger is skipped."""
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)
        """Steps skipped so far."""
        self._clip_factor: Tensor | None = None
        self._piece_elements = piece_elements
        self._update: Update
        self.set_options(betas=betas, eps=eps, weight_decay=weight_decay, clip_grad_norm=clip_grad_norm)

    def set_options(
        self, *, betas: tuple[float, float], eps: float, weight_decay: float, clip_grad_norm: float
    ) -> None:
        """Sets the numbers of the next steps, which stay what they are until this is called again; moments stay.

        Not between the capture of a graph of the step and its replay. Arguments as of the constructor.
        """
        self._clip = clip_grad_norm
        clips = clip_grad_norm > 0 or self.loss_scale is not None
        self._clip_factor = torch.ones_like(self.lr) if clips else None
        state = AdamWState(
            flat=self.flat,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            rates={1.0: self.lr, **self._scaled},
            step_count=self.step_count,
            clip=self._clip_factor,
            skip=self.skip,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
        if self.flat.host is None:
            self._update = self._backend.bind(state)
        else:
            self._update = StreamedUpdate(state, self._backend, elements=self._piece_elements)

    def step(self, lr: float | Tensor, loss: Tensor | None = None) -> Tensor:
        """Updates once from the summed gradient, and zeroes it for the next step.

        Args:
            lr: learning rate of this step, of parameters with a factor of their own times that; a number, or a 0-dim
                tensor on the device.
            loss: 0-dim fp32, equal on all ranks; None where it does not decide whether the step is skipped.

        Returns:
            0-dim fp32 gradient norm before clipping, without the loss scale.
        """
        self.lr.fill_(lr)
        for factor, rate in self._scaled.items():
            torch.mul(self.lr, factor, out=rate)
        if self.flat.sharding.weights is not None:
            self.flat.sharding.weights.reshard()
        norm = gradient_norm(self.flat, self._mesh, self._backend.square_sum)
        scale = None if self.loss_scale is None else self.loss_scale.value
        if scale is not None:
            norm = norm / scale
        # a comparison with NaN is false, so that NaN is skipped, too
        applies = norm <= self.norm_limit
        if loss is not None:
            applies = applies & (loss <= self.loss_limit)
        self.skip.copy_(~applies)
        self.skipped.add_(self.skip)
        if self._clip_factor is not None:
            if self._clip > 0:  # as torch.nn.utils.clip_grad_norm_ does it
                self._clip_factor.copy_((self._clip / (norm + 1e-6)).clamp(max=1.0))
            if scale is not None:
                self._clip_factor.copy_((self._clip_factor if self._clip > 0 else 1.0) / scale)
        self._update()
        if self.loss_scale is not None:
            self.loss_scale.update(norm)
        self.step_count.add_(1.0 - self.skip)
        return norm

    def state_shards(self) -> list[NamedShard]:
        """Returns masters, moments and reference of this rank as named shards, for saving and loading."""
        states = {"master": self.flat.master, "optim.exp_avg": self.exp_avg, "optim.exp_avg_sq": self.exp_avg_sq}
        if self.reference is not None:
            states["reference"] = self.reference
        return [shard for name, flat in states.items() for shard in self.flat.shards(name, flat)]
