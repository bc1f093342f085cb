"""A linear recurrence of states within documents, also where these lie on several context ranks.

One function of autograd serves all rules; a `Rule` says what is computed within pieces, and what a piece does to a
state, S -> M S + C. See `engine.hybrids.ops.passing` for how states reach the next rank.

Legend: T tokens, N heads, R received pieces of this rank.
"""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.distributed.mesh import Axis
from engine.hybrids.ops.passing import first_states, gathered, last_gradients
from engine.hybrids.pieces import Pieces

Inputs = tuple[Tensor, ...]


class Rule(Protocol):
    """What a recurrence computes. Its first input is [T, ..], or as the rule says."""

    def forward(
        self, inputs: Inputs, pieces: Pieces, initial: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Returns the output, the last states of `pieces.sent` (None where none is), and tensors for `backward`.

        Args:
            initial: fp32, the states that `pieces.received` begin with; None where none is received.
            keep: whether a backward follows.
        """
        ...

    def backward(
        self,
        d_out: Tensor,
        d_final: Tensor | None,
        inputs: Inputs,
        pieces: Pieces,
        initial: Tensor | None,
        kept: tuple[Tensor, ...],
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the inputs, and of the initial states last."""
        ...

    def step(self, inputs: Inputs, states: Tensor) -> Tensor:
        """Returns the output of a token of each row, and updates the rows' states, fp32, where they are."""
        ...

    def of_tokens(self, inputs: Inputs, tokens: Tensor) -> Inputs:
        """Returns the inputs of these tokens, int64."""
        ...

    def state_shape(self, inputs: Inputs) -> tuple[int, ...]:
        """Returns the shape of a state, heads first."""
        ...

    def reduced(self, inputs: Inputs, pieces: Pieces) -> tuple[Tensor, Tensor]:
        """Returns M and C of the sent pieces, fp32 [sent, N, ..]; M of a document's first piece is not read."""
        ...

    def moved(self, move: Tensor, state: Tensor) -> Tensor:
        """Returns M S."""
        ...

    def moved_back(self, move: Tensor, gradient: Tensor) -> Tensor:
        """Returns M^T dS."""
        ...


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, pieces: Pieces, axis: Axis, *inputs: Tensor) -> Tensor:
        initial = moves = None
        if axis.size > 1 and pieces.chains:
            initial, moves = _received(rule, inputs, pieces, axis)
        out, _, kept = rule.forward(inputs, pieces, initial, keep=any(ctx.needs_input_grad))
        ctx.save_for_backward(initial, moves, *inputs, *kept)
        ctx.rule, ctx.pieces, ctx.axis, ctx.count = rule, pieces, axis, len(inputs)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        initial, moves, *saved = ctx.saved_tensors
        inputs, kept = tuple(saved[: ctx.count]), tuple(saved[ctx.count :])
        d_out, d_final = d_out.contiguous(), None
        if moves is not None:
            d_final = _last(ctx.rule, d_out, inputs, ctx.pieces, initial, moves, ctx.axis)
        found = ctx.rule.backward(d_out, d_final, inputs, ctx.pieces, initial, kept)
        return None, None, None, *found[:-1]


def _received(rule: Rule, inputs: Inputs, pieces: Pieces, axis: Axis) -> tuple[Tensor | None, Tensor]:
    """Returns the states that received pieces begin with, None where none is received, and M of all ranks' sent
    pieces, [ranks, most sent, N, ..]. Collective."""
    moves, adds = rule.reduced(inputs, pieces)
    sizes = [prod(one.shape[2:]) for one in (adds, moves)]
    every = gathered(torch.cat((adds.flatten(2), moves.flatten(2)), dim=2), pieces.most_sent, axis)
    every_adds, every_moves = (
        part.unflatten(-1, one.shape[2:]) for part, one in zip(every.split(sizes, dim=-1), (adds, moves), strict=True)
    )
    initial = first_states(every_moves, every_adds, pieces, rule.moved)
    return initial if pieces.received else None, every_moves


def _last(
    rule: Rule, d_out: Tensor, inputs: Inputs, pieces: Pieces, initial: Tensor | None, moves: Tensor, axis: Axis
) -> Tensor | None:
    """Returns the gradients of the last states of sent pieces; None where none is sent. Collective."""
    adds = moves.new_zeros((len(pieces.received), *rule.state_shape(inputs)))
    if initial is not None:
        own, tokens = pieces.chosen(pieces.received, received=True, sent=False)
        parts = rule.of_tokens(inputs, tokens)
        # what the pieces' own outputs give; kernels keep nothing of this part of the tokens
        _, _, kept = rule.forward(parts, own, initial, keep=True)
        found = rule.backward(d_out[tokens], None, parts, own, initial, kept)[-1]
        assert found is not None
        adds = found
    every = gathered(adds, pieces.most_received, axis)
    gradients = last_gradients(moves, every, pieces, rule.moved_back)
    return gradients if pieces.sent else None


def recurrence(rule: Rule, inputs: Inputs, pieces: Pieces, axis: Axis) -> Tensor:
    """Computes a rule within documents.

    Args:
        inputs: of the rule.
        pieces: of this rank's tokens.
        axis: the context ranks.
    """
    out: Tensor = _Recurrence.apply(rule, pieces, axis, *inputs)
    return out
