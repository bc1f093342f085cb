"""The rules of `engine.hybrids.ops.recurrence`: the gated delta rule, and Mamba2's state space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.hybrids.kernels import HybridKernels
from engine.hybrids.ops.recurrence import Inputs, of_tokens
from engine.hybrids.pieces import Pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRule:
    """The gated delta rule of q, k, v, decay and beta; see `engine.hybrids.reference.delta_forward`.

    Args:
        scale: on normalised queries.
    """

    by_token: ClassVar[tuple[bool, ...]] = (True,) * 5
    scale: float
    kernels: HybridKernels

    def forward(
        self, inputs: Inputs, pieces: Pieces, initial: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        return self.kernels.delta_forward(*inputs, pieces, initial, scale=self.scale, keep=keep)

    def backward(
        self,
        d_out: Tensor,
        d_final: Tensor | None,
        inputs: Inputs,
        pieces: Pieces,
        initial: Tensor | None,
        kept: tuple[Tensor, ...],
    ) -> tuple[Tensor | None, ...]:
        return self.kernels.delta_backward(d_out, d_final, *inputs, pieces, initial, scale=self.scale, kept=kept)

    def step(self, inputs: Inputs, states: Tensor) -> Tensor:
        return self.kernels.delta_step(*inputs, states, scale=self.scale)

    def state_shape(self, inputs: Inputs) -> tuple[int, ...]:
        _, k, v, _, _ = inputs
        return v.shape[1], k.shape[2], v.shape[2]

    def reduced(self, inputs: Inputs, pieces: Pieces) -> tuple[Tensor, Tensor]:
        heads, keys, values = self.state_shape(inputs)
        like = inputs[2]
        wide = torch.promote_types(like.dtype, torch.float32)
        moves = like.new_zeros((len(pieces.sent), heads, keys, keys), dtype=wide)
        adds = like.new_zeros((len(pieces.sent), heads, keys, values), dtype=wide)
        if not pieces.sent:
            return moves, adds
        # C is the last state after zeros, and M what comes of an identity without values: both are states of one pass
        own, tokens = pieces.chosen(pieces.sent, received=True, sent=True)
        q, k, v, decay, beta = of_tokens(self, inputs, tokens)
        v = torch.cat((v, v.new_zeros((*v.shape[:2], keys))), dim=2)
        start = torch.cat((adds, torch.eye(keys, dtype=wide, device=v.device).expand_as(moves)), dim=3)
        _, final, _ = self.forward((q, k, v, decay, beta), own, start, keep=False)
        assert final is not None
        adds, moves = final.split([values, keys], dim=3)
        return moves, adds

    def moved(self, move: Tensor, state: Tensor) -> Tensor:
        return move @ state

    def moved_back(self, move: Tensor, gradient: Tensor) -> Tensor:
        return move.transpose(-1, -2) @ gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpace:
    """Mamba2's state space of x, dt, a, b, c and d; see `engine.hybrids.state_space_reference.ssd_forward`."""

    by_token: ClassVar[tuple[bool, ...]] = (True, True, False, True, True, False)
    kernels: HybridKernels

    def forward(
        self, inputs: Inputs, pieces: Pieces, initial: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        return self.kernels.ssd_forward(*inputs, pieces, initial, keep=keep)

    def backward(
        self,
        d_out: Tensor,
        d_final: Tensor | None,
        inputs: Inputs,
        pieces: Pieces,
        initial: Tensor | None,
        kept: tuple[Tensor, ...],
    ) -> tuple[Tensor | None, ...]:
        return self.kernels.ssd_backward(d_out, d_final, *inputs, pieces, initial, kept=kept)

    def step(self, inputs: Inputs, states: Tensor) -> Tensor:
        return self.kernels.ssd_step(*inputs, states)

    def state_shape(self, inputs: Inputs) -> tuple[int, ...]:
        x, _, _, b, _, _ = inputs
        return x.shape[1], x.shape[2], b.shape[2]

    def reduced(self, inputs: Inputs, pieces: Pieces) -> tuple[Tensor, Tensor]:
        x, count = inputs[0], len(pieces.sent)
        wide = torch.promote_types(x.dtype, torch.float32)
        if not count:
            shape = self.state_shape(inputs)
            return x.new_zeros((0, shape[0], 1, 1), dtype=wide), x.new_zeros((0, *shape), dtype=wide)
        own, tokens = pieces.chosen(pieces.sent, received=False, sent=True)
        parts = of_tokens(self, inputs, tokens)
        _, adds, _ = self.forward(parts, own, None, keep=False)
        assert adds is not None
        _, dt, a, _, _, _ = parts
        sums = torch.stack([one.sum(0) for one in (dt * a).split(own.lengths)])
        return sums.exp()[..., None, None].to(wide), adds

    def moved(self, move: Tensor, state: Tensor) -> Tensor:
        return move * state

    def moved_back(self, move: Tensor, gradient: Tensor) -> Tensor:
        return move * gradient
